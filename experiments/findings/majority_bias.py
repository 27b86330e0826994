"""Does the model prefer the label that more demonstrations have? `FINDING.method` says how it is measured."""

from functools import partial

import pandas as pd

import icl_lens as il
from experiments.framework.arrangements import prompts_by_frequency, without_last_true
from experiments.framework.estimate import compare_ratios
from experiments.framework.finding import Finding, Measure, Measured, Row, percent
from experiments.framework.label_attention import attention_by_class, last_true_tokens
from experiments.framework.label_bias import (
    N_CHOOSING,
    Pairs,
    accuracies,
    answered,
    bias_answer,
    fix_measures,
    gap_rows,
    measure_fix,
)
from experiments.framework.plotting import accuracy_pairs
from experiments.framework.study import Study, clusters_of, thin_out
from experiments.framework.tasks import Layout

LAYOUTS: dict[Layout, str] = {"random": "balanced random order", "order": "the paper's order"}

GAP = percent(
    "gap",
    "where the answer has the majority label, minus where it has the minority label",
    "equally frequent labels, same first and last label",
    "accuracy between the labels, points",
)
BIAS = Measure("bias", GAP.quantity, GAP.control, "log-odds of the answer, nats")
FIX = fix_measures("the answer has the majority label", "the answer has the minority label", 22)
ATTENTION = tuple(
    percent(
        f"{kind}_{layout}",
        f"change of attention to {kind} labels without the last true demonstration, {words}",
        "predicted by softmax alone",
        f"% of located heads' attention to {kind} labels",
    )
    for layout, words in LAYOUTS.items()
    for kind in ("true", "false")
)


def measure(study: Study) -> Measured:
    """Measure the gap, what the fix does to it, and how attention changes without one demonstration."""
    shown = study.task.demonstrations
    if shown < 2:
        raise il.InputError("with one demonstration of each class, no label can be rarer and still be shown")
    locating, held_out = study.prompts_with(2 * shown - max(1, shown // 2))
    groups = {name: study.tokenize(some) for name, some in prompts_by_frequency(held_out, shown, study.seed).items()}
    tested = Pairs(groups["majority"], groups["minority"])
    balanced = Pairs(groups["majority balanced"], groups["minority balanced"])
    uneven, even = answered(study, tested), answered(study, balanced)
    rows = gap_rows(uneven, even, clusters_of(tested.favored))
    details = [accuracies("equally frequent labels", *even), accuracies("no fix", *uneven)]
    some = prompts_by_frequency(thin_out(locating, N_CHOOSING), shown, study.seed)
    choosing = Pairs(study.tokenize(some["majority"]), study.tokenize(some["minority"]))
    fixed, fixes = measure_fix(study, "majority", choosing, tested)
    return Measured([*rows, *fixed, *attention_rows(study)], pd.DataFrame(details + fixes))


def attention_rows(study: Study) -> list[Row]:
    """Measure how attention by class changes without the last true demonstration, next to what softmax predicts."""
    rows = []
    for layout in LAYOUTS:
        intact = study.halves(layout)[1]
        fewer = study.tokenize([without_last_true(prompt) for prompt in intact.prompts])
        before = study.map(intact, attention_by_class).double()
        predicted = study.map(intact, lambda acts: attention_by_class(acts, last_true_tokens(acts.batch))).double()
        after = study.map(fewer, attention_by_class).double()
        for ranked in study.by_ranking():
            values = [ranked.of_located(one).mean(1) for one in (before, after, predicted)]
            for i, kind in enumerate(("true", "false")):
                base, observed, renormalized = (one[:, i] for one in values)
                changes = (observed - base, base), (renormalized - base, base)
                found = compare_ratios(*changes, clusters_of(intact), total=f"attention to {kind} labels")
                rows.append(Row.from_result(f"{kind}_{layout}", found, ranking=ranked.ranking))
    return rows


FINDING = Finding(
    id="majority-bias",
    title="Does the model prefer the majority label?",
    question="Is the model right more often when most demonstrations have the answer's label, and does rescaling the "
    "located heads' attention to labels reduce the difference?",
    answer=partial(bias_answer, text="The models prefer the majority label {where}", control="equally frequent labels"),
    claim="Models prefer the majority label, because attention sums over its demonstrations. Dividing the attention "
    "of 12 heads to labels by label frequency reduces the bias by 22%. When the last true demonstration is dropped, "
    "attention to true labels decreases and attention to false labels increases (GPT-2 large; among the heads shown, "
    "only L21H19 attends more).",
    covers="section 5.1, Figures 8 and 10, and section 4.1 of the published version",
    measures=(BIAS, GAP, *FIX, *ATTENTION),
    measure=measure,
    look_for="Accuracy where the answer has the majority label and where it has the minority label, without and with "
    "the fix. A good fix moves the lower dot up; one that moves the upper dot down only makes the model worse.",
    method="True labels are those of the query's class. Each query is in two prompts with demonstrations in random "
    "order: in one, three quarters of them have the query's class; in the other, one quarter. The last demonstration "
    "has the answer's label in half of the prompts of either kind, so copying the last label gives no gap. Control: "
    "the same prompts with some demonstrations, but not the first or last, replaced by ones of the other class, so "
    "that both labels are equally frequent. A model that copies the first or last label has the same gap there. The "
    "fix divides attention from the last position to each label by (label frequency "
    "/ mean frequency)^strength. The strength, at most 1, is the one with the smallest bias on the locating half "
    "among those that cost at most one point of accuracy over both kinds of prompts; each of 5 random sets from the "
    "same layers gets a strength of its own. What softmax alone predicts: the dropped demonstration's tokens are "
    "removed from the intact prompt's attention, and the rest is divided by its sum.",
    caveats=(
        "The paper does not say in which unit its bias was reduced by 22%; here it is the answer's log-odds.",
        "A model that is right on nearly all prompts has little room for a gap in accuracy; log-odds still show one.",
    ),
    post_hoc="Log-odds became the main measure, in place of accuracy, after both had been seen on the real model, "
    "which is right on nearly all prompts. Accuracy is in the table of other measures.",
    earlier="gap",
    draw=partial(accuracy_pairs, favored="answer has the majority label", unfavored="answer has the minority label"),
)
