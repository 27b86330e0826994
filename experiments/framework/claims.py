"""The paper's claims, each next to the measure that tests it on the real models."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.framework import markdown
from experiments.framework.pages import Stored, number_text, span
from experiments.framework.sentences import real_rows


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, where it makes it, and the measure of a finding that tests it."""

    says: str
    where: str
    measure: str
    what: str
    """What is measured, with the control in parentheses."""
    ranking: str = "contrast"
    falls: bool = False
    """Whether the claim is that the quantity lies below its control."""
    exceeds: float | None = None
    """A quantity that the claim itself needs, whatever the control is: 0.8 for "almost all"."""


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "behavior": (Claim("Models answer 87–100%", "Table 2", "accuracy", "accuracy (copying the last label)"),),
    "two-towers": (
        Claim("Queries and keys compare texts", "hypothesis", "keys", "lost, keys exchanged (random heads)"),
        Claim("Values carry the label", "hypothesis", "values", "lost, values exchanged (random heads)"),
    ),
    "ablation": (
        Claim("12 heads carry the answer: accuracy 87.6 → 24.4%", "EMNLP", "accuracy", "accuracy lost (random heads)"),
    ),
    "location": (
        Claim(
            "One run finds the heads that matter", "section 6.2", "lost_increase", "lost without them (random heads)"
        ),
        Claim("Causal tracing finds such heads", "EMNLP", "lost_tracing", "lost without them (random heads)"),
        Claim(
            "Almost all increases come from deep attention layers",
            "Figure 2",
            "depth_layers",
            "share of increases (a random token's)",
            ranking="increase",
            exceeds=0.8,
        ),
        Claim("Important heads are deep", "Figures 3, 4, 12–15", "depth", "the deeper half's share (signs shuffled)"),
    ),
    "shared-heads": (
        Claim(
            "All tasks share heads", "Figures 3, 4, 12–15; open question 2", "overlap", "heads in common (random lists)"
        ),
    ),
    "values": (
        Claim(
            "Values rank their label's word high",
            "Figures 5, 16–18, 22–24",
            "rank",
            "mean reciprocal rank (other heads)",
        ),
        Claim("Values raise their own label's log-odds", "EMNLP", "features", "nats (other heads)"),
        Claim("Words of keys name their text", "Tables 1, 3", "key_words", "own text first (chance)"),
        Claim("Words of queries name the input", "Tables 1, 3", "query_words", "input first (chance)"),
    ),
    "label-attention": (
        Claim("Heads attend to true labels", "Figures 6, 19–21, 25–27", "chance", "share (chance)"),
        Claim("More attention, more increase", "Figure 7", "dose", "rank correlation (other heads)"),
        Claim("Attention moves when the prediction flips", "EMNLP", "shift", "attention that moves (other heads)"),
    ),
    "text-to-label": (
        Claim(
            "Heads collect texts at labels, where deep heads read them",
            "Figure 1; open question 1",
            "movers",
            "lost, 4 movers' edges into keys removed (random heads)",
        ),
        Claim(
            "Their values carry the label words",
            "Figure 1",
            "values",
            "lost, label words removed from values (random heads)",
        ),
    ),
    "majority-bias": (
        Claim("The majority label is preferred", "section 5.1", "bias", "nats (equally frequent labels)"),
        Claim(
            "Dividing attention by frequency removes 22% of this bias", "EMNLP", "removed", "removed (in random heads)"
        ),
        Claim(
            "Attention to true labels falls without the last true one",
            "Figures 8, 10",
            "true_order",
            "change (by softmax alone)",
            falls=True,
        ),
    ),
    "recency-bias": (
        Claim("The last label is preferred", "section 5.2", "bias", "nats (first label)"),
        Claim("Removing the position term removes 17% of this bias", "EMNLP", "removed", "removed (in random heads)"),
        Claim(
            "Attention to true labels falls when they come first",
            "Figures 9, 11",
            "attention",
            "change (without the position term)",
            falls=True,
        ),
        Claim(
            "A fifth of the last token is its neighbor's text",
            "section 5.2",
            "neighbor",
            "this text's effect (text before)",
        ),
    ),
}
"""By finding, in the order of the pages."""


def table(cells: Sequence[Stored]) -> str:
    """Return the claims as a table: what the paper says, on how many tasks it holds, and the numbers.

    It holds where the interval of the difference from the control is on the claimed side of zero, and the quantity
    exceeds what the claim itself needs.
    """
    lines = []
    for finding_id, claim in [(finding_id, claim) for finding_id, some in CLAIMS.items() for claim in some]:
        own = [cell for cell in cells if cell.finding.id == finding_id]
        rows = real_rows(own, claim.measure, claim.ranking)
        says = f"{claim.says} ({claim.where})"
        if not rows:
            lines.append([says, "not measured", f"`{finding_id}`"])
            continue
        measure = next(one for one in rows[0][0].finding.measures if one.name == claim.measure)
        quantity, control = (span((getattr(row, name) for _, row in rows), measure) for name in ("quantity", "control"))
        side, opposite = ("below", "above") if claim.falls else ("above", "below")
        on_side = [row for _, row in rows if row.outcome == side]
        n_holding = sum(claim.exceeds is None or row.quantity > claim.exceeds for row in on_side)
        n_opposite = sum(row.outcome == opposite for _, row in rows)
        found = f"{n_holding} of {len(rows)}"
        found += f" ({side} control: {len(on_side)})" * (len(on_side) > n_holding)
        found += f" (other side: {n_opposite})" * bool(n_opposite)
        percent = "%" * (measure.scale == 100)
        numbers = f"{quantity}{percent} ({control})"
        if len(rows) == 1:
            numbers += " [" + ", ".join(number_text(end, measure) for end in (rows[0][1].low, rows[0][1].high)) + "]"
        lines.append([says, found, f"[{claim.what}]({finding_id}.md): {numbers}"])
    lines += [
        ["Before-softmax values of parts add up (appendix E)", "yes", "exact, tested on every family"],
        ["GPT-2 large, GPT-J, Llama 7B–30B; ETHOS, Amazon", "not measured", ""],
    ]
    columns = ["the paper says", "direction holds", "measured (control) [95% interval of the difference]"]
    return markdown.table(columns, lines, align="lll")
