"""Function vectors equal their published recipe, re-implemented in plain Hugging Face passes."""

import random
from types import SimpleNamespace

import families
import function_vector_recipe as recipe
import pytest
import torch
from tolerance import assert_close
from transformers import AutoModelForCausalLM

import icl_lens as il
from experiments import vectors
from experiments.framework.locating import best_heads
from icl_lens.models.gguf_header import cached_parser
from icl_lens.models.installed import SMOLLM2

SHOWN = ["love", "like", "hate", "happy", "sad", "eight", "two", "one", "nine", "three"]
ARROWS = il.Template("{text} : {label}", "{text} :", separator=" ")


def drawn(n: int, seed: int, *, shots: int = 5, shuffled: bool = False) -> list[il.Prompt]:
    """Return prompts of two classes with up to `shots` demonstrations; `shuffled` exchanges their labels at random."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(n):
        query, *texts = rng.sample(SHOWN, 1 + rng.randint(min(2, shots), shots))
        labels = ["foo" if text in SHOWN[5:] else "bar" for text in texts]
        if shuffled:
            rng.shuffle(labels)
        shown = [il.Demonstration(*pair) for pair in zip(texts, labels, strict=True)]
        prompts.append(il.Prompt(shown, query, "foo" if query in SHOWN[5:] else "bar", ("bar", "foo")))
    return prompts


def rows(batch: il.PromptBatch) -> list[list[int]]:
    return [tokens[: int(last) + 1].tolist() for tokens, last in zip(batch.tokens, batch.last, strict=True)]


@pytest.fixture
def pair(load_tiny, family_folder, float64, request):
    """The tiny model of a family, and the same weights in Hugging Face's own class, in float64."""
    model = load_tiny(request.param, dtype=torch.float64)
    hf = AutoModelForCausalLM.from_pretrained(family_folder(request.param), dtype=torch.float64, **families.EAGER)
    return SimpleNamespace(model=model, hf=hf.eval())


FAMILIES = ["gpt2", "gptj", "neox", "llama_gqa", "llama_bias", "qwen3", "opt", "bloom"]


@pytest.mark.parametrize(
    "pair",
    [name if name in ("gpt2", "llama_gqa") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
    indirect=True,
)
def test_effects_heads_vector_and_gain_equal_the_recipe(pair):
    clean, corrupted, asked = (
        il.tokenize(pair.model, prompts, prepend_bos=False, template=ARROWS)
        for prompts in (drawn(7, 0), drawn(5, 1, shuffled=True), drawn(4, 2, shots=0))
    )
    means = recipe.mean_outputs(pair.hf, rows(clean))
    effects = recipe.indirect_effects(pair.hf, rows(corrupted), corrupted.answer_tokens.tolist(), means)
    ours = il.indirect_effects(pair.model, corrupted, [clean[:3], clean[3:]])
    assert ours.dtype == torch.float64
    assert_close(ours, effects)
    assert effects.abs().amax((0, 1, 2)) > 1e-3
    heads = recipe.top_heads(effects, 4)
    assert [divmod(at, ours.shape[2]) for at in ours.mean(0).flatten().topk(4).indices.tolist()] == heads
    vector = recipe.function_vector(means, heads)
    mine = il.function_vector(pair.model, clean, [il.Head(*head) for head in heads])
    assert_close(mine, vector, scale=float(means.abs().max()))
    before = recipe.log_probs_with(pair.hf, rows(asked))
    found = il.vector_gains(pair.model, mine, asked)
    every = torch.arange(len(asked))
    assert_close(found.intact, before[every, asked.answer_tokens])
    for layer in range(pair.model.cfg.n_layers):
        after = recipe.log_probs_with(pair.hf, rows(asked), vector, layer)
        assert_close(found.gain[:, layer], (after - before)[every, asked.answer_tokens])
        assert found.top1[:, layer].tolist() == (after.argmax(1) == asked.answer_tokens).tolist()
    assert found.gain.abs().max() > 0.01


@pytest.mark.parametrize("pair", ["gpt2", "llama_bias"], indirect=True)
def test_the_recipe_with_kept_keys_is_the_recipe(pair):
    batch = il.tokenize(pair.model, drawn(3, 1), prepend_bos=False)
    means = recipe.mean_outputs(pair.hf, rows(batch))
    given = pair.hf, rows(batch), batch.answer_tokens.tolist(), means
    assert_close(recipe.indirect_effects(*given, cached=True), recipe.indirect_effects(*given))


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2.status != "installed", reason=f"{SMOLLM2.name} is not installed: {SMOLLM2.command}")
def test_on_smollm2_the_recipe_gives_our_heads_and_gains():
    """Ten demonstrations, in float32: effects of all heads, the ten largest, and what their vector gains zero-shot."""
    model = il.load_model("smollm2-135m", device="cpu")
    with cached_parser("the file"):
        hf = AutoModelForCausalLM.from_pretrained(
            SMOLLM2.path.parent, gguf_file=SMOLLM2.path.name, dtype=torch.float32, **families.EAGER
        ).eval()
    tasks = [vectors.draw("country-capital")]  # the page has three
    means, theirs, ours = [], [], []
    for task in tasks:
        clean, corrupted = (vectors.tokenized(model, some) for some in (task.clean, task.shuffled))
        means.append(recipe.mean_outputs(hf, rows(clean)))
        answers = corrupted.answer_tokens.tolist()
        theirs.append(recipe.indirect_effects(hf, rows(corrupted), answers, means[-1], cached=True))
        ours.append(vectors.indirect_effects(model, task).double())
        print(f"effects differ by up to {(ours[-1] - theirs[-1]).abs().max():.1e}")
        torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-4, rtol=0)
        assert theirs[-1].mean(0).max() > 0.02
    heads = recipe.top_heads(torch.cat(theirs), vectors.N_HEADS)
    assert [tuple(head) for head in best_heads(torch.cat(ours), vectors.N_HEADS)] == heads
    for task, outputs in zip(tasks, means, strict=True):
        asked, test = (vectors.tokenized(model, some) for some in (task.asked, task.test))
        vector = recipe.function_vector(outputs, heads)
        mine = il.function_vector(model, vectors.tokenized(model, task.clean), [il.Head(*head) for head in heads])
        torch.testing.assert_close(mine.double(), vector.double(), atol=1e-4, rtol=0)
        before = recipe.log_probs_with(hf, rows(test))
        layer = il.vector_gains(model, mine, asked).best
        after = recipe.log_probs_with(hf, rows(test), vector, layer)
        found = il.vector_gains(model, mine, test, layers=[layer])
        gain = (after - before)[torch.arange(len(test)), test.answer_tokens]
        print(f"after layer {layer}: {gain.mean():+.3f}, and {(found.gain[:, 0] - gain).abs().max():.1e} apart")
        torch.testing.assert_close(found.gain[:, 0], gain, atol=1e-3, rtol=0)
        assert found.top1[:, 0].tolist() == (after.argmax(1) == test.answer_tokens).tolist()
