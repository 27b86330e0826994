"""Generation inside `with` blocks equals a loop of whole passes, with and without a KV cache, or is
refused.
"""

import public_edits
import pytest
import torch
from cases import slow
from shared import PROMPTS
from test_edits import edits_of

import icl_lens as il

N_NEW = 5
HEADS = [(0, 0), (0, 1), (1, 2), (2, 3)]
GREEDY = {"max_new_tokens": N_NEW, "do_sample": False, "stop_at_eos": False, "verbose": False}


def _vector(model):
    return 20 * torch.cos(torch.arange(model.cfg.d_model, dtype=torch.float32))


EDITS = {
    "all zeroed": lambda model, batch: il.Ablate(HEADS),
    "all set to their mean": lambda model, batch: il.Ablate(HEADS, mode="mean", reference=batch),
    "FFN zeroed": lambda model, batch: il.AblateSite("mlp_out", 1),
    "vector": lambda model, batch: il.AddVector(_vector(model), 0),
    "last zeroed": lambda model, batch: il.Ablate(HEADS, positions="last"),
    "last patched": lambda model, batch: il.Patch(HEADS, batch, activation="z", positions="last"),
    "position removed": lambda model, batch: il.RemovePosition(HEADS),
    "labels hidden": lambda model, batch: il.Reweight(
        HEADS, torch.zeros(batch.label_positions.shape), renormalize=True
    ),
}
"""Name -> an edit of a model, for prompts that are generated from."""
CACHED = {"all zeroed", "all set to their mean", "FFN zeroed", "vector"}
"""Edits that apply alike with and without a KV cache (`Edit.supports_cache`)."""


def _block(model, batch, edit):
    return il.edited(model, edit, batch=batch if edit.needs_batch else None)


def test_every_edit_that_supports_a_cache_is_tried_with_one(load_tiny):
    model = load_tiny("gpt2")
    batch = il.tokenize(model, PROMPTS[0], prepend_bos=False)
    tried = {type(EDITS[name](model, batch)) for name in CACHED}
    for name, edit in public_edits.by_name().items():
        supports_cache = edit.supports_cache is not il.Edit.supports_cache
        assert not supports_cache or edit in tried, f"add an il.{name} to EDITS and CACHED"


def _loop(run, tokens):
    """Return greedy tokens from whole passes."""
    for _ in range(N_NEW):
        tokens = torch.cat([tokens, run(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("name", ["llama_gqa", slow("gpt2")])
def test_generation_in_a_block_is_a_loop_of_whole_passes(load_tiny, name, what):
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS[0], prepend_bos=False)
    edit = EDITS[what](model, batch)

    def run(tokens):
        with _block(model, batch, edit):
            return model(tokens, return_type="logits")

    want = _loop(run, batch.tokens)
    with _block(model, batch, edit):
        assert torch.equal(model.generate(batch.tokens, use_past_kv_cache=False, **GREEDY), want)
        if what in CACHED:
            assert torch.equal(model.generate(batch.tokens, **GREEDY), want)
        else:
            with pytest.raises(il.InputError, match="generate with use_past_kv_cache=False"):
                model.generate(batch.tokens, **GREEDY)
    assert not torch.equal(model.generate(batch.tokens, **GREEDY), want) or what == "last patched"


def test_a_vector_stays_at_the_last_position_of_the_prompt(load_tiny, family_run):
    """As a hook that adds it there in every whole pass of the Hugging Face model."""
    model, hf = load_tiny("llama_gqa"), family_run("llama_gqa").hf
    batch = il.tokenize(model, PROMPTS[0], prepend_bos=False)
    vector, last = _vector(model), int(batch.last)

    def add(module, args, output):
        output[:, last] += vector.double()

    handle = hf.model.layers[0].register_forward_hook(add)
    want = _loop(lambda tokens: hf(tokens, use_cache=False).logits, batch.tokens)
    handle.remove()
    with il.edited(model, il.AddVector(vector, 0), batch=batch):
        for cached in (True, False):
            assert torch.equal(
                model.generate(batch.tokens, use_past_kv_cache=cached, **GREEDY), want
            )


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_left_padded_prompts_are_continued_as_each_alone(load_tiny, name):
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    tokens, mask = batch.left_padded()
    for block in (il.ablate_heads(model, []), il.ablate_heads(model, HEADS)):
        with block:
            generated = model.generate(tokens, attention_mask=mask, **GREEDY)
            for row in range(len(batch)):
                alone = batch[row]
                want = model.generate(alone.tokens, **GREEDY)
                assert torch.equal(generated[row, -want.shape[1] :], want[0])


def test_generation_from_padding_is_refused_where_the_prompts_are_known(load_tiny):
    model = load_tiny("gpt2")
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    weights = torch.ones(batch.label_positions.shape)
    vector, reweighted = (
        il.AddVector(_vector(model), 0),
        il.Reweight(HEADS, weights, renormalize=False),
    )
    for edit, cached in ((vector, True), (vector, False), (reweighted, False)):
        with (
            il.edited(model, edit, batch=batch),
            pytest.raises(
                il.InputError, match="prompts must have the same length for tokens to follow them"
            ),
        ):
            model.generate(batch.tokens, use_past_kv_cache=cached, **GREEDY)


def test_logits_are_computed_after_the_last_token_only(load_tiny, monkeypatch):
    """Those after all tokens of a long prompt take more memory than the rest of the pass."""
    model = load_tiny("llama_gqa")
    batch = il.tokenize(model, SAME, prepend_bos=False)
    want = il.generate(model, batch, max_new_tokens=N_NEW).tokens
    n_positions = []
    count = ("unembed.hook_out", lambda logits, hook: n_positions.append(logits.shape[1]))
    with model.hooks(fwd_hooks=[count]):
        assert il.generate(model, batch, max_new_tokens=N_NEW).tokens == want
    assert set(n_positions) == {1}


SAME = [
    il.Prompt.parse("love : bar like : bar eight : foo one :", answer="foo"),
    il.Prompt.parse("two : foo sad : bar three : foo happy :", answer="bar"),
    il.Prompt.parse("sad : foo nine : bar two : bar three :", answer="bar"),
]


@pytest.mark.slow
def test_generate_is_a_loop_of_whole_passes_under_every_edit(load_tiny):
    """Prompts in one batch, each with its own weights, vectors, sources and edges."""
    model = load_tiny("llama_gqa")
    batch = il.tokenize(model, SAME, prepend_bos=False)
    last, at_all_positions = edits_of(model, batch)
    sets = [
        [],
        *([edit] for edit in last.values()),
        *([edit] for edit in at_all_positions.values()),
    ]
    generated = il.generate(model, batch, sets, max_new_tokens=2)
    differ = 0
    for edits, ours in zip(sets, generated.tokens, strict=True):
        tokens = batch.tokens
        for _ in range(2):
            with il.edited(model, *edits, batch=batch):
                new = model(tokens, return_type="logits")[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], dim=1)
        assert [list(row) for row in ours] == tokens[:, -2:].tolist(), edits
        differ += ours != generated.tokens[0]
    assert differ > len(sets) / 3


def test_each_prompt_draws_its_tokens_as_alone(load_tiny):
    """With the same seed for every prompt, from logits divided by the temperature."""
    model = load_tiny("llama_gqa")
    batch = il.tokenize(model, SAME, prepend_bos=False)
    weights = torch.full(batch.label_positions.shape, 0.25)
    sets = [[], [il.Ablate(HEADS)], [il.Reweight(HEADS, weights, renormalize=True)]]
    generated = il.generate(model, batch, sets, max_new_tokens=N_NEW, temperature=1.5, seed=3)
    for edits, ours in zip(sets, generated.tokens, strict=True):
        for row in range(len(batch)):
            tokens = batch.tokens
            torch.manual_seed(3)
            for _ in range(N_NEW):
                with il.edited(model, *edits, batch=batch):
                    logits = model(tokens, return_type="logits")[row, -1]
                drawn = torch.distributions.Categorical(logits=logits / 1.5).sample()
                new = torch.zeros(len(batch), 1, dtype=tokens.dtype).fill_(drawn)
                tokens = torch.cat([tokens, new], dim=1)
            assert list(ours[row]) == tokens[row, -N_NEW:].tolist(), edits
    assert generated.tokens[1] != generated.tokens[0]


def test_generations_stop_and_are_shown_side_by_side(load_tiny):
    model = load_tiny("gpt2")
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    sets = [[], [il.Ablate(HEADS)], [il.Ablate(HEADS)]]
    generated = il.generate(model, batch, sets, max_new_tokens=N_NEW)
    for row in range(len(batch)):
        (alone,) = il.generate(model, batch[row], max_new_tokens=N_NEW).tokens[0]
        assert generated.tokens[0][row] == alone
    words = generated.texts[0][0].split()
    stopped = il.generate(model, batch, max_new_tokens=N_NEW, stop=words[2])
    assert stopped.texts[0][0].split() == words[: words.index(words[2])]
    names = [f"L0H0, L0H1, L1H2, L2H3 zeroed ({number})" for number in (1, 2)]
    assert generated.to_frame().columns.tolist() == ["prompt", "no edits", *names]
    assert generated.to_frame()["prompt"].tolist() == [prompt.query for prompt in PROMPTS]
