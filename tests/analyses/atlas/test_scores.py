"""Every score of an atlas against slow references in plain Hugging Face passes, in float64.

Learned positions, LayerNorm and biases (gpt2); rotation, RMSNorm and grouped queries (llama_gqa).
Scores that `il.locate` has are checked there and in the sweep; here they must be the same.
"""

from types import SimpleNamespace

import families
import function_vector_recipe as recipe
import numpy as np
import pytest
import reference_hf
import reference_passes
import sweep
import torch
from shared import hf_twin
from tolerance import Float64

import icl_lens as il
from icl_lens.analyses.atlas.task_scores import with_shuffled_labels
from icl_lens.reading.repeated_tokens import random_tokens, repeated_sequences

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
TEXTS = ["love like love hate one two", "the cat a dog the red cat blue dog"]
N_SEQUENCES = 3


@pytest.fixture(scope="module", params=["gpt2", "llama_gqa"])
def case(load_tiny, family_folder, request):
    """A tiny model with its atlas, and the plain passes that the references read."""
    with Float64():
        model, hf = (
            load_tiny(request.param, dtype=torch.float64),
            hf_twin(family_folder, request.param),
        )
        batch = sweep.tokenized(model, sweep.ONE_WORD)
        atlas = il.head_atlas(model, batch, text=TEXTS, n_sequences=N_SEQUENCES, k=4)
        ids = sweep.trimmed(batch)
        return SimpleNamespace(
            model=model,
            hf=hf,
            batch=batch,
            atlas=atlas,
            ids=ids,
            passes=[reference_passes.run(hf, row) for row in ids],
            references=[reference_hf.Reference(hf, row) for row in ids],
        )


def assert_same(case, name, expected):
    """Assert that a score is the mean over samples of what a reference has."""
    expected = torch.as_tensor(np.asarray(expected), dtype=torch.float64)
    if expected.ndim == 3:
        expected = expected.mean(0)
    ours = case.atlas[name].mean
    assert expected.abs().max() > 100 * TOLERANCE  # a reference of zeros would prove nothing
    assert (ours - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max())), name


def heads():
    return [(layer, head) for layer in range(families.N_LAYERS) for head in range(families.N_HEADS)]


def empty(n):
    return np.zeros((n, families.N_LAYERS, families.N_HEADS))


def test_attention_to_random_tokens(case):
    tokens = repeated_sequences(case.model, n=N_SEQUENCES, n_tokens=24, seed=0).tokens
    n = (tokens.shape[1] - 1) // 2 if tokens.shape[1] % 2 else tokens.shape[1] // 2
    names = ["previous_token", "duplicate_token", "induction", "first_token", "entropy", "distance"]
    expected = {name: empty(N_SEQUENCES) for name in names}
    for row, sequence in enumerate(tokens):
        pattern = reference_passes.run(case.hf, sequence).pattern
        for layer, head in heads():
            for query in range(len(sequence) - n, len(sequence)):
                attention = pattern[layer][head, query, : query + 1].numpy()
                expected["previous_token"][row, layer, head] += attention[query - 1] / n
                expected["duplicate_token"][row, layer, head] += attention[query - n] / n
                expected["induction"][row, layer, head] += attention[query - n + 1] / n
                expected["first_token"][row, layer, head] += attention[0] / n
                expected["entropy"][row, layer, head] -= (attention * np.log(attention)).sum() / n
                n_back = query - np.arange(query + 1)
                expected["distance"][row, layer, head] += (attention * n_back).sum() / n
    for name in names:
        assert_same(case, name, expected[name])


def test_scores_of_texts(case):
    previous, suppression = empty(len(TEXTS)), empty(len(TEXTS))
    for row, text in enumerate(TEXTS):
        ids = il.tokenize(case.model, il.Text(text)).tokens[0]
        pattern = reference_passes.run(case.hf, ids).pattern
        counts = empty(1)[0]
        for position in range(1, len(ids)):
            theirs = reference_hf.Reference(case.hf, ids[: position + 1])
            current, earlier = int(ids[position]), ids[:position].tolist()
            for layer, head in heads():
                previous[row, layer, head] += float(
                    pattern[layer][head, position, position - 1]
                ) / (len(ids) - 1)
                candidates = [token for token in earlier if token != current]
                if not candidates:
                    continue
                lens = theirs.readout.logits(theirs.x[layer], "own", bias=True)
                predicted = max(candidates, key=lambda token, lens=lens: float(lens[token]))
                added = 0.0
                for key, token in enumerate(earlier):
                    if token == predicted:
                        part = theirs.subhead_outputs[layer, head, key]
                        zero = torch.zeros_like(part)
                        logits = [
                            theirs.readout.logits(x, "frozen", bias=False)[token]
                            for x in (part, zero)
                        ]
                        added += float(logits[0] - logits[1])
                suppression[row, layer, head] -= added
                counts[layer, head] += 1
        suppression[row] /= counts
    assert_same(case, "previous_token_in_text", previous)
    assert_same(case, "copy_suppression", suppression)


def circuits(case):
    """Return each head's output circuit over the whole vocabulary [layer head token token]."""
    embeddings = case.hf.get_input_embeddings().weight.detach()
    readout = case.references[0].readout
    expected = torch.zeros(
        families.N_LAYERS, families.N_HEADS, len(embeddings), len(embeddings)
    ).double()
    for layer, head in heads():
        block = reference_hf._layers(case.hf)[layer]
        norm = reference_hf._Norm(block.ln_1 if hasattr(block, "ln_1") else block.input_layernorm)
        x = norm.center(embeddings) * norm.scale(embeddings) * norm.gain
        d_head = families.D_MODEL // families.N_HEADS
        if hasattr(block, "attn"):
            values = block.attn.c_attn.weight.detach()[:, 2 * families.D_MODEL :]
            group = head
        else:
            values = block.self_attn.v_proj.weight.detach().T
            group = head // 2
        z = x @ values[:, group * d_head : (group + 1) * d_head]
        written = z @ reference_hf.output_weights(case.hf, layer)[head]
        expected[layer, head] = (
            readout.norm.center(written) * readout.norm.gain @ readout.W_U * readout.multiplier
        )
    return expected


def test_scores_of_weights(case):
    logits = circuits(case)
    eigenvalues = np.linalg.eigvals(logits.numpy())
    assert_same(case, "copying", eigenvalues.real.sum(-1) / np.abs(eigenvalues).sum(-1))
    n = case.atlas["promotes_attended"].n
    (tokens,) = random_tokens(case.model, 1, n, 0)
    among = logits[:, :, tokens][..., tokens]
    assert_same(case, "promotes_attended", (among.argmax(-1) == torch.arange(n)).double().mean(-1))


def test_direct_and_total_effects(case):
    contrast, increase, effect = (empty(len(case.ids)) for _ in range(3))
    for row, (ids, theirs) in enumerate(zip(case.ids, case.references, strict=True)):
        target = int(case.batch.answer_tokens[row])
        rivals = [int(token) for token in case.batch.other_label_tokens[row] if token >= 0]
        contrast[row] = theirs.increase("heads", target, rivals).numpy()
        increase[row] = theirs.increase("heads", target).numpy()
        before = theirs.log_probs[target] - theirs.log_probs[rivals].logsumexp(0)
        for layer, head in heads():
            edit = reference_passes.writing("z", layer, (-1, [head]), 0.0)
            after = reference_passes.run(case.hf, ids, edit).log_probs
            effect[row, layer, head] = before - (after[target] - after[rivals].logsumexp(0))
    for name, expected in (("contrast", contrast), ("increase", increase), ("effect", effect)):
        assert_same(case, name, expected)


def test_exchanges_are_those_of_locate(case):
    with Float64():
        located = il.locate(case.model, case.batch, by="exchange", other_scores=False)
    for name in ("exchange", "keys", "values"):
        assert_same(case, name, located.scores[name].mean)


def test_function_vector_effects(case):
    shuffled = [with_shuffled_labels(prompt, row) for row, prompt in enumerate(case.batch.prompts)]
    assert all(new != old for new, old in zip(shuffled, case.batch.prompts, strict=True))
    ids = [row.tolist() for row in sweep.trimmed(sweep.tokenized(case.model, shuffled))]
    means = recipe.mean_outputs(case.hf, [row.tolist() for row in case.ids])
    expected = recipe.indirect_effects(case.hf, ids, case.batch.answer_tokens.tolist(), means)
    assert_same(case, "indirect_effect", expected)


def test_attention_to_labels_and_of_labels(case):
    foo, bar = (families.WORDS.index(word) for word in ("foo", "bar"))
    true, false, reads = (empty(len(case.ids)) for _ in range(3))
    for row, ids in enumerate(case.ids):
        labels = [i for i, token in enumerate(ids.tolist()) if token in (foo, bar)]
        answer = int(case.batch.answer_tokens[row])
        for layer, head in heads():
            pattern = case.passes[row].pattern[layer][head]
            for label in labels:
                counted = true if int(ids[label]) == answer else false
                counted[row, layer, head] += float(pattern[-1, label])
                reads[row, layer, head] += float(pattern[label, label - 2]) / len(
                    labels
                )  # "text : label"
    assert_same(case, "true_label_attention", true)
    assert_same(case, "false_label_attention", false)
    assert_same(case, "label_difference", true - false)
    assert_same(case, "label_reads_text", reads)


def test_task_subspace(case):
    recognition, learning = empty(len(case.ids)), empty(len(case.ids))
    for row, theirs in enumerate(case.references):
        answer, other = (
            int(case.batch.answer_tokens[row]),
            int(case.batch.other_label_tokens[row][0]),
        )
        W = theirs.readout.W_U[:, [answer, other]]
        projection = W @ torch.linalg.inv(W.T @ W) @ W.T
        for layer, head in heads():
            output = theirs.head_outputs[layer, head]
            recognition[row, layer, head] = float((projection @ output).square().sum())
            learning[row, layer, head] = (
                float(output @ (W[:, 0] - W[:, 1])) / recognition[row, layer, head]
            )
    assert_same(case, "task_recognition", recognition)
    assert_same(case, "task_learning", learning)


def test_similarity_by_class(case):
    with Float64():
        similarity = il.label_similarity(case.model, case.batch, heads())[:, :, -1]
    expected = empty(len(case.ids))
    for row, prompt in enumerate(case.batch.prompts):
        labels = [demonstration.label for demonstration in prompt.demonstrations]
        for number, (layer, head) in enumerate(heads()):
            pairs = []
            for first, label in enumerate(labels):
                for second, other in enumerate(labels):
                    if label == prompt.answer != other:
                        pairs.append(
                            float(similarity[row, number, first] > similarity[row, number, second])
                        )
            expected[row, layer, head] = np.mean(pairs)
    assert_same(case, "similarity", expected)
