"""Edits as values: sets of any edits score what their blocks do, read by any metric; draws, and
edits of one's own.
"""

import itertools
from dataclasses import dataclass, replace
from itertools import pairwise

import families
import pytest
import torch
from cases import slow
from passes import watched
from shared import ragged
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits.recomputed_patterns import without_keys
from icl_lens.edits.whole_passes import pass_tokens
from icl_lens.errors import InputError
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs

HEADS = [(0, 1), (1, 0), (2, 2)]
EDGES = [il.Edge(il.Head(2, 1), "k", "L0H2", "label"), il.Edge(il.Head(2, 1), "q", "F1")]


@dataclass(frozen=True)
class AttendToFirst(il.Edit):
    """The example of docs/howto/edits.md."""

    heads: list
    positions: str = "last"
    stages = ("pattern",)

    def write_attention(self, attention, heads, layer):
        row, last = attention.last_queries
        for head in attention.indices_of(heads):
            attention.pattern[row, head, last] = 0
            attention.pattern[row, head, last, 0] = 1


@dataclass(frozen=True)
class Halve(il.Edit):
    heads: list
    positions: str = "all"

    def write_z(self, z, at, layer):
        if self.positions == "last":
            z[at.row, at.last, at.head] /= 2
        else:
            z[at.row, :, at.head] /= 2


def blocked_for_last(batch):
    """Return the pairs of the last position and every label, to block."""
    width = batch.tokens.shape[1]
    edges = torch.zeros(len(batch), width, width, dtype=torch.bool)
    for row, last in enumerate(batch.last.tolist()):
        edges[row, last, batch.label_positions[row]] = True
    return edges


def with_turned_demonstrations(model, batch):
    """Return the prompts of a batch with their demonstrations in reverse order."""
    prompts = [
        replace(prompt, demonstrations=prompt.demonstrations[::-1]) for prompt in batch.prompts
    ]
    return il.tokenize(model, prompts, prepend_bos=False)


def edits_of(model, batch):
    """Return edits that change only the last position, and others, by name."""
    source = batch[[1, 2, 0]]
    turned = with_turned_demonstrations(model, batch)
    vector = torch.linspace(-1, 1, families.D_MODEL)
    last = {
        "zero": il.Ablate(HEADS, positions="last"),
        "mean": il.Ablate(HEADS[:2], mode="mean", reference=source, positions="last"),
        "draw": il.Ablate(HEADS[1:], mode="resample", reference=source, positions="last"),
        "query": il.Patch(HEADS, source, activation="q", positions="last"),
        "keys": il.Patch(HEADS[1:], turned, activation="k", positions="last", align="labels"),
        "weights": il.Reweight(
            HEADS, torch.full(batch.label_positions.shape, 0.25), renormalize=True
        ),
        "position": il.RemovePosition(HEADS, strength=0.7, positions="last"),
        "blocked": il.Block(HEADS, blocked_for_last(batch)),
        "vector": il.AddVector(vector, 1),
        "in place": il.AddVector(vector, 2, replace=True),
        "gates": il.Ablate(HEADS, positions="last", strength=[0.3, 1.0, -0.5]),
        "partly to the mean": il.Ablate(
            HEADS[:2], mode="mean", reference=source, positions="last", strength=0.4
        ),
        "edges": il.WithoutEdges(EDGES),
        "own pattern": AttendToFirst(HEADS),
        "own z": Halve(HEADS, "last"),
    }
    everywhere = {
        "zero everywhere": il.Ablate(HEADS),
        "gates everywhere": il.Ablate(HEADS, strength=torch.tensor([0.3, 1.0, -0.5])),
        "zero in places": il.Ablate(HEADS, positions=[1, -2]),
        "mean at labels": il.Ablate(HEADS, mode="mean", reference=source, positions="labels"),
        "gates at labels": il.Ablate(HEADS, positions="labels", strength=[0.3, 1.0, -0.5]),
        "vector everywhere": il.AddVector(vector, 1, positions="all"),
        "vector in places": il.AddVector(vector, 1, replace=True, positions=[1, -2]),
        "position everywhere": il.RemovePosition(HEADS),
        "own z everywhere": Halve(HEADS),
    }
    return last, everywhere


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        slow("llama_gqa"),
        slow("bloom"),
        slow("gemma2"),
    ],
)
def test_sets_of_any_edits_score_what_their_blocks_do(load_tiny, name):
    """Each edit alone, every pair of one and the next, all of the last position at once, and edits
    everywhere.
    """
    model = load_tiny(name)
    batch = ragged(model)
    last, everywhere = edits_of(model, batch)
    sets = [[], *([edit] for edit in (*last.values(), *everywhere.values()))]
    last_edits = list(last.values())
    sets += [[first, second] for first, second in pairwise(last_edits)]
    sets += [last_edits, [*last_edits, *everywhere.values()], list(everywhere.values())]
    scored = il.score(model, batch, sets)
    for number, edits in enumerate(sets):
        with il.edited(model, *edits, batch=batch):
            assert_close(scored[:, number], il.score(model, batch), msg=str(edits))
    changed = (scored[:, 1:] - scored[:, :1]).abs().amax((0, 2))
    assert changed.min() > 1e-4


def test_edits_of_the_last_position_run_one_token_per_prompt(load_tiny):
    """All kinds of edits, alone and all at once: after the passes of their own, one pass over whole
    prompts.
    """
    model = load_tiny("gpt2")
    batch = ragged(model)
    last, _ = edits_of(model, batch)
    sets = [[edit] for edit in last.values()] + [list(last.values())]
    il.score(model, batch, sets)  # checks of heads run once per model
    widths = []
    with watched(lambda _, x: widths.append(x.shape[1]), model.blocks[2]):
        il.score(
            model,
            batch,
            [
                [last_edit]
                for name, last_edit in last.items()
                if name in ("zero", "weights", "blocked")
            ],
        )
        assert widths == [batch.tokens.shape[1], 1]
        il.score(
            model, batch, [[last["own pattern"]]]
        )  # compared with a whole pass, because it is not ours
        assert widths[2:] == [batch.tokens.shape[1], 1, batch.tokens.shape[1]]


def test_a_metric_reads_the_log_probabilities_of_each_prompt(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    seen = []

    def answer(log_probs, prompt):
        seen.extend(prompt.tolist())
        return log_probs.gather(1, batch.answer_tokens[prompt, None])[:, 0]

    for edits in (
        [il.Ablate(HEADS, positions="last")],
        [il.Ablate(HEADS)],
        [il.RemovePosition(HEADS)],
    ):
        probabilities = il.score(model, batch, [[], edits], read=answer)
        with il.edited(model, *edits):
            whole = last_log_probs(model, batch).gather(1, batch.answer_tokens[:, None])[:, 0]
        assert probabilities.shape == (len(batch), 2)
        assert_close(probabilities[:, 1], whole)
    assert set(seen) == set(range(len(batch)))


def test_a_drawn_head_has_the_z_of_another_prompt(load_tiny):
    """The draw belongs to the prompt: it is the same in another batch, and never the prompt
    itself.
    """
    model = load_tiny("gpt2")
    batch = ragged(model)
    unedited_z = il.capture(model, batch).z[:, 1]

    def draw(prompts, seed=0):
        edit = il.Ablate(
            [(1, 0), (1, 1), (1, 2), (1, 3)],
            mode="resample",
            reference=batch,
            positions="last",
            seed=seed,
        )
        with il.edited(model, edit, batch=prompts):
            return il.capture(model, prompts).z[:, 1]

    drawn = draw(batch)
    is_equal = torch.stack(
        [
            torch.stack([(row - prompt_z).abs().amax() < 1e-5 for prompt_z in unedited_z])
            for row in drawn
        ]
    )
    assert is_equal.sum(1).tolist() == [1] * len(batch)
    assert not is_equal.diagonal().any()
    assert_close(draw(batch[[2, 0]]), drawn[[2, 0]])
    assert any(not torch.equal(draw(batch, seed), drawn) for seed in range(1, 8))


def test_passes_that_edits_need_run_once_for_all_sets(load_tiny):
    """A mean over two batches of references, for every head alone: two passes over them."""
    model = load_tiny("gpt2")
    batch = ragged(model)
    reference = [batch[:2], batch[1:]]
    heads = ModelView.of(model).heads()
    sets = [
        [il.Ablate([head], mode="mean", reference=reference, positions="last")] for head in heads
    ]
    il.score(model, batch, sets)
    passes = []
    with watched(lambda _, x: passes.append(tuple(x.shape[:2])), model.blocks[0]):
        il.score(model, batch, sets)
    whole = [shape for shape in passes if shape[1] > 1]
    assert whole == [
        (2, batch[:2].tokens.shape[1]),
        (2, batch[1:].tokens.shape[1]),
        tuple(batch.tokens.shape),
    ]


def test_edits_know_what_they_are():
    edit = il.Ablate(["L1H0", (2, 3)], positions="last")
    with pytest.raises(AttributeError):
        edit.positions = "all"
    assert repr(edit).startswith("Ablate(heads=('L1H0', (2, 3)), mode='zero'")
    assert edit.description == "zeroed at the last position"


@pytest.mark.slow
def test_scores_in_an_open_block_keep_the_order_of_stages(load_tiny):
    """An edit of z does not undo the ablation of an outer block; edges are removed from a pass
    without edits.
    """
    model = load_tiny("gpt2")
    batch = ragged(model)
    source = batch[[1, 2, 0]]
    for outer in (il.Ablate([(1, 0)]), il.Ablate([(0, 2)]), il.Ablate([(2, 1)])):
        for inner in (
            il.Patch([(1, 0)], source, activation="z", positions="last"),
            Halve([(1, 0), (2, 1)]),
            il.WithoutEdges(EDGES),
            il.Ablate([(1, 0), (1, 1)], mode="mean", reference=source),
        ):
            with il.edited(model, outer):
                scored = il.score(model, batch, [[inner]])[:, 0]
                with il.edited(model, inner, batch=batch):
                    assert_close(il.score(model, batch), scored, msg=f"{outer} {inner}")
            assert_close(
                il.score(model, batch, [[outer, inner]])[:, 0], scored, msg=f"{outer} {inner}"
            )


@dataclass(frozen=True)
class Shift(il.Edit):
    """Writes z and the stream after its layer, both at the last position, by its own factor."""

    heads: list
    factor: float
    positions: str = "last"
    stages = ("z", "resid_post")

    def write_z(self, z, at, layer):
        z[at.row, at.last, at.head] *= self.factor

    def write_site(self, x, at, layer):
        x[at.row, at.last] *= self.factor


@dataclass(frozen=True)
class Fill(il.Ablate):
    """Ablation to a number of its own."""

    number: float = 0.0

    def write_z(self, z, at, layer):
        z[at.row, at.last, at.head] = self.number


def test_own_edits_may_write_at_two_stages_and_derive_from_others(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    sets = [[Shift([(1, 0)], 2.0)], [Shift([(1, 0), (1, 2)], 0.5)]]
    for where, number in itertools.product(("last", "all"), (0.0, 5.0)):
        sets.append([Fill([(1, 0)], positions=where, number=number)])
    scored = il.score(model, batch, sets)
    for number, edits in enumerate(sets):
        with il.edited(model, *edits):
            assert_close(il.score(model, batch), scored[:, number], msg=str(edits))
    assert (scored[:, 3] - scored[:, 2]).abs().max() > 0.01
    assert (scored[:, 5] - scored[:, 4]).abs().max() > 0.01


def test_a_prepared_mean_does_not_leave_another_edit_without_one(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    fresh = [il.Ablate([head], mode="mean", reference=batch, positions="last") for head in HEADS]
    (prepared,) = il.Ablate.prepare(ModelView.of(model), fresh[:1], None)
    mixed = il.score(model, batch, [[prepared], *([edit] for edit in fresh[1:])])
    assert_close(mixed, il.score(model, batch, [[edit] for edit in fresh]))


@pytest.mark.parametrize("has_sink", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_hidden_as_if_they_had_never_been_there(dtype, has_sink):
    """The softmax of the other scores, and of the sink's, in float64: a pattern in half precision
    does not sum to 1.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20, 3, 41, generator=generator, dtype=torch.float64)
    scores[..., -1] = scores[..., -1] + 2 if has_sink else -torch.inf
    n_hidden = (
        20 if has_sink else 38
    )  # without a sink, what is left may be less than the rounding of the whole
    hidden = torch.zeros(20, 1, 40, dtype=torch.bool)
    hidden[..., :n_hidden] = True
    pattern = scores.softmax(-1)[..., :-1].to(dtype)
    expected = scores.masked_fill(torch.nn.functional.pad(hidden, (0, 1)), -torch.inf).softmax(-1)[
        ..., :-1
    ]
    renormalized = without_keys(pattern, hidden, has_sink=has_sink).double()
    assert (renormalized - expected).abs().max() < 2 * torch.finfo(dtype).eps
    assert (renormalized[..., :n_hidden] == 0).all()


def test_blocking_no_key_of_a_model_with_sinks_changes_nothing(load_tiny):
    model = load_tiny("gpt_oss")
    batch = ragged(model)
    width = batch.tokens.shape[1]
    none = torch.zeros(len(batch), width, width, dtype=torch.bool)
    plain = il.score(model, batch)
    with il.edited(model, il.Block(HEADS, none)):
        assert_close(il.score(model, batch), plain)


def test_prompts_of_a_block_are_those_that_run(load_tiny):
    """Also of edits that do not need to know them, and at the prompts' end while tokens follow."""
    model = load_tiny("gpt2")
    batch = il.tokenize(model, ["love : bar like : bar eight : foo two : foo one :"])
    with (
        il.edited(model, il.Patch(HEADS, batch, activation="z"), batch=batch),
        pytest.raises(il.InputError),
    ):
        last_log_probs(
            model, il.tokenize(model, ["hate : bar like : bar eight : foo two : foo one :"])
        )
    longer = torch.cat([batch.tokens, batch.tokens[:, :2]], dim=1)
    seen = []
    hook = lambda z, hook: seen.append(z[0, :, 1].clone())  # noqa: E731
    with il.edited(model, il.WithoutEdges(EDGES), batch=batch):
        for tokens in (batch.tokens, longer):
            with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.2.attn.hook_z", hook)]):
                model(tokens)
    last = int(batch.last)
    assert_close(seen[1][last], seen[0][last])


@dataclass(frozen=True)
class CopyFirst(il.Edit):
    """Says that it needs the last position only, but reads the first."""

    heads: list
    positions: str = "last"

    def write_z(self, z, at, layer):
        z[at.row, at.last, at.head] = z[at.row, 0, at.head]


@dataclass(frozen=True)
class CopyFirstLate(il.Edit):
    """Says that it needs nothing before the last position, but reads the first."""

    heads: list

    def first_changes(self, batch):
        return batch.last

    def write_z(self, z, at, layer):
        z[at.row, at.last, at.head] = z[at.row, 0, at.head]


@dataclass(frozen=True)
class HideQuery(il.Edit):
    heads: list
    positions: str = "last"
    stages = ("inputs",)

    def write_attention(self, attention, heads, layer):
        row, last = attention.last_queries
        for head in attention.indices_of(heads):
            attention.inputs.q[row, last, head] = 0


@dataclass(frozen=True)
class Empty(il.Edit):
    heads: list
    positions: str = "last"


@dataclass(frozen=True)
class OneStage(Empty):
    stages = "pattern"


def test_own_edits_cannot_go_wrong_silently(load_tiny, no_type_checks):
    model = load_tiny("gpt2")
    batch = ragged(model)
    hidden = il.score(model, batch, [[], [HideQuery(HEADS)]])
    with il.edited(model, HideQuery(HEADS)):
        assert_close(il.score(model, batch), hidden[:, 1])
    assert (hidden[:, 1] - hidden[:, 0]).abs().max() > 1e-3
    for sets, read, message in (
        ([[CopyFirst(HEADS)]], None, "CopyFirst must change and read only the last position"),
        (
            [[CopyFirstLate(HEADS)]],
            None,
            "CopyFirstLate must change and read no position before the first of first_changes",
        ),
        ([[Empty(HEADS)]], None, "Empty must define write_z"),
        ([[OneStage(HEADS)]], None, "must be a tuple of names"),
        (
            [[il.Ablate(HEADS, positions="last")]],
            lambda log_probs, prompt: log_probs.mean(0),
            "one entry per row",
        ),
        ([[il.Ablate(HEADS)]], lambda log_probs, prompt: 0.5, "one entry per row, 3, got float"),
        ([["L0H1"]], None, "il.Ablate"),
    ):
        with pytest.raises(il.InputError, match=message):
            il.score(model, batch, sets, read=read)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_earlier_positions_do_not_see_what_only_the_last_query_reads(load_tiny, name):
    """Heads with patched keys keep, before the last position, the z that all other edits give
    them.
    """
    model = load_tiny(name)
    batch = ragged(model)
    turned = with_turned_demonstrations(model, batch)
    patch = il.Patch([(1, 1), (1, 2)], turned, activation="k", positions="last", align="labels")
    everywhere = [il.Ablate([(0, 2)]), il.RemovePosition([(1, 1)])]
    seen, patterns = [], []
    hooks = [
        ("blocks.1.attn.hook_z", lambda z, hook: seen.append(z.clone())),
        ("blocks.1.attn.hook_pattern", lambda pattern, hook: patterns.append(pattern.clone())),
    ]
    for edits in (everywhere, [*everywhere, patch]):
        with il.edited(model, *edits, batch=batch), model.hooks(fwd_hooks=hooks):
            last_log_probs(model, batch)
    for row, last in enumerate(batch.last.tolist()):
        assert_close(seen[1][row, :last], seen[0][row, :last])
        assert_close(patterns[1][row, :, :last], patterns[0][row, :, :last])
        assert (seen[1][row, last] - seen[0][row, last]).abs().amax(-1)[[1, 2]].min() > 1e-4
        assert (patterns[1][row, :, last] - patterns[0][row, :, last]).abs().max() > 1e-4


@dataclass(frozen=True)
class AttendToFirstEverywhere(AttendToFirst):
    """Writes the pattern of all queries, though only the last position changes."""

    def write_attention(self, attention, heads, layer):
        for head in attention.indices_of(heads):
            attention.pattern[:, head] = 0
            attention.pattern[:, head, :, 0] = 1


def test_an_edit_of_the_last_position_leaves_attention_of_earlier_queries(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    everywhere = AttendToFirstEverywhere([(1, 1)])
    last = AttendToFirst([(1, 1)])
    patterns = []
    hook = ("blocks.1.attn.hook_pattern", lambda pattern, hook: patterns.append(pattern.clone()))
    for edits in ([], [everywhere], [last]):
        with il.edited(model, *edits), model.hooks(fwd_hooks=[hook]):
            last_log_probs(model, batch)
    unedited, of_everywhere, of_last = patterns
    assert torch.equal(of_everywhere, of_last)
    for row, position in enumerate(batch.last.tolist()):
        assert torch.equal(of_last[row, :, :position], unedited[row, :, :position])
        assert not torch.equal(of_last[row, 1, position], unedited[row, 1, position])
    scored = il.score(model, batch, [[everywhere]])[:, 0]
    with il.edited(model, everywhere):
        assert_close(il.score(model, batch), scored)


def test_patched_values_keep_the_models_attention(load_tiny, monkeypatch):
    """Patterns do not depend on values, so that none is computed again."""
    model = load_tiny("gpt2")
    batch = ragged(model)
    patterns, zs = [], []
    hooks = [
        ("blocks.1.attn.hook_pattern", lambda pattern, hook: patterns.append(pattern.clone())),
        ("blocks.1.attn.hook_z", lambda z, hook: zs.append(z.clone())),
    ]
    turned = with_turned_demonstrations(model, batch)
    patch = il.Patch([(1, 1)], turned, activation="v", align="labels")
    il.score(model, batch, [[patch]])  # checks of heads run once per model
    monkeypatch.setattr("icl_lens.edits.edited_attention.recompute_pattern", None)
    for edits in ([], [patch]):
        with il.edited(model, *edits, batch=batch), model.hooks(fwd_hooks=hooks):
            last_log_probs(model, batch)
    assert torch.equal(patterns[1], patterns[0])
    assert (zs[1] - zs[0])[:, :, 1].abs().max() > 1e-4


def test_a_pass_shorter_than_the_prompts_of_blocked_edges_is_refused(load_tiny):
    """With the prompts known, tokens may follow them, but none may be missing."""
    model = load_tiny("gpt2")
    batch = ragged(model)
    with (
        il.edited(model, il.Block(HEADS, blocked_for_last(batch)), batch=batch),
        pytest.raises(
            il.InputError,
            match=r"must have at least .* tokens like batch, got 5; run the same batch",
        ),
    ):
        model(batch.tokens[:, :5])


def test_ablation_in_places_changes_these_alone(load_tiny):
    """Each prompt has its own last tokens and labels, also where padding follows; other places keep
    their z.
    """
    model = load_tiny("gpt2")
    batch = ragged(model)
    assert len({*batch.last.tolist()}) > 1
    layer, head = 1, 1

    def z_within(*edits):
        seen = []
        hooks = [
            (ModelView.of(model).hook(layer, "attn.hook_z"), lambda z, hook: seen.append(z.clone()))
        ]
        with il.edited(model, *edits, batch=batch), model.hooks(fwd_hooks=hooks):
            last_log_probs(model, batch)
        return seen[0]

    clean = z_within()
    for positions in ([1, -2], [0], "labels"):
        edited = z_within(il.Ablate([(layer, head)], positions=positions))
        for row, last in enumerate(batch.last.tolist()):
            places = (
                batch.all_label_positions[row].flatten().tolist()
                if positions == "labels"
                else positions
            )
            places = {
                last + 1 + place if place < 0 and positions != "labels" else place
                for place in places
            }
            for position in range(last + 1):
                expected = clean[row, position].clone()
                expected[head] *= position not in places
                assert torch.equal(edited[row, position], expected), (positions, row, position)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([40], "positions must be in every prompt, the shortest with"),
        ([-40], "positions must be in every prompt"),
        ([1, 1], "must be different positions"),
        ([], "must be different positions"),
        ("labels", "batch must be the prompts run in the block"),
    ],
)
def test_places_that_prompts_do_not_have_are_refused(load_tiny, positions, words):
    model = load_tiny("gpt2")
    with pytest.raises(InputError, match=words), il.ablate_heads(model, HEADS, positions=positions):
        il.score(model, ragged(model))


def test_a_mask_beside_embeddings_is_not_taken_for_tokens():
    tokens, mask = torch.tensor([[5, 7]]), torch.tensor([[1, 1]])
    embeddings = torch.zeros(1, 2, 4)
    assert pass_tokens((), {"inputs_embeds": embeddings, "attention_mask": mask}) is None
    assert pass_tokens((), {"attention_mask": mask, "input_ids": tokens}) is tokens
    assert pass_tokens((tokens,), {"attention_mask": mask}) is tokens
