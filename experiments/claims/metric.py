"""The title, measured: do located heads' queries and keys compare texts by class, on new categories?"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

import icl_lens as il
from experiments.claims.arrivals import Arrivals, Retrieved, arrivals
from experiments.claims.rivals import beyond
from experiments.lab.competence import MARGIN
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, by_name, legend_below, means, name_heads, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, stack, where
from experiments.lab.intervals import Estimate, mean_estimate
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, cannot_tell, told, verdict
from icl_lens.models import scores
from icl_lens.report.palette import BLUE, GREEN, GREY, ORANGE
from icl_lens.report.plots import DIVERGING, PAGE

LEAST = 0.55
"""A tenth of the way from chance, which is one half for both yardsticks, to one."""

YARDSTICKS = {"auroc": "AUROC", "first": "precision@1"}
RIVALS = {
    "cosine": "cosine of the same inputs",
    "centred": "their cosine, means taken out",
    "rotated": "keys rotated at random",
}
OWN_INPUTS = ("cosine", "centred")
"""Rivals that the paper's own account makes good: it has the features in the inputs already."""


@dataclass(frozen=True)
class MetricConfig:
    """Tasks to judge on: the first two that share no category with the task heads are located on; heads and controls.

    `prompts` of each task, which take turns in two-tower's cells; random rotations; words of a class in the figure.
    """

    others: tuple[str, ...] = ("animal-country", "fruit-instrument", "sentiment-number")
    heads: int = 6
    controls: int = 20
    prompts: int = 240
    rotations: int = 5
    words: int = 8


def table(study: Study, config: MetricConfig) -> pd.DataFrame:
    """group ("located" | "random"), layer, name, task, prompt, query, correct, and each yardstick (0–1) by column.

    `auroc`, `first`: of the head's scores, rotary models at a label's median distance; located heads also
    `cosine_…`, `centred_…` (inputs less the means of queries and of each stratum's keys), `rotated_…` (mean over
    random rotations, each the way that is better for it), `pooled_…`, `pooled_cosine_…` (among labels of all places and
    words together) and, for rotary models, `content_…` (rotation left out). `symmetric`, `rank`: symmetric share and
    effective rank of the form, over the size of a head. group "matrix": standardised mean `score` of the located head
    of largest AUROC between words `asked` and `shown`.
    """
    compared = Comparison.of(study, located_for_both(study, study.few(config.heads)), config.controls)
    layers = tuple(sorted({head.layer for head in compared.heads}))
    tasks = [arrivals(study, task, layers, config.prompts) for task in held_out(study, config)]
    words = {word: i for i, word in enumerate(dict.fromkeys(word for one in tasks for word in one.query_words))}
    cosines = [{head.layer: _cosines(study, head, one) for head in compared.located} for one in tasks]

    def frame(head: il.Head) -> pd.DataFrame:
        frames = []
        for place, one in enumerate(tasks):
            found = _own(study, head, one)
            if head in compared.located:
                found |= cosines[place][head.layer] | _otherwise(study, head, one, config)
            columns = {
                f"{name}{what}": getattr(each, what).numpy() for name, each in found.items() for what in YARDSTICKS
            }
            identity = {"prompt": np.arange(len(one.query_words)) + place * study.settings.n, "task": one.task}
            identity["query"] = [words[word] for word in one.query_words]
            frames.append(pd.DataFrame(identity | {"correct": one.right.numpy()} | columns))
        shape = _metric(study, head, tasks[0])
        return stack(*frames).assign(
            symmetric=shape.symmetric_share, rank=shape.effective_rank / shape.query_side.shape[1]
        )

    rows = stack(*compared.rows(frame))
    own = where(rows, group="located")
    head = max(compared.located, key=lambda head: array(where(own, name=str(head)), "auroc").mean())
    return stack(rows, _matrix(study, head, tasks[0], config).assign(group="matrix", name=str(head)))


def held_out(study: Study, config: MetricConfig) -> list[str]:
    """The tasks to judge on: two that share no category with the one heads are located on, if the word list has them.

    Raises InputError if it has none.
    """
    own = {*study.settings.task.split("-")}
    found = []
    for task in config.others:
        if own & {*task.split("-")}:
            continue
        try:
            study.batch(Variant(task=task))
        except il.InputError:
            continue
        found.append(task)
    if not found:
        raise il.InputError(
            f"none of the tasks {', '.join(config.others)} can be asked beside {study.settings.task}; give a word list "
            "that has their categories"
        )
    return found[:2]


@torch.no_grad()
def _own(study: Study, head: il.Head, one: Arrivals) -> dict[str, Retrieved]:
    """By the head's own scores."""
    similarity = _metric(study, head, one).scores(*one.at(head.layer)).cpu()
    return {"": one.retrieved(similarity), "pooled_": one.retrieved(similarity, pooled=True)}


@torch.no_grad()
def _cosines(study: Study, head: il.Head, one: Arrivals) -> dict[str, Retrieved]:
    """By the cosine of what the heads of a layer compare, before W_Q and W_K."""
    metric = _metric(study, head, one)
    x, y = (metric.inputs(each).cpu() for each in one.at(head.layer))
    cosine = normalize(x, dim=-1) @ normalize(y, dim=-1).T
    apart = y.clone()
    for keys in one.strata:
        apart[keys] -= y[keys].mean(0)
    centred = normalize(x - x.mean(0), dim=-1) @ normalize(apart, dim=-1).T
    return {
        "cosine_": one.retrieved(cosine),
        "pooled_cosine_": one.retrieved(cosine, pooled=True),
        "centred_": one.retrieved(centred),
    }


@torch.no_grad()
def _otherwise(study: Study, head: il.Head, one: Arrivals, config: MetricConfig) -> dict[str, Retrieved]:
    """By the head's scores if its keys were rotated at random, and for rotary models without rotation.

    An untrained metric ranks classes by chance one way or the other: each counts the way that is better for it.
    """
    metric, (x, y) = _metric(study, head, one), one.at(head.layer)
    seeds = range(study.settings.seed, study.settings.seed + config.rotations)
    drawn = [better_way(one, metric.untrained(seed=seed).scores(x, y).cpu()) for seed in seeds]
    found = {"rotated_": Retrieved(*(torch.stack(each).mean(0) for each in zip(*drawn, strict=True)))}
    if metric.rotation is not None:
        found["content_"] = one.retrieved(il.query_key_metric(study.view, head).scores(x, y).cpu())
    return found


def better_way(one: Arrivals, similarity: Float[Tensor, "query key"]) -> Retrieved:
    """By these scores or by their opposites, whichever AUROC is larger over all queries."""
    return max((one.retrieved(sign * similarity) for sign in (1, -1)), key=lambda found: float(found.auroc.nanmean()))


def _metric(study: Study, head: il.Head, one: Arrivals) -> il.QueryKeyMetric:
    """At a label's median distance, where queries and keys are rotated."""
    rotates = scores.score_view(study.view, head.layer).position == "rotary"
    return il.query_key_metric(study.view, head, distance=one.distance if rotates else None)


@torch.no_grad()
def _matrix(study: Study, head: il.Head, one: Arrivals, config: MetricConfig) -> pd.DataFrame:
    """asked, shown (words), score: of the words asked about most in each class, standardised within each stratum."""
    similarity = _metric(study, head, one).scores(*one.at(head.layer)).cpu()
    for keys in one.strata:
        here = similarity[:, keys]
        alone = len(keys) < 2  # nothing to be compared with
        similarity[:, keys] = torch.nan if alone else (here - here.mean(1, keepdim=True)) / here.std(1, keepdim=True)
    # One class beside the other, so that what compares classes shows as blocks.
    asked = _most_frequent(one.query_words, one.query_class.tolist(), config.words)
    shown = _most_frequent(one.key_words, one.key_class.tolist(), config.words)
    rows, columns = (
        torch.tensor([[each == word for each in every] for word in some]).float()
        for every, some in ((one.query_words, asked), (one.key_words, shown))
    )
    total, count = mean_parts(similarity, rows, columns)
    axes = pd.MultiIndex.from_product([asked, shown], names=["asked", "shown"]).to_frame(index=False)
    return axes.assign(score=(total / count).flatten().numpy())


def mean_parts(
    similarity: Float[Tensor, "query key"], rows: Float[Tensor, "word query"], columns: Float[Tensor, "shown key"]
) -> tuple[Float[Tensor, "word shown"], Float[Tensor, "word shown"]]:
    """Sum and number of the scores between queries and keys of each pair of words, those that are none left out.

    A stratum of one key has no standard deviation, and its scores are none.
    """
    there = similarity.isfinite().float()
    return rows @ similarity.nan_to_num(0.0, 0.0, 0.0) @ columns.T, rows @ there @ columns.T


def _most_frequent(words: list[str], classes: list[bool], count: int) -> list[str]:
    """So many words of each class, one class after the other."""
    pairs = Counter(zip(classes, words, strict=True)).most_common()
    return [word for kind in (False, True) for word in [word for (own, word), _ in pairs if own == kind][:count]]


def competence_of(table: pd.DataFrame) -> dict[str, Estimate]:
    """The model's accuracy on each task."""
    tasks = dict.fromkeys(str(task) for task in table["task"])
    return {task: mean_estimate(by_prompt(table, "correct", task=task), bounds=SHARE) for task in tasks}


def tasks_done(accuracies: Mapping[str, Estimate]) -> list[str]:
    """The tasks of which the model does more than guess."""
    return [task for task, accuracy in accuracies.items() if accuracy.low > 0.5 + MARGIN]


def claim(table: pd.DataFrame) -> Verdict:
    """AUROC and precision@1 of located heads: above chance, and above every rival by a tenth of what it leaves."""
    table = table.loc[table["group"] != "matrix"]
    able = competence_of(table)
    said = {task: f"{task} (accuracy {accuracy.value:.1%})" for task, accuracy in able.items()}
    done = tasks_done(able)
    if not done:
        return cannot_tell(f"the model does not do {' nor '.join(said.values())}", unit="AUROC")
    table = table.loc[table["task"].isin(done)]
    parts, without_cosine = [], []
    for value, unit in YARDSTICKS.items():
        heads = beside(table, value)
        of_heads = heads.drawn.estimate(heads.located, bounds=SHARE)
        others = [verdict(of_heads, least=LEAST, unit=unit, what="texts by class, in located heads")]
        rivals = {
            name: beyond(heads, beside(table, f"{name}_{value}").located, unit=unit, what=unit, whom=whom)
            for name, whom in RIVALS.items()
        }
        others += [judged for name, judged in rivals.items() if name not in OWN_INPUTS]
        others.append(beyond(heads, heads.random, unit=unit, what=unit, whom=f"{heads.named} of the same layers"))
        parts += [*others, *(rivals[name] for name in OWN_INPUTS)]
        without_cosine += others
    located, other = (where(table, group=group).drop_duplicates("name") for group in ("located", "random"))
    notes = [
        f"without the cosine as a rival: {all_of(*without_cosine).outcome}",
        f"judged on {' and '.join(said[task] for task in done)}",
    ]
    if len(done) < len(able):
        notes.append(f"not on {' and '.join(said[task] for task in able if task not in done)}, not done by the model")
    pooled = [beside(table, f"pooled_{name}auroc").located[0] for name in ("", "cosine_")]
    notes.append(f"AUROC among labels of all places and words together {pooled[0]:.3g}, of the cosine {pooled[1]:.3g}")
    if "content_auroc" in table and bool(table["content_auroc"].notna().any()):
        notes.append(f"AUROC without rotation {beside(table, 'content_auroc').located[0]:.3g}")
    notes += [
        f"{what} {located[column].mean():.2g} in located heads, {other[column].mean():.2g} in the others"
        for column, what in (("symmetric", "symmetric share"), ("rank", "effective rank over the head's size"))
    ]
    return told(all_of(*parts), *notes)


def figure(table: pd.DataFrame) -> Figure:
    """Both yardsticks by located head, beside its rivals; the scores of the one that does best, between words.

    Over the tasks that the model does, or over all where it does none.
    """
    drawn = Figure(figsize=(PAGE, 2.9), layout="constrained")
    axes = drawn.subplots(1, 3, width_ratios=(1, 1, 0.95))
    matrix = where(table, group="matrix")
    table = table.loc[table["group"] != "matrix"]
    if done := tasks_done(competence_of(table)):
        table = table.loc[table["task"].isin(done)]
    for ax, (value, unit) in zip(axes, YARDSTICKS.items(), strict=False):
        _bars(ax, table, value)
        ax.set(ylabel=f"{unit} (0–1)", xlabel="Located heads, best first")
    _words(drawn, axes[2], matrix)
    legend_below(drawn, axes[0], columns=5)
    return drawn


def _bars(ax: Axes, table: pd.DataFrame, value: str) -> None:
    located = where(table, group="located").drop_duplicates("name")
    names, layers = list(located["name"]), list(located["layer"])
    own = where(table, group="located")
    series = {
        "head's metric": (ORANGE, by_name(own, value, names)),
        "cosine": (BLUE, by_name(own, f"cosine_{value}", names)),
        "cosine, centred": ("#8fc3e6", by_name(own, f"centred_{value}", names)),
        "keys rotated": (GREEN, by_name(own, f"rotated_{value}", names)),
        "other heads, same layer": (GREY, [matched(where(table, layer=layer), value) for layer in layers]),
    }
    for i, (label, (hue, samples)) in enumerate(series.items()):
        at = np.arange(len(names)) + 0.17 * (i - 2)
        ax.bar(at, means(samples), width=0.17, color=hue, label=label)
        ax.errorbar(at, means(samples), yerr=whiskers(samples), **{**WHISKERS, "capsize": 0.8})
    ax.axhline(0.5, color="0.3", linewidth=0.6, linestyle=":")
    ax.set_ylim(0, 1.02)
    name_heads(ax, names)
    if len(names) > 4:
        ax.tick_params(axis="x", rotation=60)


def _words(drawn: Figure, ax: Axes, matrix: pd.DataFrame) -> None:
    rows, columns = ([*dict.fromkeys(matrix[name])] for name in ("asked", "shown"))
    grid = matrix["score"].to_numpy(dtype=float).reshape(len(rows), -1)
    reach = float(np.nanmax(np.abs(grid))) if np.isfinite(grid).any() else 1.0
    image = ax.imshow(grid, cmap=DIVERGING, vmin=-reach, vmax=reach, interpolation="nearest")
    named = [[word.replace("$", r"\$") for word in words] for words in (rows, columns)]
    ax.set_yticks(range(len(rows)), named[0], fontsize=4.5)
    ax.set_xticks(range(len(columns)), named[1], fontsize=4.5, rotation=90)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="Label's text (key)", ylabel="Text asked about (query)")
    ax.set_title(f"{matrix['name'].iloc[0]} (largest AUROC), standardised", fontsize=7, fontweight="normal")
    drawn.colorbar(image, ax=ax, shrink=0.8).ax.tick_params(labelsize=6)


EXPERIMENT = Experiment(
    id="metric",
    title="The metric, measured",
    source="Open (ours: better than the cosine of its own inputs)",
    claim=(
        "Queries and keys of located heads compare texts by their class better than the cosine of their own inputs "
        "does."
    ),
    criterion=(
        "Heads are located on one task and judged on others, with none of its categories. Their scores between texts "
        "asked about and labels of texts, both as they really arrive, rank texts of one class above those of the "
        "other: AUROC and precision@1 a tenth of the way from chance to one, and beyond each rival by a tenth of what "
        "it leaves: the cosine of the same inputs, plain and with means taken out, the other heads of the layers, and "
        "the same head with keys rotated at random, ranked the way that is better for it. Labels that come behind the "
        "word asked about are left out; compared are labels that stand at the same place, bear the same word, and "
        "whose texts have as many tokens. Tasks that the model does not do are left out."
    ),
    paper=None,
    departs=(
        "The paper names the two towers (title, sections 4.4 and 6.1) and shows attention and words; it does not "
        "measure the metric, nor claim that it beats its inputs' cosine: that features are in these inputs already is "
        "what it says itself. What comes out when the cosine is no rival is told beside. Where that cosine leaves "
        "less than a twentieth to be won, nothing can be "
        "supported: such results are undecided, or not supported if located heads are no better at all. Everything "
        "here, the rivals and the held-out categories included, is added."
    ),
    config=MetricConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
