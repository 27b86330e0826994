"""What is said of an explanation: its findings, and notes on how to read its numbers.

Every function returns words that follow from the numbers of the reports. `explanation` offers those
that users read; the page, the terminal and the live view print all.
"""

import math
from collections.abc import Sequence

from icl_lens.analyses.explanation.reports import (
    ExplanationReports,
    HeadReport,
    Supports,
    supports,
)
from icl_lens.analyses.explanation.tables import (
    MAX_DEMONSTRATIONS,
    demonstration_rows,
    key_name,
)
from icl_lens.foundation.intervals import Interval, beside_random_sets
from icl_lens.measures.demonstration_effects import BEGINS_TEXT
from icl_lens.measures.head_findings import heads_matter, removal_finding
from icl_lens.models.head import Head
from icl_lens.reading.reasons import writers_in_words
from icl_lens.result.number_format import joined, percent, signed


def headline(reports: ExplanationReports) -> str:
    """Return in few words what the model predicts, and the most probable token if it is no label."""
    scores = reports.scores
    if reports.is_plain_text:
        return f"The model continues with {scores.next_tokens[0][0]!r}"
    correct = ""
    if reports.answer is not None:
        correct = (
            ", correctly" if reports.answer == reports.predicted else f", not {reports.answer!r}"
        )
    if not scores.predicts_label:
        token, probability = scores.next_tokens[0]
        return (
            f"Most probable: {(token.strip('␣') or token)!r} ({percent(probability)}); among "
            f"the labels: {reports.predicted!r} ({percent(scores.probs[reports.predicted])}){correct}"
        )
    verb = (
        "Among the labels, the model prefers"
        if scores.has_multi_token_labels
        else "The model predicts"
    )
    return f"{verb} {reports.predicted!r}{correct}"


def finding(reports: ExplanationReports) -> str:
    """Return whether the zeroed heads matter more than random heads in this prompt."""
    ablation = reports.ablation
    lost, difference = _loss_and_difference(reports)
    sentence = removal_finding(
        ablation.heads,
        difference,
        lost=lost,
        unit="nats of log-odds" if reports.scores.compared_with else "nats of log p",
        where="zeroed at the last position of this prompt",
        random="random heads",
        n_random_sets=len(ablation.random),
        over="random sets",
    )
    if shows_that_heads_matter(reports):
        sentence += (
            " They were located on this prompt as well; icl-lens locate (il.locate) tests "
            "heads on other prompts."
        )
    return sentence


def shows_that_heads_matter(reports: ExplanationReports) -> bool:
    """Return whether `finding` says that the zeroed heads matter more than random heads."""
    return heads_matter(*_loss_and_difference(reports))


def _loss_and_difference(reports: ExplanationReports) -> tuple[float, Interval]:
    """Return what the answer loses without the heads, and how much more than without random
    ones.
    """
    lost = reports.lost(reports.ablation.located)
    random_losses = [reports.lost(log_probs) for log_probs in reports.ablation.random]
    return lost, beside_random_sets(lost, random_losses)


def verdict(reports: ExplanationReports) -> str:
    """Return which located heads support the target, the tokens it is compared with, or both.

    Empty without contrasts.
    """
    if not reports.scores.compared_with:
        return ""
    compared_with = reports.scores.compared_with
    groups: dict[Supports, str] = {
        "answer": reports.target,
        "others": joined(compared_with),
        "both": "both" if len(compared_with) == 1 else "both sides",
    }
    supporters: dict[Supports, list[str]] = {}
    for report in reports.heads:
        group = supports(report.increase, report.contrast or 0.0)
        supporters.setdefault(group, []).append(str(report.head))
    if "neither" in supporters:
        groups["neither"] = "neither"
    supported = []
    for group, name in groups.items():
        supported.append(f"{name} in {joined(supporters.get(group, [])) or 'none'}")
    sentences = [
        "What the listed heads write, before later components act on it, supports "
        f"{'; '.join(supported)}."
    ]
    lowest = joined(_lowest_contrasts(reports))
    if lowest:
        sentences.append(f"Lowest contrasts of all heads: {lowest}.")
    return (
        f"{' '.join(sentences)} "
        "A head supports both (neither, if it lowers both) if its contrast is below 0.69 nats "
        "(a factor of two in the odds) and below half of the larger change; otherwise, the "
        "sign of its contrast decides."
    )


def _lowest_contrasts(reports: ExplanationReports) -> list[str]:
    """Return up to two heads with the lowest contrasts below zero, located or not."""
    contrasts = []
    for layer, row in enumerate(reports.all_heads.contrast):
        for head, contrast in enumerate(row):
            if contrast < 0:
                contrasts.append((contrast, Head(layer, head)))
    contrasts.sort(key=lambda contrast_and_head: contrast_and_head[0])
    return [f"{head} ({signed(contrast)})" for contrast, head in contrasts[:2]]


def remarks(reports: ExplanationReports) -> tuple[str, ...]:
    """Return notes on labels or targets of several tokens; empty if each is a single token."""
    scores = reports.scores
    if reports.is_plain_text:
        spellings = [spelling for spelling in scores.spellings if len(spelling) > 1]
        return tuple(_first_token_remark(spelling) for spelling in spellings)
    if not scores.has_multi_token_labels:
        return ()
    notes = [
        "Labels of several tokens are scored by one token, at which their values and keys are "
        "read; attention counts all tokens of a label. The table also shows each full label's "
        "log p."
    ]
    for label, token in zip(scores.labels, scores.scored_tokens, strict=True):
        if not token.strip("␣⏎⇥␍ "):
            notes.append(
                f"Label {label!r} is scored by {token!r}, which is only white space; choose "
                "other labels or another template."
            )
    return tuple(notes)


def shown_only(reports: ExplanationReports) -> tuple[str, ...]:
    """Return the labels that this decision does not choose between, such as "bad" after "very"."""
    if reports.is_plain_text or reports.settings.against is not None:
        return ()
    choices = reports.target, *reports.scores.compared_with
    return tuple(label for label in reports.labels if label not in choices)


def answer_notes(reports: ExplanationReports, label: str) -> list[str]:
    """Return what is to be said of a label, or scored token, in the table of answers."""
    notes = []
    if label == reports.predicted and not reports.is_plain_text:
        notes.append("predicted" if reports.scores.predicts_label else "most probable label")
    if label == reports.answer:
        notes.append("correct answer")
    if label == reports.target:
        notes.append("explained")
    if reports.is_plain_text and label in reports.scores.compared_with:
        notes.append("compared with")
    if label in shown_only(reports):
        notes.append("no choice here")
    return notes


def demonstrations_note(reports: ExplanationReports) -> str:
    """Return how to read what each demonstration adds."""
    if reports.demonstrations is None:
        return ""
    note = (
        "hidden: the last token does not attend to it. keys: others get its attention, its "
        "values are still read. values: its values are not read. Demonstrations may replace "
        "each other: compare sum and all at once."
    )
    rows = demonstration_rows(reports)[:-2]
    if len(rows) > MAX_DEMONSTRATIONS:
        note += f" Shown are {MAX_DEMONSTRATIONS} of {len(rows)}, those with the largest effects."
    if reports.demonstrations.begins_text:
        note += f" {BEGINS_TEXT}."
    return note


def score_name(reports: ExplanationReports) -> str:
    """Return the name of the score that ranks heads, in a sentence."""
    return "exchange score" if reports.settings.by == "exchange" else reports.settings.by


def contrast_name(reports: ExplanationReports) -> str:
    """Return what the column of contrasts is called: for plain text, "against" and the tokens."""
    if reports.is_plain_text:
        return f"against {', '.join(reports.scores.compared_with)}"
    return "contrast"


def scores_note(reports: ExplanationReports) -> str:
    """Return what the columns contrast and increase, and effect if it was measured, are."""
    increase = f"log p({reports.target})"
    notes = []
    if reports.scores.compared_with:
        alternatives = f"log Σ p({alternatives_name(reports)})"
        if len(reports.scores.compared_with) == 1:
            alternatives = f"log p({reports.scores.compared_with[0]})"
        notes.append(f"{contrast_name(reports)}: what the head adds to {increase} − {alternatives}")
    notes.append(f"increase: what it adds to {increase}")
    if reports.all_heads.effect:
        lost = log_odds_name(reports) if reports.scores.compared_with else increase
        notes.append(f"effect: {lost} lost if it alone is zeroed at the last position")
    return "; ".join(notes)


def alternatives_name(reports: ExplanationReports) -> str:
    """Return what the target is compared with: all other labels, the given ones, or tokens."""
    if reports.is_plain_text:
        return "those tokens"
    if compares_with_all_others(reports):
        return "other labels"
    return ", ".join(reports.scores.compared_with)


def log_odds_name(reports: ExplanationReports) -> str:
    """Return "the log-odds of foo", and against which labels if these are not all others."""
    name = f"the log-odds of {reports.target}"
    if reports.is_plain_text or compares_with_all_others(reports):
        return name
    return f"{name} against {joined(reports.scores.compared_with)}"


def compares_with_all_others(reports: ExplanationReports) -> bool:
    """Return whether the target is compared with all other labels."""
    return {*reports.scores.compared_with} == {*reports.labels} - {reports.target}


def lost_name(reports: ExplanationReports) -> str:
    """Return the name of what `ExplanationReports.lost` returns."""
    return "log-odds lost" if reports.scores.compared_with else "log p lost"


def lost_note(reports: ExplanationReports) -> str:
    """Return what the column of losses is."""
    measure = f"log p({reports.target})"
    if reports.scores.compared_with:
        measure = log_odds_name(reports)
    return (
        f"{lost_name(reports)}: {measure} lost with this head alone zeroed at the last position; "
        "positive: the head was needed"
    )


def exchange_note(reports: ExplanationReports) -> str:
    """Return a sentence on what `all_heads.exchange` are."""
    return (
        f"Exchange: log-odds that {reports.target} loses against all other labels if the head's "
        "query at the last position, and nothing else, is that of the same demonstrations with "
        f"the query {reports.all_heads.other_query!r}."
    )


def keys_name(reports: ExplanationReports, positions: Sequence[int]) -> str:
    """Return the names of up to three keys, or how many: "foo@8, foo@11", "12 foo labels"."""
    if len(positions) < 4:
        return ", ".join(key_name(reports, position) for position in positions)
    labels = {reports.labels[reports.input.label_at[position]] for position in positions}
    label = labels.pop() if len(labels) == 1 else "other"
    return f"{len(positions)} {label} labels"


def why_sentence(reports: ExplanationReports, report: HeadReport) -> str:
    """Return why a head attends where it does; empty if its scores were not split."""
    why = report.why
    if why is None:
        return ""
    more, less = keys_name(reports, why.more), keys_name(reports, why.less)
    attention = []
    range_at = reports.input.range_at
    for positions in (why.more, why.less):
        ranges = [range_at.get(position, (position, position + 1)) for position in positions]
        attention.append(math.fsum(report.attention_to(ranges)))
    mean = "mean " if len(why.more) + len(why.less) > 2 else ""
    than = "higher" if why.score_difference >= 0 else "lower"
    text = (
        f"{report.head} gives {attention[0]:.0%} of its attention to {more} and "
        f"{attention[1]:.0%} to {less}. Its {mean}score before the softmax is "
        f"{abs(why.score_difference):.2f} {than} at {more} than at {less}. Largest parts: "
        f"{why.because}."
    )
    if why.value:
        what = f"log p({reports.target}), to first order"
        if why.value_is_exact:
            what = f"the log-odds of {reports.target}"
        writers = writers_in_words(why.value, why.value_total >= 0)
        adds = f"From {more} it adds {signed(why.value_total, 2)} nats to {what}"
        if report.contrast is not None and why.value_is_exact and reports.scores.contrast_adds_up:
            whole = f"{signed(report.contrast, 2)} nats that it adds to {what}"
            adds = f"Of the {whole}, {signed(why.value_total, 2)} come from {more}"
        text += f" {adds}; largest parts: {writers}."
    return text


def _first_token_remark(spelling: Sequence[str]) -> str:
    """Return the remark on a target of several tokens in plain text."""
    return (
        f"{' + '.join(map(repr, spelling))} has {len(spelling)} tokens; only the first, "
        f"{spelling[0]!r}, is scored. The table also lists the log-probability of all its tokens."
    )
