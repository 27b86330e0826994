"""Function vectors of a real model equal their published recipe, in plain Hugging Face passes;
others: the sweep.
"""

import families
import function_vector_recipe as recipe
import pytest
import torch
import vectors
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.models.gguf_header import cached_parser
from icl_lens.models.installed import SMOLLM2


def rows(batch: il.PromptBatch) -> list[list[int]]:
    return [tokens[: int(last) + 1].tolist() for tokens, last in zip(batch.tokens, batch.last, strict=True)]


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2.status != "installed", reason=f"{SMOLLM2.name} is not installed: {SMOLLM2.command}")
def test_on_smollm2_the_recipe_gives_our_heads_and_gains():
    """Ten demonstrations, in float32: effects of all heads, the ten largest, and what their vector
    gains zero-shot.
    """
    model = il.load_model("smollm2-135m", device="cpu")
    with cached_parser("the file"):
        hf = AutoModelForCausalLM.from_pretrained(
            SMOLLM2.path.parent, gguf_file=SMOLLM2.path.name, dtype=torch.float32, **families.EAGER
        ).eval()
    tasks = [vectors.draw("country-capital")]  # the page has three
    means, theirs, ours = [], [], []
    for task in tasks:
        clean, corrupted = (vectors.tokenized(model, prompts) for prompts in (task.clean, task.shuffled))
        means.append(recipe.mean_outputs(hf, rows(clean)))
        answers = corrupted.answer_tokens.tolist()
        theirs.append(recipe.indirect_effects(hf, rows(corrupted), answers, means[-1]))
        ours.append(vectors.indirect_effects(model, task).double())
        print(f"effects differ by up to {(ours[-1] - theirs[-1]).abs().max():.1e}")
        torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-4, rtol=0)
        assert theirs[-1].mean(0).max() > 0.02
    heads = recipe.top_heads(torch.cat(theirs), vectors.N_HEADS)
    assert [tuple(head) for head in vectors.best_heads(torch.cat(ours).numpy(), vectors.N_HEADS)] == heads
    for task, outputs in zip(tasks, means, strict=True):
        asked, test = (vectors.tokenized(model, prompts) for prompts in (task.asked, task.test))
        vector = recipe.function_vector(outputs, heads)
        mine = il.function_vector(model, vectors.tokenized(model, task.clean), [il.Head(*head) for head in heads])
        torch.testing.assert_close(mine.double(), vector.double(), atol=1e-4, rtol=0)
        before = recipe.log_probs_with(hf, rows(test))
        layer = il.vector_gains(model, mine, asked).best
        after = recipe.log_probs_with(hf, rows(test), vector, layer)
        gains = il.vector_gains(model, mine, test, layers=[layer])
        gain = (after - before)[torch.arange(len(test)), test.answer_tokens]
        print(f"after layer {layer}: {gain.mean():+.3f}, and {(gains.gain[:, 0] - gain).abs().max():.1e} apart")
        torch.testing.assert_close(gains.gain[:, 0], gain, atol=1e-3, rtol=0)
        assert gains.top1[:, 0].tolist() == (after.argmax(1) == test.answer_tokens).tolist()
