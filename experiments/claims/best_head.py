"""Appendix D: the single best head: its labels' ranks, its attention on them, and what it is worth alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import icl_lens as il
from experiments.claims import label_attention, label_rank
from experiments.claims.layouts import CLASSES, attention_needs, attention_of
from experiments.lab.controls import Comparison
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, whiskers
from experiments.lab.editing import BAR, FOO, says_without
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, stack, where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, told
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

GROUPS = {"located": ("best head", ORANGE), "second": ("second best", BLUE), "random": ("others of its layer", GREY)}
EDITS = {"removed": "it alone\nset to zero", "kept": "it alone\nat the last position"}


@dataclass(frozen=True)
class BestHeadConfig:
    """The most other heads of its layer, and how many of them, on how many prompts, are removed and kept as well."""

    controls: int = 20
    edited: int = 5
    prompts: int = 200


def table(study: Study, config: BestHeadConfig) -> pd.DataFrame:
    """measure ("rank" | "attention" | "removal"), group ("located" | "second" | "random" | "none"), layer, name, …

    "located" is the best head over both labels as the answer; "random" are the others of its layer, the second best
    among them if it is there. "rank": label, bits, mrr; "attention": layout, label, attention, even; both of every
    head. "removal": edit ("removed": the head is set to zero at every position; "kept": all others are at the last
    position; "": none), answer, correct (0–1), odds (nats), on the first `prompts` of the tested half.
    """
    best, second = best_two(study)
    # The second best head is one of the others where it is in the same layer: none is left out for its values.
    compared = Comparison.of(study, [best], config.controls)
    shown = Comparison((second,), {})
    found = stack(
        *(
            stack(
                label_rank.ranks_of(study, some).assign(measure="rank"),
                attention_of(study, some, [Variant(one) for one in label_attention.LAYOUTS]).assign(
                    measure="attention"
                ),
            ).assign(**group)
            for some, group in ((compared, {}), (shown, {"group": "second"}))
        )
    )
    others = compared.controls[best.layer][: config.edited]
    return stack(found, *_removals(study, best, {"located": (best,), "second": (second,), "random": others}, config))


def best_two(study: Study) -> tuple[il.Head, il.Head]:
    """The two heads that add most on the choosing half, mean over both labels as the answer."""
    mean = sum(study.rises(variant)[study.halves[0]].mean(0) for variant in (FOO, BAR))
    assert not isinstance(mean, int)
    first, second = (il.Head.at(index, mean.shape[1]) for index in mean.flatten().topk(2).indices.tolist())
    return first, second


def _removals(
    study: Study, best: il.Head, groups: dict[str, tuple[il.Head, ...]], config: BestHeadConfig
) -> Iterator[pd.DataFrame]:
    rows = study.test[: config.prompts]
    everything = study.view.heads()
    for answer, variant in (("foo", FOO), ("bar", BAR)):
        alone = [(group, head) for group, heads in groups.items() for head in heads]
        rest = [[other for other in everything if other != head] for _, head in alone]
        what = f"{len(alone)} heads, {answer}"
        whole, *removed = says_without(
            study, variant, rows, [[], *([head] for _, head in alone)], what=f"without {what}"
        )
        kept = says_without(study, variant, rows, rest, positions="last", what=f"with one of {what} alone")
        cases = [("none", "", "", whole)]
        for (group, head), without, only in zip(alone, removed, kept, strict=True):
            cases += [(group, str(head), "removed", without), (group, str(head), "kept", only)]
        for group, name, edit, frame in cases:
            about = {"group": group, "name": name, "edit": edit, "layer": best.layer, "answer": answer}
            yield frame.assign(prompt=rows.tolist(), measure="removal", **about)


def claim(table: pd.DataFrame) -> Verdict:
    """What label-attention and label-rank ask of located heads holds of the best one beside the others of its layer.

    What removing it costs, and what it does alone, is told beside.
    """
    judged = all_of(
        *label_attention.parts(where(table, measure="attention")), label_rank.claim(where(table, measure="rank"))
    )
    removal = where(table, measure="removal")
    whole = where(removal, group="none")
    notes = []
    for edit, text in (("removed", "without it alone"), ("kept", "with it alone at the last position")):
        said = []
        for group, (name, _) in GROUPS.items():
            part = where(removal, group=group, edit=edit)
            if len(part):
                said.append(f"{name} {part['correct'].mean():.0%} and {part['odds'].mean():.3g} nats")
        notes.append(f"{text}: " + ", ".join(said))
    names = [where(table, group=group)["name"].iloc[0] for group in ("located", "second")]
    kept = f"accuracy {whole['correct'].mean():.0%}, log-odds {whole['odds'].mean():.3g} nats"
    return told(judged, f"best {names[0]}, second {names[1]}", f"{kept}; {'; '.join(notes)}")


def figure(table: pd.DataFrame) -> Figure:
    """Ranks of labels, attention on them, and the answer's log-odds without the head and with it alone.

    Best head, second best, others of its layer; 95 % intervals; dashed: no edit.
    """
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    left, middle, right = drawn.subplots(1, 3, width_ratios=(2, 2, 2))
    ranks, attention = where(table, measure="rank"), where(table, measure="attention", layout="order")
    kinds = list(CLASSES)
    _bars(left, [(f"{kind}\nlabels", where(ranks, label=kind)) for kind in kinds], "mrr")
    left.set(ylabel="Mean reciprocal rank of\nthe label in its value (0–1)", ylim=(0, 1.04))
    _bars(middle, [(f"{kind}\nlabels", where(attention, label=kind)) for kind in kinds], "attention")
    middle.set(ylabel="Attention from the last token,\nsum over labels (0–1)")
    removal = where(table, measure="removal")
    _bars(right, [(text, where(removal, edit=edit)) for edit, text in EDITS.items()], "odds")
    right.axhline(0, color="0.3", linewidth=0.6)
    right.axhline(
        where(removal, group="none")["odds"].mean(), color="0.3", linewidth=0.8, linestyle="--", label="no edit"
    )
    right.set(ylabel="Answer's log-odds (nats)")
    legend_below(drawn, left, right)
    return drawn


def _bars(ax: Axes, places: list[tuple[str, pd.DataFrame]], value: str) -> None:
    """A bar for each group at each place."""
    bars: list[tuple[float, float]] = []
    for i, (group, (name, hue)) in enumerate(GROUPS.items()):
        samples = [by_prompt(part, value, group=group) for _, part in places]
        at = np.arange(len(places)) + 0.26 * (i - 1)
        ax.bar(at, means(samples), width=0.26, color=hue, label=name)
        ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
        bars += [pair for pair in zip(at, means(samples), strict=True) if np.isfinite(pair[1])]
    ax.set_xticks(range(len(places)), [text for text, _ in places], fontsize=6)
    mark_zeros(ax, *zip(*bars, strict=True))


EXPERIMENT = Experiment(
    id="best-head",
    title="The single best head",
    source="Appendix D",
    claim="The head with the largest increase alone shows it: labels rank high in it, and true ones get its attention.",
    criterion=(
        "In the best head over both labels as the answer all that label-rank and label-attention ask of located heads "
        "holds, beside the other heads of its layer. What removing it costs, and what is left when it is the only head "
        "at the last position, is told beside."
    ),
    paper="Llama 7B, 13B, 30B: labels rank higher than in random heads, and true ones get more attention",
    about="the best located head",
    departs=(
        "The paper's Appendix D shows labels' ranks and attention in the best head of each Llama model, beside "
        "random heads. What removing that head costs, and what it is worth alone, is added here and decides "
        "nothing."
    ),
    config=BestHeadConfig(),
    needs=(*attention_needs(label_attention.LAYOUTS), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
