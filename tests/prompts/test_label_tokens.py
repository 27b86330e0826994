"""Labels of one, two and three tokens, counted word by word and read from Hugging Face's patterns,
prompt by prompt.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import families
import pytest
import reference_passes
import torch
from reference_hf import output_weights
from reference_passes import saliency_of, writing
from shared import hf_twin
from tolerance import assert_close

import icl_lens as il
from icl_lens.activations.passes import last_log_probs
from icl_lens.report.html.heads import located_table
from icl_lens.report.html.parts import Bar

NAMES = ["gpt2", "llama_gqa"]
HEADS = [il.Head(0, 1), il.Head(1, 0), il.Head(1, 3), il.Head(2, 2)]
ONE, TWO, THREE = "foo", "happy nine", "sad bad three"


def prompt_of(*pairs: tuple[str, str], query: str, answer: str) -> il.Prompt:
    return il.Prompt([il.Demonstration(*pair) for pair in pairs], query=query, answer=answer)


DIFFERENT = [
    prompt_of(
        ("love", ONE), ("nine cat", TWO), ("like", THREE), ("eight", TWO), query="one", answer=TWO
    ),
    prompt_of(("a dog", THREE), ("bad", ONE), query="the good", answer=ONE),
    prompt_of(("two", TWO), ("red", THREE), ("blue love", TWO), query="hate", answer=THREE),
]
"""Labels of one, two and three tokens that differ in their first; four, two and three
demonstrations.
"""
SHARED = [
    prompt_of(("love", "the foo"), ("nine", "the cat dog"), query="one", answer="the cat dog"),
    prompt_of(
        ("a dog", "the cat dog"),
        ("bad", "the cat dog"),
        ("like", "the foo"),
        query="good",
        answer="the foo",
    ),
]
"""Labels that share their first token, which is appended to the prompts."""
SINGLE = [
    prompt_of(("love", "foo"), ("nine cat", "bar"), ("like", "foo"), query="one", answer="foo"),
    prompt_of(("a dog", "bar"), ("red", "foo"), query="the good", answer="bar"),
]
SETS = {"different": (DIFFERENT, 0), "shared": (SHARED, 1), "single": (SINGLE, 0)}


@dataclass
class Row:
    """One prompt, with the positions of its parts counted in words."""

    prompt: il.Prompt
    ids: torch.Tensor
    labels: list[range]
    scored: list[int]
    texts: list[int]
    query: list[int]

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def is_true(self) -> list[bool]:
        return [
            demonstration.label == self.prompt.answer
            for demonstration in self.prompt.demonstrations
        ]


def counted(prompt: il.Prompt, n_shared: int) -> Row:
    words, labels, texts = list[str](), list[range](), list[int]()
    for demonstration in prompt.demonstrations:
        texts += range(len(words), len(words) + len(demonstration.text.split()))
        words += [*demonstration.text.split(), ":"]
        labels.append(range(len(words), len(words) + len(demonstration.label.split())))
        words += demonstration.label.split()
    query = [*range(len(words), len(words) + len(prompt.query.split()))]
    words += [*prompt.query.split(), ":", *prompt.labels[0].split()[:n_shared]]
    ids = torch.tensor([families.WORDS.index(word) for word in words])
    return Row(prompt, ids, labels, [places[n_shared] for places in labels], texts, query)


QUICK = {("gpt2", "different"), ("gpt2", "shared")}
CASES = [
    pytest.param(
        name_and_set,
        marks=() if name_and_set in QUICK else pytest.mark.slow,
        id="-".join(name_and_set),
    )
    for name_and_set in itertools.product(NAMES, SETS)
]


@pytest.fixture(params=CASES)
def case(request: Any, load_tiny: Any, family_folder: Any, float64: None) -> Any:
    """(model, batch, its rows counted by hand, Hugging Face twin)."""
    name, which = request.param
    prompts, n_shared = SETS[which]
    model = load_tiny(name, dtype=torch.float64)
    batch = il.tokenize(model, prompts, prepend_bos=False)
    return (
        model,
        batch,
        [counted(prompt, n_shared) for prompt in prompts],
        hf_twin(family_folder, name),
    )


pytestmark = pytest.mark.usefixtures("float64")


def test_positions_and_roles_are_those_counted_in_words(case: Any) -> None:
    _, batch, rows, _ = case
    roles = batch.token_roles
    for number, row in enumerate(rows):
        count = len(row.labels)
        assert batch.tokens[number, : row.n].tolist() == row.ids.tolist()
        assert batch.label_positions[number].tolist()[:count] == row.scored
        assert batch.prediction_positions[number].tolist()[:count] == [
            place - 1 for place in row.scored
        ]
        assert batch.label_ranges[number].tolist()[:count] == [
            [label_places.start, label_places.stop] for label_places in row.labels
        ]
        of_tokens = batch.label_token_positions[number].tolist()
        assert [
            [place for place in label_places if place >= 0] for label_places in of_tokens[:count]
        ] == [[*label_places] for label_places in row.labels]
        missing = (
            batch.label_positions,
            batch.prediction_positions,
            batch.label_ranges,
            batch.label_token_positions,
        )
        assert all(bool((places[number, count:] == -1).all()) for places in missing)
        expected = ["other"] * row.n
        for role, places in (("text", row.texts), ("query", row.query)):
            for place in places:
                expected[place] = role
        for label_places, is_true in zip(row.labels, row.is_true, strict=True):
            for place in label_places:
                expected[place] = "true label" if is_true else "false label"
        expected[-1] = "last"
        assert roles[number] == expected


def test_attention_to_a_label_is_summed_over_its_tokens(case: Any) -> None:
    model, batch, rows, hf = case
    acts = il.capture(model, batch)
    by_demo, by_label = acts.attention_to_labels(), acts.attention_by_label()
    for number, row in enumerate(rows):
        with torch.no_grad():
            patterns = hf(row.ids[None], output_attentions=True).attentions
        for layer, head in itertools.product(range(families.N_LAYERS), range(families.N_HEADS)):
            last = patterns[layer][0, head, -1]
            expected = [
                sum(float(last[place]) for place in label_places) for label_places in row.labels
            ]
            assert_close(
                by_demo[number, layer, head, : len(expected)],
                torch.tensor(expected, dtype=torch.float64),
            )
            assert not by_demo[number, layer, head, len(expected) :].any()
            for i, label in enumerate(batch.labels):
                of_label = [
                    x
                    for x, d in zip(expected, row.prompt.demonstrations, strict=True)
                    if d.label == label
                ]
                assert_close(
                    by_label[number, layer, head, i],
                    torch.tensor(sum(of_label), dtype=torch.float64),
                )
    if batch.labels == ("foo", "bar"):  # the very numbers of a pattern at single tokens
        places = batch.label_positions[:, None, None].expand(*by_demo.shape)
        picked = acts.pattern.gather(-1, places.clamp(min=0)).masked_fill(places < 0, 0)
        assert torch.equal(by_demo, picked)


def test_keys_and_values_are_those_of_the_scored_token(case: Any) -> None:
    model, batch, rows, hf = case
    acts = il.capture(model, batch, writers=True)
    for number, row in enumerate(rows):
        seen, count = reference_passes.run(hf, row.ids), len(row.labels)
        for head in HEADS:
            assert_close(acts.label_keys(head)[number, :count], seen.resid[head.layer][row.scored])
            values = (
                seen.v[head.layer][head.head][row.scored]
                @ output_weights(hf, head.layer)[head.head]
            )
            assert_close(acts.label_values(head)[number, :count], values)
            parts = il.attention_score_parts(acts, head)
            log_pattern = seen.pattern[head.layer][head.head, -1].log()[row.scored]
            scores = parts.scores[number, :count]
            assert parts.positions[number, :count].tolist() == row.scored
            assert_close(
                scores - scores[0], log_pattern - log_pattern[0], scale=float(scores.abs().max())
            )
            assert parts.of_label(batch.answer)[number, :count].tolist() == row.is_true


def test_what_a_head_adds_from_a_label_comes_from_all_its_tokens(case: Any) -> None:
    """Value parts, and their means for true and false labels, against attention times value of each
    token.
    """
    model, batch, rows, _ = case
    acts, (head, *_) = il.capture(model, batch, writers=True), HEADS[2:]
    several = len(batch.labels) > 2  # no single other label, so values are first-order
    against = batch.other_label_tokens
    if several:
        against = against[:, :1]
    added = il.subhead_log_prob_increase(acts, batch.answer_tokens, against=against)[
        :, head.layer, head.head
    ]
    parts = il.value_parts(acts, head, batch.answer_tokens, against=against)
    is_true, by_kind = parts.of_label(batch.answer), {True: list[float](), False: list[float]()}
    for number, row in enumerate(rows):
        places = parts.positions[number].tolist()
        assert [place for place in places if place >= 0] == [
            place for label_places in row.labels for place in label_places
        ]
        for kind in (True, False):
            labels_of_kind = [
                label_places
                for label_places, true in zip(row.labels, row.is_true, strict=True)
                if true == kind
            ]
            expected = math.fsum(
                float(added[number, place])
                for label_places in labels_of_kind
                for place in label_places
            )
            mask = is_true[number] if kind else ~is_true[number]
            assert_close(
                parts.value[number, mask].sum(),
                torch.tensor(expected, dtype=torch.float64),
                scale=8.0,
            )
            by_kind[kind].append(expected)
    with_both_kinds = [
        number for number, row in enumerate(rows) if set(row.is_true) == {True, False}
    ]
    if not several and with_both_kinds:
        means = il.mean_score_parts(model, batch[with_both_kinds], [head])
        for kind, side in ((True, "value of true labels"), (False, "value of false labels")):
            mean = sum(by_kind[kind][number] for number in with_both_kinds) / len(with_both_kinds)
            assert means.total(head, side)[0] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    with pytest.raises(il.InputError, match="keys must be tokens of labels"):
        il.value_parts(
            il.capture(model, batch, writers="all"),
            head,
            batch.answer_tokens,
            against=against,
            keys=[0, 1],
        ).of_label(batch.answer)


def test_saliency_flows_into_and_out_of_whole_labels(case: Any) -> None:
    model, batch, rows, hf = case
    flow = il.saliency_flow(model, batch)
    for number, row in enumerate(rows):
        choices = [batch.labels.index(label) for label in row.prompt.labels]
        ids = batch.label_tokens[choices].tolist()
        saliency = saliency_of(hf, row.ids, ids, int(batch.answer_tokens[number]))
        all_edges, last = [(i, j) for i in range(row.n) for j in range(i)], row.n - 1
        to_label = [
            (i, j)
            for label_places in row.labels
            for i in label_places
            for j in range(label_places.start)
        ]
        to_last = [(last, j) for label_places in row.labels for j in label_places]
        in_labels = {place for label_places in row.labels for place in label_places}
        kinds = {
            "text_to_label": to_label,
            "label_to_last": to_last,
            "rest": [edge for edge in all_edges if edge not in to_label and edge not in to_last],
            "text_to_other": [
                (i, j) for i, j in all_edges if i < row.query[0] and i not in in_labels
            ],
            "other_to_last": [(last, j) for j in range(last) if j not in in_labels],
        }
        for kind, edges in kinds.items():
            expected = torch.stack([saliency[:, i, j] for i, j in edges]).mean(0)
            assert_close(getattr(flow, kind)[number], expected, msg=kind)


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_weight_applies_to_all_tokens_of_its_label(case: Any, renormalize: bool) -> None:
    model, batch, rows, hf = case
    weights = torch.tensor([0.0, 0.5, 2.0, 0.0]).expand(len(batch), -1)[
        :, : batch.label_positions.shape[1]
    ]
    with il.edited(model, il.Reweight(HEADS, weights, renormalize=renormalize), batch=batch):
        ours, attention = (
            last_log_probs(model, batch),
            il.capture(model, batch, check=False).attention_to_labels(),
        )
    for number, row in enumerate(rows):

        def scale(pattern: torch.Tensor, row: Row = row) -> torch.Tensor:
            for weight, label_places in zip(weights[0].tolist(), row.labels, strict=False):
                pattern[-1, list(label_places)] *= weight
            return pattern / pattern.sum(-1, keepdim=True) if renormalize else pattern

        edit = reference_passes.in_turn(*(writing("pattern", *head, scale) for head in HEADS))
        assert_close(ours[number], reference_passes.run(hf, row.ids, edit).log_probs)
    hidden = torch.stack([attention[:, layer, head, 0] for layer, head in HEADS])
    assert not hidden.any()


def test_edges_at_labels_are_edges_at_all_their_tokens(case: Any) -> None:
    model, batch, rows, _ = case
    options: dict[str, Any] = {"part": "v", "writers": ["embed", "L0H2", "F1"]}
    true = [
        [
            place
            for label_places, is_true in zip(r.labels, r.is_true, strict=True)
            if is_true
            for place in label_places
        ]
        for r in rows
    ]
    with_true_label = [number for number, places in enumerate(true) if places]
    places = [true[number] for number in with_true_label]
    by_role = il.head_to_head_effects(
        model, batch[with_true_label], [HEADS[3]], at="true label", **options
    )
    by_hand = il.head_to_head_effects(
        model, batch[with_true_label], [HEADS[3]], at=places, **options
    )
    assert_close(by_role.log_prob, by_hand.log_prob)
    assert by_hand.log_prob.abs().max() > 1e-4


STRETCHED = [
    prompt_of(
        ("two the", TWO),
        ("one", ONE),
        ("a cat", THREE),
        ("foo dog", ONE),
        query="hate the",
        answer=TWO,
    ),
    prompt_of(("good a bad", THREE), ("love", ONE), query="like", answer=ONE),
    prompt_of(("cat", TWO), ("the dog", THREE), ("love", TWO), query="a hate", answer=THREE),
]
"""Other texts than those of DIFFERENT; the labels have as many tokens, except those of the first
prompt.
"""


@pytest.mark.parametrize("what", ["v", "z", "pattern"])
def test_labels_are_patched_token_by_token(load_tiny: Any, family_folder: Any, what: Any) -> None:
    """Attention to other positions keeps its proportions, and what is left of the sum."""
    model, hf = load_tiny("llama_gqa", dtype=torch.float64), hf_twin(family_folder, "llama_gqa")
    batch, source = (
        il.tokenize(model, prompts[1:], prepend_bos=False, labels=(ONE, TWO, THREE))
        for prompts in (DIFFERENT, STRETCHED)
    )
    assert not torch.equal(batch.last, source.last)
    with il.patch_heads(model, HEADS, source, activation=what, align="labels", batch=batch):
        ours = last_log_probs(model, batch)
    for number, (mine, theirs) in enumerate(zip(DIFFERENT[1:], STRETCHED[1:], strict=True)):
        row, donor_row = counted(mine, 0), counted(theirs, 0)
        there = reference_passes.run(hf, donor_row.ids)
        to, at = (
            [*(place for label in counted_row.labels for place in label), counted_row.n - 1]
            for counted_row in (row, donor_row)
        )

        def put(
            donor_pattern: torch.Tensor, pattern: torch.Tensor, to: Any = to, at: Any = at
        ) -> torch.Tensor:
            unpatched = [k for k in range(len(pattern)) if k not in to]
            for q, q_there in zip(to, at, strict=True):
                left = (1 - donor_pattern[q_there, at].sum()).clamp(min=0)
                pattern[q, unpatched] *= left / pattern[q, unpatched].sum()
                pattern[q, to] = donor_pattern[q_there, at]
            return pattern

        edits = []
        for layer, head in HEADS:
            value = getattr(there, what)[layer]
            if what == "pattern":
                edits.append(writing(what, layer, head, partial(put, value[head])))
            else:
                places, theirs = (
                    ((to, head), (at, head)) if what == "z" else ((head, to), (head, at))
                )
                edits.append(writing(what, layer, places, value[theirs]))
        edit = reference_passes.in_turn(*edits)
        assert_close(ours[number], reference_passes.run(hf, row.ids, edit).log_probs)


def test_labels_of_other_lengths_are_not_patched_from_each_other(load_tiny: Any) -> None:
    model = load_tiny("gpt2", dtype=torch.float64)
    batch, source = (
        il.tokenize(model, prompts, labels=(ONE, TWO, THREE))
        for prompts in (DIFFERENT[:1], STRETCHED[:1])
    )
    message = r"must have the same number of tokens, got 'happy nine' \(2\) and 'foo' \(1\) for demonstration 0 of row 0"
    with (
        pytest.raises(il.InputError, match=message),
        il.patch_heads(model, HEADS, source, activation="v", align="labels", batch=batch),
    ):
        pass


def test_a_row_that_ends_within_a_label_does_not_have_it(load_tiny: Any) -> None:
    batch = il.tokenize(load_tiny("gpt2", dtype=torch.float64), DIFFERENT[:1], prepend_bos=False)
    second = counted(DIFFERENT[0], 0).labels[1]
    within, whole = batch.at([second[0], second[-1]]).split(1)
    assert within.label_index[0].tolist() == [0, -1, -1, -1]
    assert whole.label_index[0].tolist() == [0, 1, -1, -1]
    assert within.label_token_positions[0, 1:].flatten().unique().tolist() == [-1]
    assert whole.label_ranges[0, 1].tolist() == [second.start, second.stop]


def test_an_explanation_shows_attention_to_whole_labels(load_tiny: Any, tmp_path: Any) -> None:
    prompt, row = DIFFERENT[0], counted(DIFFERENT[0], 0)
    model = load_tiny("gpt2", dtype=torch.float64)
    explanation = il.explain(model, prompt, k=1, n_random=1, prepend_bos=False)
    assert explanation.input.label_positions == tuple(row.scored)
    assert explanation.input.label_ranges == tuple(
        (label_places.start, label_places.stop) for label_places in row.labels
    )
    index = {label: i for i, label in enumerate(explanation.labels)}
    marks = {
        p: index[d.label]
        for label_places, d in zip(row.labels, prompt.demonstrations, strict=True)
        for p in label_places
    }
    assert explanation.input.label_at == marks
    for report, cells in zip(explanation.heads, located_table(explanation).rows, strict=True):
        of_labels = [
            math.fsum(report.attention[place] for place in label_places)
            for label_places in row.labels
        ]
        assert_close(
            explanation.all_heads.attention[report.head.layer][report.head.head], of_labels
        )
        assert_close(report.attention_to(explanation.input.label_ranges), of_labels)
        bars = [cell.text for cell in cells if isinstance(cell, Bar)][-len(index) :]
        sums = [of_labels[0], of_labels[1] + of_labels[3], of_labels[2]]
        assert bars == [f"{sums[index[label]]:.2f}" for label in (ONE, TWO, THREE)]
        true, false = (
            math.fsum(
                x for x, is_true in zip(of_labels, row.is_true, strict=True) if is_true == kind
            )
            for kind in (True, False)
        )
        sentence = explanation.why_sentence(report)
        assert (
            f"gives {true:.0%} of its attention to happy nine@{row.scored[1]}, happy nine@{row.scored[3]}"
            in sentence
        )
        assert f"and {false:.0%} to foo@{row.scored[0]}, sad bad three@{row.scored[2]}" in sentence
        # What it adds from the answer's labels, from attention times value at all their tokens.
        acts = il.capture(model, il.tokenize(model, [prompt], prepend_bos=False), writers=True)
        parts = il.value_parts(
            acts, report.head, acts.batch.answer_tokens, against=acts.batch.other_label_tokens
        )
        assert report.why is not None
        total = float(parts.value[parts.of_label(acts.batch.answer)].sum())
        assert_close(report.why.value_total, total, scale=8.0)
    explanation.save(tmp_path / "one.json")
    assert il.results.Explanation.load(tmp_path / "one.json") == explanation
    strip = il.html.attention_to_labels(il.capture(model, acts.batch), ["L1H0"])
    assert dict(strip.blocks)["label_attention"].marks == marks
