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
from icl_lens.analyses.explanation.sentences import why_sentence
from icl_lens.reading.last_logits import last_log_probs
from icl_lens.report.html.elements import Bar
from icl_lens.report.html.head_contents import located_table

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
    def label_tokens(self) -> list[int]:
        """The positions of all labels, one after another."""
        return list(itertools.chain.from_iterable(self.labels))

    @property
    def label_starts_and_ends(self) -> list[list[int]]:
        return [[places.start, places.stop] for places in self.labels]

    @property
    def roles(self) -> list[str]:
        roles = ["other"] * self.n
        for place in self.texts:
            roles[place] = "text"
        for place in self.query:
            roles[place] = "query"
        for places, is_true in zip(self.labels, self.is_true, strict=True):
            for place in places:
                roles[place] = "true label" if is_true else "false label"
        roles[-1] = "last"
        return roles

    def labels_of_kind(self, *, true: bool) -> list[range]:
        """The labels that equal the answer, or those that do not."""
        return [
            places
            for places, is_true in zip(self.labels, self.is_true, strict=True)
            if is_true == true
        ]

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


def test_labels_are_where_they_are_counted_in_words(case: Any) -> None:
    _, batch, rows, _ = case
    for number, row in enumerate(rows):
        count = len(row.labels)
        before = [place - 1 for place in row.scored]
        assert batch.tokens[number, : row.n].tolist() == row.ids.tolist()
        assert batch.label_positions[number].tolist()[:count] == row.scored
        assert batch.prediction_positions[number].tolist()[:count] == before
        assert batch.label_ranges[number].tolist()[:count] == row.label_starts_and_ends
        for positions, places in zip(
            batch.all_label_positions[number].tolist(), row.labels, strict=False
        ):
            assert [position for position in positions if position >= 0] == [*places]


def test_missing_demonstrations_have_no_positions(case: Any) -> None:
    _, batch, rows, _ = case
    for number, row in enumerate(rows):
        for positions in (
            batch.label_positions,
            batch.prediction_positions,
            batch.label_ranges,
            batch.all_label_positions,
        ):
            assert bool((positions[number, len(row.labels) :] == -1).all())


def test_roles_are_those_counted_in_words(case: Any) -> None:
    _, batch, rows, _ = case
    assert batch.token_roles == [row.roles for row in rows]


def test_attention_to_a_label_is_summed_over_its_tokens(case: Any) -> None:
    model, batch, rows, hf = case
    acts = il.capture(model, batch)
    by_demo, by_label = acts.attention_to_labels(), acts.attention_by_label()
    for number, row in enumerate(rows):
        with torch.no_grad():
            patterns = hf(row.ids[None], output_attentions=True).attentions
        for layer, head in itertools.product(range(families.N_LAYERS), range(families.N_HEADS)):
            last = patterns[layer][0, head, -1]
            expected = [float(last[places.start : places.stop].sum()) for places in row.labels]
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


@dataclass
class AddedByAHead:
    """What a head adds from each position, and its value parts, for the prompts of a case."""

    acts: il.Activations
    head: il.Head
    against: torch.Tensor
    parts: il.results.ValueParts
    by_position: torch.Tensor

    @classmethod
    def of_case(cls, case: Any) -> "AddedByAHead":
        model, batch, _, _ = case
        acts, head = il.capture(model, batch, writers=True), HEADS[2]
        against = batch.other_label_tokens[:, :1]  # several others would be first-order
        added = il.subhead_log_prob_increase(acts, batch.answer_tokens, against=against)
        parts = il.value_parts(acts, head, batch.answer_tokens, against=against)
        return cls(acts, head, against, parts, added[:, head.layer, head.head])

    def from_labels(self, number: int, row: Row, *, true: bool) -> float:
        """What the head adds from all tokens of a prompt's true or false labels."""
        places = itertools.chain.from_iterable(row.labels_of_kind(true=true))
        return math.fsum(self.by_position[number, list(places)].tolist())


def test_what_a_head_adds_from_a_label_comes_from_all_its_tokens(case: Any) -> None:
    """Value parts against attention times value of each token."""
    _, batch, rows, _ = case
    added = AddedByAHead.of_case(case)
    is_true = added.parts.of_label(batch.answer)
    for number, row in enumerate(rows):
        places = added.parts.positions[number].tolist()
        assert [place for place in places if place >= 0] == row.label_tokens
        for true in (True, False):
            mask = is_true[number] == true
            expected = added.from_labels(number, row, true=true)
            total = torch.tensor(expected, dtype=torch.float64)
            assert_close(added.parts.value[number, mask].sum(), total, scale=8.0)


def test_mean_value_parts_are_means_over_whole_labels(case: Any) -> None:
    model, batch, rows, _ = case
    with_both_kinds = [
        number for number, row in enumerate(rows) if set(row.is_true) == {True, False}
    ]
    if len(batch.labels) > 2 or not with_both_kinds:
        return  # with several other labels, values are first-order
    added = AddedByAHead.of_case(case)
    means = il.mean_score_parts(model, batch[with_both_kinds], [added.head])
    for true, side in ((True, "value of true labels"), (False, "value of false labels")):
        values = [added.from_labels(number, rows[number], true=true) for number in with_both_kinds]
        mean = sum(values) / len(values)
        assert means.total(added.head, side)[0] == pytest.approx(mean, rel=1e-4, abs=1e-6)


def test_value_parts_of_other_tokens_have_no_label(case: Any) -> None:
    model, batch, _, _ = case
    acts = il.capture(model, batch, writers="all")
    against = batch.other_label_tokens[:, :1]
    parts = il.value_parts(acts, HEADS[2], batch.answer_tokens, against=against, keys=[0, 1])
    with pytest.raises(il.InputError, match="keys must be tokens of labels"):
        parts.of_label(batch.answer)


def edges_of_kinds(row: Row) -> dict[str, list[tuple[int, int]]]:
    """The edges (to, from) of each kind in `SaliencyFlow`, counted in words."""
    last, in_labels = row.n - 1, set(row.label_tokens)
    kinds: dict[str, list[tuple[int, int]]] = {
        "text_to_label": [],
        "label_to_last": [(last, source) for source in row.label_tokens],
        "rest": [],
        "text_to_other": [],
        "other_to_last": [(last, source) for source in range(last) if source not in in_labels],
    }
    for places in row.labels:
        kinds["text_to_label"] += itertools.product(places, range(places.start))
    for target, source in itertools.combinations(reversed(range(row.n)), 2):
        edge = target, source
        if edge not in kinds["text_to_label"] and edge not in kinds["label_to_last"]:
            kinds["rest"].append(edge)
        if target < row.query[0] and target not in in_labels:
            kinds["text_to_other"].append(edge)
    return kinds


def test_saliency_flows_into_and_out_of_whole_labels(case: Any) -> None:
    model, batch, rows, hf = case
    flow = il.saliency_flow(model, batch)
    for number, row in enumerate(rows):
        choices = [batch.labels.index(label) for label in row.prompt.labels]
        ids = batch.label_tokens[choices].tolist()
        saliency = saliency_of(hf, row.ids, ids, int(batch.answer_tokens[number]))
        for kind, edges in edges_of_kinds(row).items():
            targets, sources = zip(*edges, strict=True)
            expected = saliency[:, targets, sources].mean(1)
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
    with_true_label, places = [], []
    for number, row in enumerate(rows):
        places_of_row = [*itertools.chain.from_iterable(row.labels_of_kind(true=True))]
        if places_of_row:
            with_true_label.append(number)
            places.append(places_of_row)
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
        to = [*row.label_tokens, row.n - 1]
        at = [*donor_row.label_tokens, donor_row.n - 1]

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
    assert within.all_label_positions[0, 1:].flatten().unique().tolist() == [-1]
    assert whole.label_ranges[0, 1].tolist() == [second.start, second.stop]


@pytest.fixture
def whole_labels_explained(load_tiny: Any) -> tuple[il.results.Explanation, il.Activations]:
    """An explanation of a prompt whose labels have one, two and three tokens, and its pass."""
    model = load_tiny("gpt2", dtype=torch.float64)
    explanation = il.explain(model, DIFFERENT[0], k=1, n_random=1, prepend_bos=False)
    batch = il.tokenize(model, DIFFERENT[:1], prepend_bos=False)
    return explanation, il.capture(model, batch, writers=True)


def test_an_explanation_marks_all_tokens_of_labels(
    whole_labels_explained: Any, tmp_path: Any
) -> None:
    explanation, acts = whole_labels_explained
    row = counted(DIFFERENT[0], 0)
    assert explanation.input.label_positions == tuple(row.scored)
    assert explanation.input.label_ranges == tuple(map(tuple, row.label_starts_and_ends))
    marks = {}
    for places, demonstration in zip(row.labels, row.prompt.demonstrations, strict=True):
        for place in places:
            marks[place] = explanation.labels.index(demonstration.label)
    assert explanation.input.label_at == marks
    strip = il.html.attention_to_labels(acts, ["L1H0"])
    assert dict(strip.drawings)["label_attention"].marks == marks
    explanation.save(tmp_path / "explanation.json")
    assert il.results.Explanation.load(tmp_path / "explanation.json") == explanation


def test_an_explanation_shows_attention_to_whole_labels(whole_labels_explained: Any) -> None:
    explanation, _ = whole_labels_explained
    row, (report,) = counted(DIFFERENT[0], 0), explanation.heads
    attention = torch.tensor(report.attention, dtype=torch.float64)
    to_labels = [float(attention[places.start : places.stop].sum()) for places in row.labels]
    layer, head = report.head
    assert_close(explanation.all_heads.attention[layer][head], to_labels)
    assert_close(report.attention_to(explanation.input.label_ranges), to_labels)
    (cells,) = located_table(explanation).rows
    bars = [cell.text for cell in cells if isinstance(cell, Bar)][-len(explanation.labels) :]
    by_label = {ONE: to_labels[0], TWO: to_labels[1] + to_labels[3], THREE: to_labels[2]}
    assert bars == [f"{by_label[label]:.2f}" for label in (ONE, TWO, THREE)]
    sentence, (foo, first, sad, second) = why_sentence(explanation, report), row.scored
    to_true, to_false = by_label[TWO], by_label[ONE] + by_label[THREE]
    two = f"happy nine@{first}, happy nine@{second}"
    assert f"gives {to_true:.0%} of its attention to {two}" in sentence
    assert f"and {to_false:.0%} to foo@{foo}, sad bad three@{sad}" in sentence


def test_an_explanation_adds_up_what_comes_from_whole_labels(whole_labels_explained: Any) -> None:
    explanation, acts = whole_labels_explained
    (report,), against = explanation.heads, acts.batch.other_label_tokens
    parts = il.value_parts(acts, report.head, acts.batch.answer_tokens, against=against)
    total = float(parts.value[parts.of_label(acts.batch.answer)].sum())
    assert_close(report.why.value_total, total, scale=8.0)
