"""Inside `with` blocks and under hooks of one's own, results name the edits; their numbers are the
edited model's.
"""

import json
from contextlib import nullcontext
from functools import partial
from threading import Thread

import families
import pytest
import torch
from explanations import shown_text, terminal_text
from shared import ragged
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.active_edits import active_edits, edits_disabled
from icl_lens.models.view import ModelView
from icl_lens.runs.configuration import configuration

HEADS = [il.Head(1, 2), il.Head(2, 0)]
ZEROED = "L1H2, L2H0 zeroed"
HOOK = "blocks.0.hook_resid_pre"


@pytest.fixture(scope="module")
def explained(gpt2):
    """Explanations of the model as it is, with two heads zeroed, and under a hook."""
    explanations = []
    for block in (
        nullcontext(),
        il.ablate_heads(gpt2, HEADS),
        gpt2.hooks(fwd_hooks=[(HOOK, lambda x, hook: 1.5 * x)]),
    ):
        with block:
            explanations.append(
                il.explain(gpt2, il.Prompt.parse(families.PROMPT, answer="foo"), k=2, n_random=2)
            )
    return explanations


@pytest.mark.slow
def test_an_explanation_names_the_edits_everywhere(gpt2, explained, tmp_path):
    plain, ablated, hooked = explained
    assert [explanation.edits for explanation in explained] == [
        (),
        (ZEROED,),
        (f"hooks at {HOOK}",),
    ]
    batch = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT, answer="foo")])
    with il.ablate_heads(gpt2, HEADS):
        assert_close(ablated.scores.log_probs, il.score(gpt2, batch)[0])
    assert abs(ablated.scores.log_probs[0] - plain.scores.log_probs[0]) > 1e-4
    for explanation in (ablated, hooked):
        note = f"All numbers are those of the edited model: {explanation.edits[0]}."
        assert explanation.edits[0] in repr(explanation)
        assert note in terminal_text(explanation)
        assert note in explanation.to_html()
    assert "edited" not in terminal_text(plain)
    assert "those of the edited model" not in plain.to_html()
    ablated.save(tmp_path / "e.json")
    assert il.results.Explanation.load(tmp_path / "e.json") == ablated


def test_a_comparison_names_the_edits_of_each_side(explained):
    plain, ablated, _ = explained
    comparison = il.compare(plain, ablated)
    assert f"In B: All numbers are those of the edited model: {ZEROED}." in comparison.to_html()
    assert ZEROED in repr(comparison)


@pytest.mark.slow
def test_results_over_prompts_name_the_edits(gpt2, words):
    prompts = il.load_task("sentiment-number", path=words, n=20, layout="random", demonstrations=1)
    batch = il.tokenize(gpt2, prompts)
    with il.ablate_heads(gpt2, HEADS):
        ablation = il.ablate_with_controls(gpt2, batch, ["L0H0"], n_random=1)
        check = il.task_check(gpt2, prompts)
        comparison = il.compare_models(gpt2, gpt2, prompts)
        single, located = (
            il.head_effects(gpt2, batch, positions="last"),
            il.locate(gpt2, batch, k=2),
        )
        asked = {"by": "contrast", "n": 20}
        assert configuration(gpt2, batch, [[0]], {"k": 2}, asked)["edits"] == [ZEROED]
        expected = il.score(gpt2, batch)
    assert_close(ablation.conditions["no ablation"].scores[0].label_log_probs, expected)
    assert (
        f"All conditions, also “no ablation”, are those of the edited model: {ZEROED}."
        in ablation.notes()
    )
    assert json.loads(ablation.to_json())["edits"] == [ZEROED]
    assert str(check).endswith(f"All numbers are those of the edited model: {ZEROED}.")
    assert check.to_dict()["edits"] == [ZEROED]
    assert comparison.edits == ((ZEROED,), (ZEROED,))
    assert f"Numbers of B are those of the edited model: {ZEROED}." in comparison.to_html()
    for measured in (single, located):
        assert measured.edits == (ZEROED,)
    assert ZEROED in repr(single)
    assert ZEROED in located.summary()
    assert "edits" not in configuration(gpt2, batch, [[0]], {"k": 2}, asked)
    assert il.locate(gpt2, batch, k=2).edits == ()


def test_every_block_has_words(gpt2):
    view = ModelView.of(gpt2)
    batch = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT, answer="foo")])
    blocked = torch.zeros(1, batch.tokens.shape[1], batch.tokens.shape[1], dtype=torch.bool)
    blocks = {
        "zeroed at the last position": il.ablate_heads(gpt2, HEADS, positions="last"),
        "scaled by 2 at the last position": il.edited(
            gpt2, il.Ablate(HEADS, strength=-1.0, positions="last")
        ),
        "scaled by 0.75": il.edited(gpt2, il.Ablate(HEADS, strength=0.25)),
        "set to their mean": il.ablate_heads(gpt2, HEADS, mode="mean", reference=batch),
        "patched (v)": il.patch_heads(gpt2, HEADS, batch, activation="v"),
        "with scaled attention to labels": il.edited(
            gpt2,
            il.Reweight(
                HEADS,
                torch.full_like(batch.label_positions, 0.5, dtype=torch.float32),
                renormalize=True,
            ),
            batch=batch,
        ),
        "with a weakened position term": il.edited(gpt2, il.RemovePosition(HEADS)),
        "with blocked attention": il.edited(gpt2, il.Block(HEADS, blocked)),
    }
    assert active_edits(view) == ()
    for what, block in blocks.items():
        with block:
            assert active_edits(view) == (f"L1H2, L2H0 {what}",)
    with (
        il.edited(gpt2, il.AddVector(torch.zeros(view.d_model), 1), batch=batch),
        il.ablate_heads(gpt2, [(0, 1)]),
    ):
        assert active_edits(view) == ("a vector added after layer 1", "L0H1 zeroed")
    with il.ablate_heads(gpt2, view.heads()):
        assert active_edits(view)[0].endswith(f" and {len(view.heads()) - 8} other heads zeroed")
    assert active_edits(view) == ()


@pytest.mark.slow
def test_circuits_parts_and_towers_name_the_edits(gpt2, words, tmp_path):
    prompts = il.load_task("sentiment-number", path=words, n=12, layout="random", demonstrations=2)
    batch = il.tokenize(gpt2, prompts)
    with il.ablate_heads(gpt2, HEADS):
        circuit = il.locate_circuit(gpt2, batch[:4], batch[4:], ["L2H1"], n_edges=2, n_random=3)
        parts = il.mean_score_parts(gpt2, batch, ["L2H1"])
        towers = il.two_towers(gpt2, prompts, ["L2H1"], n_random=3)
        edges = il.head_to_head_effects(gpt2, batch, ["L2H1"], part="q")
        acts = il.capture(gpt2, batch, writers=True)
    acts.save(tmp_path / "acts.safetensors")
    assert il.Activations.load(tmp_path / "acts.safetensors", gpt2).edits == (ZEROED,)
    of_head = (
        il.attention_score_parts(acts, "L2H1"),
        il.value_parts(acts, "L2H1", batch.answer_tokens),
    )
    for measured in (circuit, parts, towers, edges, acts[:2]):
        assert measured.edits == (ZEROED,)
    for measured in (circuit, parts, towers, edges, acts, *of_head):
        assert ZEROED in repr(measured)
    note = f"All numbers are those of the edited model: {ZEROED}."
    for measured in (circuit, parts, towers):
        assert measured.to_dict()["edits"] == [ZEROED]
    assert il.top_heads(acts, batch.answer_tokens, k=2).edits == (ZEROED,)
    for page_source in (circuit, parts, towers):
        assert note in " ".join(shown_text(page_source).split())
    assert note in towers.to_html()
    assert note in circuit.to_html()


@pytest.mark.slow
def test_saliency_names_hooks(gpt2, words):
    """It needs each head's own z, so heads are not zeroed here."""
    batch = il.tokenize(gpt2, il.load_task("sentiment-number", path=words, n=4, demonstrations=2))
    with gpt2.hooks(fwd_hooks=[(HOOK, lambda x, hook: 1.5 * x)]):
        flow = il.saliency_flow(gpt2, batch)
    assert flow.edits == (f"hooks at {HOOK}",)
    assert HOOK in repr(flow)
    assert il.saliency_flow(gpt2, batch).edits == il.capture(gpt2, batch).edits == ()


def test_hooks_of_modules_are_named(gpt2):
    view = ModelView.of(gpt2)
    blocks = gpt2.original_model.transformer.h
    hooks = [
        blocks[1].register_forward_hook(lambda module, args, output: None),
        gpt2.blocks[2].mlp.register_forward_pre_hook(partial(lambda scale, module, args: None, 2)),
    ]
    try:
        assert active_edits(view) == ("forward hooks on transformer.h.1, transformer.h.2.mlp",)
        hooks.pop().remove()
        assert active_edits(view) == ("a forward hook on transformer.h.1",)
        with gpt2.hooks(fwd_hooks=[(HOOK, lambda x, hook: x)]), il.ablate_heads(gpt2, HEADS):
            assert active_edits(view) == (
                ZEROED,
                f"hooks at {HOOK}",
                "a forward hook on transformer.h.1",
            )
        batch = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT, answer="foo")])
        assert il.capture(gpt2, batch).edits == ("a forward hook on transformer.h.1",)
    finally:
        for hook in hooks:
            hook.remove()
    with il.edited(gpt2, il.AddVector(torch.zeros(view.d_model), 1), batch=batch):
        assert active_edits(view) == ("a vector added after layer 1",)
    assert active_edits(view) == ()


def test_rows_run_separately_under_a_hook_of_a_module(gpt2):
    """A hook may depend on where a row ends, so positions of one prompt do not share a pass."""
    batch, rows = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT, answer="foo")]), []
    blocks = gpt2.original_model.transformer.h
    with blocks[1].register_forward_hook(lambda module, args, output: rows.append(len(args[0]))):
        il.capture(gpt2, batch.at([2, 4, -1]))
    assert rows == [3]


def test_a_hook_of_a_module_changes_the_numbers_that_name_it(gpt2):
    batch = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT, answer="foo")])
    plain = il.head_effects(gpt2, batch, positions="all")
    hook = gpt2.original_model.transformer.h[1].register_forward_hook(halve)
    try:
        edited = il.head_effects(gpt2, batch, positions="all")
    finally:
        hook.remove()
    assert plain.edits == ()
    assert edited.edits == ("a forward hook on transformer.h.1",)
    assert (edited.log_prob - plain.log_prob).abs().max() > 1e-4


@pytest.mark.parametrize("positions", ["last", "all"])
def test_a_hook_of_a_module_treats_each_prompt_as_in_a_block(load_tiny, positions):
    """A hook that shifts the second prompt only: rows and restarts, in which prompts move, would
    shift others.
    """
    model = load_tiny("gpt2")
    batch = ragged(model)
    sets = [
        [],
        [il.Ablate(["L2H0"], positions=positions)],
        [il.Ablate(["L1H1", "L2H2"], positions=positions)],
    ]
    plain = il.score(model, batch, sets)

    def shift(module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        first[1] += torch.linspace(-1, 1, first.shape[-1])

    with model.blocks[1].mlp.register_forward_hook(shift):
        scores = il.score(model, batch, sets)
        for number, edits in enumerate(sets):
            with il.edited(model, *edits):
                assert_close(scores[:, number], il.score(model, batch))
    changed = (scores - plain).abs().amax((1, 2))
    assert changed[1] > 1e-3
    assert_close(scores[[0, 2]], plain[[0, 2]])


def test_edits_of_other_threads_hold_while_edits_are_disabled_here(gpt2, gpt2_batch):
    sets = [[], [il.Ablate(HEADS, positions="all")]]
    alone, scores = il.score(gpt2, gpt2_batch, sets), []
    thread = Thread(target=lambda: scores.append(il.score(gpt2, gpt2_batch, sets)))
    with edits_disabled(ModelView.of(gpt2)):
        thread.start()
        thread.join()
    assert torch.equal(scores[0], alone)


def halve(module, args, output):
    return (0.5 * output[0], *output[1:]) if isinstance(output, tuple) else 0.5 * output
