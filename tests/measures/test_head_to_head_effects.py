"""Effects of edges equal hooked forward passes in every family; single edges, sets and estimates
agree.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import slow
from passes import watched
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.prompts.batch import ROLES, role_indices
from icl_lens.prompts.roles import EDGE_ROLES

READER = il.Head(2, 1)
WRITERS = ("embed", "L0H2", "F0", "L1H3", "F1")


def recording(store, name):
    def hook_fn(value, hook):
        store[name] = value.detach().clone()

    return hook_fn


def writing(name, where, new):
    """A hook that replaces an activation where `where` is true."""

    def hook_fn(value, hook):
        mask = where.reshape(*where.shape, *[1] * (value.ndim - where.ndim))
        return torch.where(mask, new.to(value), value)

    return name, hook_fn


def log_probs(model, batch, hooks=()):
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
        logits = model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
    return logits[torch.arange(len(batch)), batch.last].float().log_softmax(-1)


def last_of(batch):
    return torch.arange(batch.tokens.shape[1]) == batch.last[:, None]


def hooked_effect(model, batch, reader, part, change, where, places=None):
    """The drop in log p(answer) when a reader's part is rebuilt from its input minus `change`, by
    three passes.

    1. With `change` subtracted from the layer's input, read the queries, keys or values. 2. With
    those at `where`, read the reader's z. 3. With that z at `places` alone, by default the last
    position, read the answer.
    """
    layer, seen = reader.layer, {}
    places = last_of(batch) if places is None else places
    resid, inputs, z = (
        f"blocks.{layer}.{name}" for name in ("hook_resid_pre", f"attn.hook_{part}", "attn.hook_z")
    )
    log_probs(
        model, batch, [(resid, lambda x, hook: x - change.to(x)), (inputs, recording(seen, "part"))]
    )
    log_probs(model, batch, [writing(inputs, where, seen["part"]), (z, recording(seen, "z"))])
    mask = places[..., None] & (torch.arange(seen["z"].shape[2]) == reader.head)
    final = log_probs(model, batch, [writing(z, mask, seen["z"])])
    answer = batch.answer_tokens[:, None]
    return (log_probs(model, batch).gather(1, answer) - final.gather(1, answer))[:, 0]


def at_role(roles, role):
    kinds = ("true label", "false label") if role == "label" else (role,)
    return sum(roles == ROLES.index(kind) for kind in kinds)


def written(acts, writer, layer):
    """What a writer wrote at every position, [batch pos d_model], from the activations of a plain
    pass.
    """
    rows = acts.writers.row
    return (
        acts.writers.written(rows.clamp(min=0).flatten(), layer, writer).unflatten(0, rows.shape)
        * (rows >= 0)[..., None]
    )


@pytest.fixture(scope="module")
def grouped(load_tiny):
    """A model with grouped queries, its prompts, and activations with everything that writers
    wrote.
    """
    model = load_tiny("llama_gqa")
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    return model, batch, il.capture(model, batch, writers="all")


@pytest.mark.slow
def test_means_replace_writers_and_roles_align_prompts_of_any_length(grouped):
    model, batch, acts = grouped
    reference_batch = il.tokenize(
        model,
        [il.Prompt.parse("love : bar two : foo sad happy :", answer="bar")],
        prepend_bos=False,
    )
    reference = il.capture(model, reference_batch, writers="all")
    roles, of_reference = role_indices(batch), role_indices(reference_batch)
    assert set(of_reference.flatten().tolist()) == set(range(len(ROLES)))
    for writer in WRITERS:
        u, mean = written(acts, writer, 2), torch.zeros(len(ROLES), acts.view.d_model)
        for role, name in enumerate(ROLES):  # labels of either kind have one mean
            mean[role] = written(reference, writer, 2)[
                at_role(of_reference, "label" if "label" in name else name) > 0
            ].mean(0)
        change = (u - mean[roles.clamp(min=0)]) * (roles >= 0)[..., None]
        for reader, part, at in (
            (READER, "k", "text"),
            (il.Head(2, 0), "v", "true label"),
        ):  # which it attends to
            effects = il.head_to_head_effects(
                model,
                batch,
                [reader],
                part=part,
                writers=[writer],
                at=at,
                reference=reference_batch,
            )
            expected = hooked_effect(model, batch, reader, part, change, roles == ROLES.index(at))
            assert_close(effects.log_prob[:, 0, 0], expected, msg=f"{writer}, {at}")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["v", slow("q"), slow("k")])
def test_readers_at_a_role_are_those_at_its_tokens(grouped, part):
    """The sweep compares readers at roles and at all tokens with Hugging Face."""
    model, batch, _ = grouped
    effects = []
    for row in range(len(batch)):
        for role in ("last", "label", "true label", "text", "query", "other"):
            places = (at_role(role_indices(batch[[row]]), role) > 0)[0].nonzero()[:, 0].tolist()
            options = {"part": part, "writers": ["L0H2"], "at": "all"}
            by_role, by_place = (
                il.head_to_head_effects(
                    model, batch[[row]], ["L1H2"], reader_at=where, **options
                ).log_prob
                for where in (role, places)
            )
            assert_close(by_role, by_place, msg=role)
            effects.append(float(by_role.abs()))
    assert sum(effect > 1e-3 for effect in effects) >= len(effects) // 2


def test_sets_of_edges_at_several_tokens_are_one_pass_from_the_first_reader_on(grouped):
    """One head reads at labels, at true labels and at the last token, another at labels; blocks
    give the same.
    """
    model, batch, _ = grouped
    first = [
        il.Edge("L1H2", "v", "embed", "text", "label"),
        il.Edge("L1H2", "q", "L0H1", reader_at="true label"),
    ]
    more = [il.Edge("L1H2", "k", "F0", "label"), il.Edge("L2H1", "v", "L0H1", "text", "label")]
    passes: list[int] = []
    with watched(lambda layer, _: passes.append(layer), *model.blocks):
        scored = il.score(
            model, batch, [[], [il.WithoutEdges(first)], [il.WithoutEdges([*first, *more])]]
        )
    assert passes.count(0) < passes.count(1) == passes.count(2)  # no set runs the first layer again
    for number, edges in enumerate((first, [*first, *more]), start=1):
        with il.edited(model, il.WithoutEdges(edges), batch=batch):
            assert_close(scored[:, number], il.score(model, batch), scale=8.0)
        apart = []
        for head in ((1, 2), (2, 1)):
            apart.append(il.WithoutEdges([edge for edge in edges if edge.reader == head]))
        assert_close(scored[:, number], il.score(model, batch, [apart])[:, 0], scale=8.0)
    assert (scored[:, 1:] - scored[:, :1]).abs().max() > 1e-2
    by_role = [
        il.Edge("L1H2", "v", "embed", "text", role) for role in ("true label", "false label")
    ]
    joint, by_role_scores = il.score(
        model, batch, [[il.WithoutEdges(first[:1])], [il.WithoutEdges(by_role)]]
    ).unbind(1)
    assert_close(joint, by_role_scores, scale=8.0)
    assert (
        joint - il.score(model, batch, [[il.WithoutEdges(by_role[:1])]])[:, 0]
    ).abs().max() > 1e-3


def test_sets_of_edges_into_heads_and_ffns_of_other_layers_are_blocks(grouped):
    """At labels, by restarts, and at the last token, by rows of one token."""
    model, batch, _ = grouped
    for at in ("label", "last"):
        into_head = il.Edge("L1H2", "v", "embed", "text", at)
        into_ffns = [
            il.Edge("F0", "mlp_in", "L0H1", reader_at=at),
            il.Edge("F2", "mlp_in", "L2H0", reader_at=at),
        ]
        sets = [[], [into_head], into_ffns, [into_head, *into_ffns]]
        scored = il.score(model, batch, [[il.WithoutEdges(edges)] for edges in sets])
        for number, edges in enumerate(sets):
            with il.edited(model, il.WithoutEdges(edges), batch=batch):
                assert_close(scored[:, number], il.score(model, batch), scale=8.0, msg=at)
        moved = (scored[:, 1:] - scored[:, :1]).abs().amax((0, 2))
        assert bool((moved > 1e-4).all())
        assert not torch.allclose(scored[:, 2], scored[:, 3], atol=1e-4)


def test_estimates_of_edges_into_ffns_are_slopes_along_the_change_of_their_output(grouped):
    model, batch, _ = grouped
    for reader_at in ("last", "label"):
        options = {"part": "mlp_in", "writers": ["embed", "L1H3", "F0"], "reader_at": reader_at}
        estimates = il.head_to_head_effects(model, batch, ["F1"], method="gradient", **options)
        changes = without_each(model, batch, options["writers"], reader_at)
        for number, change in enumerate(changes):
            odds = []
            for step in (-0.05, 0.05):

                def moved(x, hook, step=step, change=change):
                    return x + step * change

                log_probs_moved = log_probs(model, batch, [("blocks.1.hook_mlp_out", moved)])
                answer = log_probs_moved.gather(1, batch.answer_tokens[:, None])
                odds.append((answer - log_probs_moved.gather(1, batch.other_label_tokens))[:, 0])
            slope = (odds[0] - odds[1]) / 0.1
            ours = estimates.log_odds[:, 0, number]
            torch.testing.assert_close(ours, slope, rtol=0.05, atol=2e-4)
        assert estimates.log_odds.abs().max() > 1e-3


def without_each(model, batch, writers, reader_at):
    """Return how F1's output changes at a role without each writer, by a pass without it."""
    acts = il.capture(model, batch, writers="all")
    is_at_role = at_role(role_indices(batch), reader_at)[..., None] > 0
    clean, changes = {}, []
    log_probs(model, batch, [("blocks.1.hook_mlp_out", recording(clean, "out"))])
    for writer in writers:
        u, seen = written(acts, writer, 2), {}
        hooks = [
            ("blocks.1.hook_attn_out", lambda x, hook, u=u: x - u),
            ("blocks.1.hook_mlp_out", recording(seen, "out")),
        ]
        log_probs(model, batch, hooks)
        changes.append(torch.where(is_at_role, seen["out"] - clean["out"], 0.0))
    return changes


def test_parts_and_names_of_readers_are_checked(grouped):
    model, batch, _ = grouped
    for reader, part, message in (
        ("F1", "q", "part must be 'mlp_in' for an FFN, got 'q' for F1"),
        ("L1H1", "mlp_in", "part must be 'q', 'k' or 'v' for a head, got 'mlp_in' for L1H1"),
        ("F9", "mlp_in", "FFN must be in layers 0–2"),
        ("Fx", "mlp_in", "invalid FFN 'Fx'; expected a name like 'F3'"),
    ):
        with pytest.raises(il.InputError, match=message):
            il.head_to_head_effects(model, batch, [reader], part=part, writers=["embed"])
    own_layer = il.head_to_head_effects(model, batch, ["F1"], part="mlp_in")
    assert own_layer.writers[-1] == "L1H3"
    assert own_layer.readers == ("F1",)
    with pytest.raises(il.InputError, match="writer must be a head, FFN, embedding or edge that"):
        il.score(model, batch, [[il.WithoutEdges([il.Edge("F1", "mlp_in", "F1")])]])


EDGES = [
    il.Edge("L1H2", "v", "L0H1", "label"),
    il.Edge((2, 1), "q", "L1H2"),
    il.Edge(il.Head(2, 1), "q", "F0"),
    il.Edge(il.Head(2, 1), "k", "embed", "label"),
    il.Edge(il.Head(2, 1), "v", "F1", "other"),
]


@pytest.mark.slow
def test_single_edges_of_sets_are_head_to_head_effects_and_estimates_are_close(grouped):
    from icl_lens.measures.head_to_head_effects import estimate_effects

    model, batch, _ = grouped
    scored = il.score(
        model, batch, [[il.WithoutEdges([])], *([il.WithoutEdges([edge])] for edge in EDGES)]
    )
    answer = batch.answer[:, None, None].expand(-1, scored.shape[1], 1)
    log_prob = scored.gather(2, answer)[..., 0]
    estimates = estimate_effects(model, batch, [il.Head(1, 2), il.Head(2, 1)], None)
    exact, estimated = [], []
    for number, edge in enumerate(EDGES, start=1):
        effects = il.head_to_head_effects(
            model,
            batch,
            [edge.reader],
            part=edge.part,
            writers=[edge.writer],
            at="all" if edge.part == "q" else edge.role,
        )
        assert_close(
            effects.log_prob[:, 0, 0],
            log_prob[:, 0] - log_prob[:, number],
            scale=8.0,
            msg=str(edge),
        )
        exact.append(effects.log_odds[:, 0, 0])
        at = (
            "qkv".index(edge.part),
            EDGE_ROLES.index(edge.role),
            (*acts_names(2),).index(edge.writer),
        )
        estimated.append(estimates[edge.reader][:, *at])
    exact, estimated = torch.stack(exact).flatten(), torch.stack(estimated).flatten()
    assert torch.corrcoef(torch.stack([exact, estimated]))[0, 1] > 0.9


def acts_names(layer):
    names = ["embed"]
    for lower in range(layer):
        names += [*(f"L{lower}H{head}" for head in range(4)), f"F{lower}"]
    return names


AT_LABELS = [
    il.Edge("L1H2", "q", "L0H1", reader_at="label"),
    il.Edge("L1H2", "k", "embed", "text", "label"),
    il.Edge("L1H2", "v", "F0", "text", "label"),
    il.Edge("L1H2", "v", "embed", "label", "label"),
]


@pytest.mark.parametrize(("edges", "layer"), [(EDGES[1:], 2), (AT_LABELS, 1)])
def test_estimates_are_slopes_of_the_log_odds_along_the_change_of_z(grouped, edges, layer):
    from icl_lens.measures.head_to_head_effects import estimate_effects

    model, batch, acts = grouped
    head, reader_at = edges[0].reader, edges[0].reader_at
    estimates = estimate_effects(model, batch, [head], None, reader_at)[head]
    roles, own_role = role_indices(batch), EDGE_ROLES.index(reader_at)
    assert estimates.shape == (3, 4, len(EDGE_ROLES), len(acts_names(layer)))
    assert (
        estimates[:, 0, [role for role in range(len(EDGE_ROLES)) if role != own_role]] == 0
    ).all()
    places = at_role(roles, reader_at) > 0
    mask, z_hook = places[..., None] & (torch.arange(4) == head.head), f"blocks.{layer}.attn.hook_z"
    compared = 0
    for edge in edges:
        seen, role = {}, EDGE_ROLES.index(edge.role)
        change = written(acts, edge.writer, layer) * at_role(roles, edge.role)[..., None]
        inputs = f"blocks.{layer}.attn.hook_{edge.part}"
        log_probs(
            model,
            batch,
            [
                (f"blocks.{layer}.hook_resid_pre", lambda x, hook, u=change: x - u),
                (inputs, recording(seen, "part")),
            ],
        )
        where = places if edge.part == "q" else roles >= 0
        log_probs(
            model, batch, [writing(inputs, where, seen["part"]), (z_hook, recording(seen, "new"))]
        )
        log_probs(model, batch, [(z_hook, recording(seen, "z"))])

        def odds(step, seen=seen):
            moved = writing(z_hook, mask, seen["z"] + step * (seen["new"] - seen["z"]))
            log_probs_moved = log_probs(model, batch, [moved])
            return (
                log_probs_moved.gather(1, batch.answer_tokens[:, None])
                - log_probs_moved.gather(1, batch.other_label_tokens)
            )[:, 0]

        slope = (odds(-0.1) - odds(0.1)) / 0.2
        ours = estimates[:, "qkv".index(edge.part), role, acts_names(layer).index(edge.writer)]
        torch.testing.assert_close(ours, slope, rtol=0.05, atol=2e-4, msg=str(edge))
        compared += int((slope.abs() > 2e-3).sum())
    assert compared >= 4


def test_full_passes_give_the_same_where_hooks_are_at_work(grouped):
    model, batch, _ = grouped
    options = {"part": "k", "writers": ["embed", "L0H2", "L1H3"]}
    effects = il.head_to_head_effects(model, batch, [READER, "L1H0"], **options)
    assert effects.fallback_reason == ""
    assert (effects.log_prob[:, 1, 2] == 0).all()  # L1H3 is not before L1H0
    with model.hooks(
        fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)]
    ):  # the cache refuses hooked models
        passes = il.head_to_head_effects(model, batch, [READER, "L1H0"], **options)
    assert "hooks" in passes.fallback_reason
    assert_close(passes.log_prob, effects.log_prob, scale=8.0)


def test_prompts_without_a_token_of_the_role_have_no_effect(grouped):
    """Nothing is removed in a prompt whose labels all differ from its answer, so it has no effect
    and no mean.
    """
    model, _, _ = grouped
    labels = ("bar", "foo")
    demonstrations = [il.Demonstration("love", "bar"), il.Demonstration("two", "foo")]
    prompts = [
        il.Prompt(demonstrations, "one", "foo", labels),
        il.Prompt(demonstrations[:1], "one", "foo", labels),
    ]
    options = {"part": "k", "writers": ["embed", "L0H2"], "at": "true label"}
    first, joint, second = (
        il.head_to_head_effects(
            model,
            il.tokenize(model, run_prompts, labels=labels, prepend_bos=False),
            [READER],
            **(options | more),
        )
        for run_prompts, more in (
            (prompts[:1], {}),
            (prompts, {}),
            (prompts[1:], {"at": "false label"}),
        )
    )
    assert_close(joint.log_prob[0], first.log_prob[0], scale=8.0)
    assert bool(joint.log_prob[1].isnan().all())
    assert bool(joint.log_odds[1].isnan().all())
    assert joint.to_frame()["log_prob"].tolist() == pytest.approx(
        first.to_frame()["log_prob"].tolist(), abs=1e-4
    )
    assert bool(second.log_prob.isfinite().all())
    with pytest.raises(
        il.InputError, match="at must be a role that a prompt has, got 'true label'"
    ):
        il.head_to_head_effects(
            model,
            il.tokenize(model, prompts[1:], labels=labels, prepend_bos=False),
            [READER],
            **options,
        )


def test_edges_that_a_model_lacks_are_refused(grouped):
    model, batch, _ = grouped
    for edge, message in (
        (il.Edge(il.Head(1, 0), "k", "L1H2", "text"), "writer must be"),
        (il.Edge(il.Head(1, 0), "q", "L0H2", "text"), "role must be 'last'"),
        (
            il.Edge(il.Head(1, 0), "q", "L0H2", "text", "label"),
            "role must be 'label' like reader_at",
        ),
        (
            il.Edge("L2H1", "k", il.Edge("L1H2", "v", "embed", "text"), "label"),
            "role must be 'last' like reader_at of",
        ),
        (
            il.Edge("L1H1", "k", il.Edge("L1H2", "v", "embed", "text", "label"), "label"),
            "writes before L1H1",
        ),
        (
            il.Edge("L2H1", "k", il.Edge("L1H2", "v", "L1H0", "text", "label"), "label"),
            "writes before L1H2",
        ),
    ):
        with pytest.raises(il.InputError, match=message):
            il.score(model, batch, [[il.WithoutEdges([edge])]])
    for options, message in (
        ({"part": "q", "at": "text"}, "at must be 'all' or 'last' like reader_at"),
        (
            {"part": "q", "at": "text", "reader_at": "label"},
            "at must be 'all' or 'label' like reader_at",
        ),
        ({"part": "k", "reader_at": [99]}, "out of range"),
        (
            {
                "part": "k",
                "at": "text",
                "writers": [il.Edge("L0H0", "v", "embed", "text", "label")],
            },
            "at must be 'label'",
        ),
        (
            {"part": "q", "writers": [il.Edge("L0H0", "v", "embed", "text", "label")]},
            "reader_at must be 'label'",
        ),
    ):
        with pytest.raises(il.InputError, match=message):
            il.head_to_head_effects(model, batch, ["L1H0"], **options)
    at_label, at_query = (
        il.Edge("L0H0", "v", "embed", "text", "label"),
        il.Edge("L0H0", "v", "embed", "text", "query"),
    )
    for writer, message in (
        ((at_label, at_query), "into one head or FFN at the same tokens"),
        ((), "name such as 'L2H0', an edge"),
    ):
        with pytest.raises(il.InputError, match=message):
            il.Edge("L1H0", "k", writer, "label")
    plain = il.tokenize(model, il.Text("love like one", answer=" two"))
    with pytest.raises(
        il.InputError, match="reader_at must be a role that a prompt has, got 'label'"
    ):
        il.head_to_head_effects(model, plain, ["L1H0"], part="v", reader_at="label")


def chain(*edges, role="label"):
    return il.Edge("L2H0", "v", edges, role)


def test_nothing_is_removed_twice(grouped):
    """Chains through one head are one, however they are written, and add nothing to the head as a
    whole.
    """
    model, batch, _ = grouped
    moved, attended = (
        il.Edge("L1H2", "v", "embed", "text", "label"),
        il.Edge("L1H2", "q", "L0H2", reader_at="label"),
    )
    true = [
        replace(moved, reader_at="true label"),
        il.Edge("L1H2", "q", "L0H2", reader_at="true label"),
    ]
    whole, inner = il.Edge("L2H0", "v", "L1H2", "label"), replace(moved, writer="L0H1")
    first = replace(moved, writer=il.Edge("L0H1", "v", "embed", "text", "text"))
    pairs = [
        ([chain(moved), chain(moved, moved)], [chain(moved)]),
        ([chain(moved), chain(attended), chain(attended, moved)], [chain(moved, attended)]),
        ([chain(moved, attended), chain(*true)], [chain(moved, attended)]),
        (
            [chain(moved), chain(true[1], role="true label")],
            [chain(moved, role="false label"), chain(*true)],
        ),
        ([whole, chain(moved)], [whole]),
        (
            [chain(moved, attended), replace(whole, role="true label")],
            [chain(moved, attended, role="false label"), replace(whole, role="true label")],
        ),
        ([chain(inner, first)], [chain(inner)]),
    ]
    sets = [[il.WithoutEdges(edges)] for edges in itertools.chain.from_iterable(pairs)]
    clean, *scored = il.score(model, batch, [[], *sets]).unbind(1)
    for (edges, _), ours, theirs in zip(pairs, scored[::2], scored[1::2], strict=True):
        assert_close(ours, theirs, msg=str(edges))
        assert (theirs - clean).abs().max() > 2e-4
    assert (scored[1] - scored[3]).abs().max() > 1e-3


def test_chains_do_not_depend_on_other_rows_of_their_prompt(grouped):
    """In rows that end at other tokens of a prompt, the last token is another one."""
    model, batch, _ = grouped
    rows = batch[:1].at([6, 9, 13])
    options = {"part": "v", "writers": [il.Edge("L1H1", "v", "F0", "label")]}
    effects = il.head_to_head_effects(model, rows, ["L2H2"], **options).log_prob
    effects_alone = [
        il.head_to_head_effects(model, rows[[row]], ["L2H2"], **options).log_prob
        for row in range(3)
    ]
    assert_close(effects, torch.cat(effects_alone))


def test_prompts_without_tokens_of_a_set_of_edges_stay(grouped):
    """Neither a reader nor the head of a chain acts where no prompt, or only one of them, has
    tokens of its role.
    """
    model, _, _ = grouped
    labels, demonstrations = (
        ("bar", "foo"),
        [il.Demonstration("love", "bar"), il.Demonstration("two", "foo")],
    )
    prompts = [
        il.Prompt(demonstrations, "one", "foo", labels),
        il.Prompt(demonstrations[:1], "one", "foo", labels),
    ]
    batch = il.tokenize(model, prompts, labels=labels, prepend_bos=False)
    moved = il.Edge("L1H2", "v", "embed", "text", "true label")
    edges = [moved, chain(moved)]
    scored = il.score(model, batch, [[], *([il.WithoutEdges([edge])] for edge in edges)])
    for row in range(2):
        alone = il.score(model, batch[[row]], [[], *([il.WithoutEdges([edge])] for edge in edges)])
        assert_close(alone[0], scored[row], scale=8.0)
    assert (scored[0, 1:] - scored[0, :1]).abs().amax(1).min() > 1e-4
    assert_close(scored[1, 1:], scored[1, :1].expand(2, -1))
    effects = il.head_to_head_effects(
        model, batch, ["L2H0"], part="v", writers=["embed", moved], at="label"
    ).log_prob
    assert effects.isnan().tolist() == [[[False, False]], [[False, True]]]
