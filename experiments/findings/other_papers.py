"""Finding 12: are located heads induction heads or function-vector heads?

1. Induction score (Olsson et al. 2022): on random tokens shown twice, a head's attention from a token's second
   occurrence to the token after its first one. Previous-token score: its attention to the token before. Both are means
   over the tokens of the second showing.
2. Function vector (Todd et al. 2023): the sum of heads' mean outputs at the last position over prompts with one
   assignment of the labels. It is added to prompts whose labels carry no information, and should restore that
   assignment.
3. Indirect effect: what a head's mean output, in place of its own, restores in prompts with shuffled labels.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from experiments.framework.estimate import compare, compare_drawn, compare_heads
from experiments.framework.finding import Finding, Measured, Row, percent
from experiments.framework.function_vectors import N_VECTOR_SETS, assignments, indirect_effects, steered
from experiments.framework.other_tasks import RANDOM_TOKENS
from experiments.framework.overlap import drawn_lists, expected_overlap, overlap
from experiments.framework.plotting import COLORS, cell_rows, legend_below
from experiments.framework.study import Study, clusters_of
from icl_lens.attribution.repeated_tokens import repeat_scores

N_SEQUENCES = 40
"""Number of sequences of random tokens, each shown twice."""

OTHER_HEADS = "other heads of the same layers"
VECTORS = "vector of the located heads added", "vector of random heads added"
AMONG = "located heads among those of largest indirect effect on"
COMMON = "the same number of random heads per layer", "% of the located heads"
MEASURES = (
    percent(
        "induction",
        "induction score of located heads",
        OTHER_HEADS,
        "attention to the token after the earlier occurrence, %",
    ),
    percent("previous", "previous-token score of located heads", OTHER_HEADS, "attention to the token before, %"),
    percent("vector_shuffled", *VECTORS, "accuracy gained on prompts with shuffled labels, points"),
    percent("vector_zero_shot", *VECTORS, "accuracy gained without demonstrations, points"),
    percent("vector_heads", f"{AMONG} probability", *COMMON),
    percent("vector_heads_odds", f"{AMONG} log-odds", *COMMON),
)


def measure(study: Study) -> Measured:
    """Measure located heads' induction and previous-token scores, function vectors, and indirect effects."""
    induction, previous = repeat_scores(study.model, n=N_SEQUENCES, n_tokens=RANDOM_TOKENS, seed=study.seed).unbind(-1)
    scores = {"induction": induction, "previous": previous}
    tasks = list(assignments(study))
    effects = indirect_effects(study, tasks)
    rows = []
    for ranked in study.by_ranking():
        for name, values in scores.items():
            sequences = np.arange(len(values))
            found = compare_heads(values.numpy(), ranked.located, ranked.controls, sequences, bounds=(0, 1))
            note = f"best head of the model: {100 * float(values.mean(0).max()):.1f}%"
            rows.append(Row.from_result(name, found, ranking=ranked.ranking, note=note))
        for name in ("vector_shuffled", "vector_zero_shot"):
            correct, clusters = steered(ranked, tasks, zero_shot=name == "vector_zero_shot")
            gained = correct[:, 1:] - correct[:, :1]
            found = compare(gained[:, 0], gained[:, 1:].mean(1), clusters, bounds=(-1, 1))
            note = f"accuracy with nothing added: {100 * correct[:, 0].mean():.1f}%"
            found = replace(found, n_heads=study.n_located)
            rows.append(Row.from_result(name, found, ranking=ranked.ranking, note=note))
        rows.append(_in_common("vector_heads", ranked, effects.probability, effects.clusters, 100.0, "points"))
        rows.append(_in_common("vector_heads_odds", ranked, effects.log_odds, effects.clusters, 1.0, "nats"))
    return Measured(rows, _heads(study, {**scores, "indirect effect": effects.log_odds}))


def _in_common(
    name: str,
    study: Study,
    effects: Float[Tensor, "row layer head"],
    clusters: Int[np.ndarray, " row"],
    scale: float,
    unit: str,
) -> Row:
    """Compare the overlap of located heads and heads of largest effect with that of random lists."""
    k, own = study.n_located, clusters_of(study.halves()[0])
    lists = (
        drawn_lists(study.head_scores().double().numpy(), own, k, seed=0),
        drawn_lists(effects.double().numpy(), clusters, k, seed=1),
    )
    n_clusters = min(len(set(one.tolist())) for one in (own, clusters))
    found = compare_drawn(overlap(*lists), expected_overlap(*lists), len(effects), n_clusters, n_heads=k, bounds=(0, 1))
    largest = scale * float(effects.double().mean(0).max())
    note = f"largest mean effect of a head: {largest:.2f} {unit}"
    return Row.from_result(name, found, ranking=study.ranking, note=note)


def _heads(study: Study, scores: Mapping[str, Float[Tensor, "row layer head"]]) -> pd.DataFrame:
    """Return a row with the mean scores of each head, for the figure."""
    means = {name: values.double().mean(0) for name, values in {"contrast": study.head_scores(), **scores}.items()}
    located = {*study.located}
    return pd.DataFrame(
        {"head": str(head), "layer": head.layer, "located": head in located}
        | {name: float(mean[head]) for name, mean in means.items()}
        for head in study.view.heads()
    )


def draw(details: pd.DataFrame) -> Figure:
    """Draw each head's induction score and indirect effect against its contrast: one row per model and task."""
    figure, cells = cell_rows(details, 3)
    shown = {
        "induction": ("induction score, %", 100),
        "previous": ("previous-token score, %", 100),
        "indirect effect": ("indirect effect, nats", 1),
    }
    for row, title, part in cells:
        for axes, (name, (label, scale)) in zip(row, shown.items(), strict=True):
            for located, color, group in ((False, "#999999", "other heads"), (True, COLORS[1], "located heads")):
                some = part[part["located"] == located]
                axes.plot(some["contrast"], scale * some[name], "o", color=color, ms=4, label=group)
            axes.set_title(label, fontsize=8)
        row[0].set_ylabel(title.replace(", ", "\n"), fontsize=8)
    for axes in cells[-1][0]:
        axes.set_xlabel("contrast, nats", fontsize=8)
    legend_below(figure, cells[-1][0][0])
    return figure


FINDING = Finding(
    id="other-papers",
    short="induction heads",
    title="Are located heads induction heads or function-vector heads?",
    question="Do located heads do what other papers found: continue repeated tokens, or carry the task as a vector?",
    claim="The paper leaves both questions open: in-context heads write what induction heads write, but their keys "
    "should hold features of the demonstration instead of the previous token (section 2.4). Olsson et al. (2022) argue "
    "that induction heads do in-context learning; Todd et al. (2023) that a few heads' mean outputs carry the task.",
    covers="section 2.4",
    predicted_above=False,
    measures=MEASURES,
    measure=measure,
    look_for="Filled dots near 100%: located heads are induction heads. In the second figure, located heads high in "
    "the left panel are induction heads, and high in the right panel function-vector heads.",
    method=f"Scores are means over {N_SEQUENCES} sequences of {RANDOM_TOKENS} random tokens shown twice (their "
    "number is in the column of prompts), for which uniform attention gives about 3%. A function vector is the sum "
    "of heads' mean outputs at the last position over prompts with one assignment of labels to classes. It is added "
    "to the last position of prompts whose labels are shuffled, or of queries without demonstrations, which are other "
    f"words; the layer is chosen on the locating prompts, for each of {N_VECTOR_SETS} random sets as well. Both "
    "assignments are tried, so that a vector that favors one label gains nothing. A head's indirect effect is how much "
    "its mean output restores in prompts with shuffled labels: of the answer's probability, as in Todd et al., or of "
    "its log-odds, which a head that raises both labels equally does not change.",
    caveats=(
        "A head with uniform attention scores higher than heads that attend to the first token or to the one before; "
        "compare scores with 3%.",
        "A head that continues random tokens is an induction head; one that does not may still match in other ways.",
        "A vector can carry a task only if the model reads it; that no vector helps is not evidence against the heads.",
    ),
    draw=draw,
)
