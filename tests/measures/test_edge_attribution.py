"""EAP and EAP-IG are slopes of hooked passes; a path's estimates sum to what its edges carry;
patching agrees.
"""

import numpy as np
import pytest
import torch
import transformer_lens.patching
from cases import slow
from edge_attribution import attribute_edges, counted
from shared import PROMPTS
from test_head_to_head_effects import at_role, recording, writing, written
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits.captured_writers import writer_means
from icl_lens.measures.circuit import log_odds_without
from icl_lens.measures.edge_space import EdgeSpace
from icl_lens.measures.head_to_head_effects import estimate_effects
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import role_indices
from icl_lens.prompts.roles import EDGE_ROLES, role_masks

READERS = [il.Head(1, 2), il.Head(2, 1)]
EDGES = [("q", None, "F0"), ("k", "label", "L0H1"), ("k", "text", "embed"), ("v", "label", "F0")]
EDGES += [("v", "text", "embed"), ("v", "other", "L0H3")]
STEP = 1e-4


@pytest.fixture(params=["gpt2", slow("llama_gqa")])
def case(load_tiny, float64, request):
    model = load_tiny(request.param, dtype=torch.float64)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    return model, batch, writer_means(model, batch)


def log_odds(model, batch, hooks):
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        logits = model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
    logits = logits[torch.arange(len(batch)), batch.last]
    return (
        logits.gather(1, batch.answer_tokens[:, None]) - logits.gather(1, batch.other_label_tokens)
    )[:, 0]


def slope_of_passes(model, batch, head, part, change, where, places, moved):
    """Differences of the log-odds when the reader's input moves: read its part, then z, then the
    answer.
    """
    resid, inputs, z_hook = (
        f"blocks.{head.layer}.{name}"
        for name in ("hook_resid_pre", f"attn.hook_{part}", "attn.hook_z")
    )
    log_odds_at_steps, mask = [], places[..., None] & (torch.arange(model.cfg.n_heads) == head.head)
    for size in (-STEP, STEP):
        seen, move = {}, (resid, lambda x, hook, size=size: x - size * change)
        log_odds(model, batch, [moved, move, (inputs, recording(seen, "part"))])
        log_odds(
            model,
            batch,
            [moved, writing(inputs, where, seen["part"]), (z_hook, recording(seen, "z"))],
        )
        log_odds_at_steps.append(log_odds(model, batch, [moved, writing(z_hook, mask, seen["z"])]))
    return (log_odds_at_steps[0] - log_odds_at_steps[1]) / (2 * STEP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader_at", "path", "steps"),
    [("last", None, 1), ("label", None, 1), ("label", "inputs", 2)],
)
def test_estimates_are_slopes_of_hooked_passes_along_each_input(case, reader_at, path, steps):
    model, batch, means = case
    acts, roles = il.capture(model, batch, writers="all"), role_indices(batch)
    estimates = attribute_edges(
        *case[:2], READERS, means, path=path, steps=steps, reader_at=reader_at
    )
    places, compared = at_role(roles, reader_at) > 0, 0

    def change_of(writer, layer):
        mean = means[roles.clamp(min=0), acts.writers.names(layer).index(writer)]
        return (written(acts, writer, layer) - mean) * (roles >= 0)[..., None]

    total = sum(change_of(name, 0) for name in acts.writers.names(0)[:-1])
    for head in READERS:
        for part, role, writer in EDGES:
            role = role or reader_at
            change = change_of(writer, head.layer) * at_role(roles, role)[..., None]
            where = places if part == "q" else roles >= 0
            slopes = [
                slope_of_passes(
                    *(model, batch, head, part, change, where, places),
                    (
                        "blocks.0.hook_resid_pre",
                        lambda x, hook, number=number: x - (1 - number / steps) * total,
                    ),
                )
                for number in range(1, steps + 1)
            ]
            index = (
                "qkv".index(part),
                EDGE_ROLES.index(role),
                acts.writers.names(head.layer).index(writer),
            )
            torch.testing.assert_close(
                estimates[head][:, *index], sum(slopes) / steps, rtol=1e-5, atol=1e-8
            )
            compared += int((slopes[0].abs() > 1e-4).sum())
    assert compared > 10


@pytest.mark.slow
def test_the_readers_path_sums_to_what_all_edges_carry(case):
    model, batch, means = case
    view, space = ModelView.of(model), EdgeSpace.of(ModelView.of(model), READERS)
    removed = space.removal_masks(np.stack([np.zeros(len(space), bool), np.ones(len(space), bool)]))
    carried = -log_odds_without(view, batch, removed, means, n_sets=2).diff(dim=1)[:, 0]
    sums = [
        space.flatten(
            attribute_edges(model, batch, READERS, means, path="readers", steps=steps)
        ).sum(1)
        for steps in (8, 16, 32)
    ]
    errors = [(path_sum - carried).abs().max() for path_sum in sums]
    assert errors[0] > 1.8 * errors[1] > 3.2 * errors[2]  # the error of n steps falls like 1/n
    torch.testing.assert_close(2 * sums[2] - sums[1], carried.to(sums[0]), rtol=1e-2, atol=2e-5)


@pytest.mark.slow
def test_costs_are_counted_and_one_step_of_a_path_is_eap(case):
    view, arguments = ModelView.of(case[0]), (*case[:2], READERS, case[2])
    plain = attribute_edges(*arguments)
    for path, steps in ((None, 1), ("inputs", 1), ("readers", 1), ("inputs", 3)):
        with counted(view, case[1]) as passes:
            attribution = attribute_edges(*arguments, path=path, steps=steps)
        assert (passes.forwards, passes.backwards) == pytest.approx((1 + steps, steps))
        if steps == 1:  # the readers' path does not lead through other readers
            for head in READERS if path == "inputs" else READERS[-1:]:
                assert_close(attribution[head], plain[head])
    with counted(view, case[1]) as passes:
        estimate_effects(*arguments)
    assert (passes.forwards, passes.backwards) == pytest.approx((2, 1))


def test_sets_into_one_of_several_readers_leave_the_others_alone(case):
    """Readers of which a call removes no edge once shifted what the others lost."""
    model, batch, means = case
    view, space = ModelView.of(model), EdgeSpace.of(ModelView.of(model), READERS)
    masks = np.zeros((2, len(space)), bool)
    masks[1, [str(space.edge(i)) for i in range(len(space))].index("F0 → L2H1.v (label)")] = True
    set_log_odds = log_odds_without(view, batch, space.removal_masks(masks), means, n_sets=2)
    options = {"part": "v", "writers": ["F0"], "at": "label", "reference": batch}
    exact = il.head_to_head_effects(model, batch, [READERS[1]], **options).log_odds[:, 0, 0]
    assert_close(set_log_odds[:, 0] - set_log_odds[:, 1], exact, scale=8.0)
    assert exact.abs().max() > 1e-4


def direct_path_drops(model, batch, reference, source, part, role):
    """TransformerLens' direct path patching from one head's mean over a role: drops in mean
    log-odds, [layer head].

    Every later head is a reader, at all tokens. Only for TransformerLens 4, and for keys and values
    of models without grouped queries.
    """
    from transformer_lens import ActivationCache
    from transformer_lens.patching import get_act_patch_direct_path

    name = ModelView.of(model).hook(source.layer, "attn.hook_z")

    def z_of(prompts):
        _, cache = model.run_with_cache(
            prompts.tokens, names_filter=name, attention_mask=prompts.attention_mask
        )
        return cache[name], role_masks(prompts, [role])[:, 0]

    def metric(logits):
        log_probs = logits[torch.arange(len(batch)), batch.last].log_softmax(-1)
        answer = log_probs.gather(1, batch.answer_tokens[:, None])
        return (answer - log_probs.gather(1, batch.other_label_tokens)).mean()

    with torch.no_grad():
        (z, at), (reference_z, other_at) = z_of(batch), z_of(reference)
        replaced = torch.where(at[..., None, None], reference_z[other_at].mean(0), z)
        clean, corrupted = (ActivationCache({name: z_values}, model) for z_values in (replaced, z))
        patched = get_act_patch_direct_path(
            model,
            batch.tokens,
            clean,
            corrupted,
            metric,
            source.layer,
            source.head,
            component=part,
            verbose=False,
        )
        clean_log_odds = metric(
            model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
        )
    return clean_log_odds - patched


@pytest.mark.skipif(
    not hasattr(transformer_lens.patching, "get_act_patch_direct_path"),
    reason="this TransformerLens has none",
)
@pytest.mark.parametrize(("part", "role"), [("q", "last"), ("k", "label"), ("v", "text")])
def test_direct_path_patching_of_transformer_lens_is_ours_at_all_tokens(case, part, role):
    model, batch, _ = case
    if ModelView.of(model).n_kv_heads < ModelView.of(model).n_heads and part != "q":
        pytest.skip("TransformerLens refuses keys and values that heads share")
    theirs = direct_path_drops(model, batch, batch, il.Head(0, 1), part, role)
    where = {"reader_at": "last"} if part == "q" else {"reader_at": "all", "at": role}
    ours = il.head_to_head_effects(
        model, batch, READERS, part=part, writers=["L0H1"], reference=batch, **where
    )
    assert_close(
        torch.stack([theirs[reader] for reader in READERS]),
        ours.log_odds.mean(0)[:, 0].float(),
        scale=8.0,
    )
    assert ours.log_odds.abs().max() > 1e-4
