"""Every score of an atlas of SmolLM2, a real model, against its definition in plain Hugging Face code.

Scores that only read are compared for all 270 heads, those that edit a head for one head of
every second layer. Words and labels are one token each, so that positions in a prompt can be counted.
"""

from types import SimpleNamespace

import numpy as np
import plain_llama
import pytest
import torch

import icl_lens as il
from icl_lens.analyses.atlas import head_atlas
from icl_lens.analyses.atlas.definitions import DEFINITIONS
from icl_lens.analyses.atlas.task_scores import with_shuffled_labels
from icl_lens.reading.repeated_tokens import random_tokens, repeated_sequences

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TOLERANCE = 1e-5
"""For attention, and for numbers of tokens."""
TOLERANCE_OF_LOGITS = 1e-4
"""Of log-odds and log-probabilities, differences of float32 logits of size 20."""
TOLERANCE_OF_PROBABILITIES = 1e-5
"""Of probabilities, of which single heads recover some thousandths."""
PROMPTS = [
    il.Prompt([("dog", "A"), ("France", "B"), ("Spain", "B"), ("wolf", "A")], "cat", "A"),
    il.Prompt([("Japan", "B"), ("lion", "A"), ("Egypt", "B"), ("cat", "A")], "China", "B"),
    il.Prompt([("bear", "A"), ("Italy", "B"), ("dog", "A"), ("India", "B")], "horse", "A"),
]
N_DEMONSTRATIONS, N_TOKENS_OF_DEMONSTRATION = 4, 4  # a word, a colon, a label, a new line
TEXTS = ["Anna gave the red book to Peter and the red pen to Anna", "The cat saw the dog and the"]
N_SEQUENCES, N_TOKENS = 2, 24
READING_SCORES = {
    *("previous_token", "duplicate_token", "induction", "first_token", "entropy", "distance"),
    *("previous_token_in_text", "copy_suppression", "promotes_attended", "contrast", "increase"),
    *("true_label_attention", "false_label_attention", "label_difference", "label_reads_text"),
    *("task_recognition", "task_learning", "similarity"),
}
EDITING_SCORES = {"effect", "exchange", "keys", "values", "indirect_effect"}


@pytest.fixture(scope="module")
def case(smollm2, smollm2_hf):
    """The atlas, and plain passes of the same prompts."""
    batch = il.tokenize(smollm2, PROMPTS, template=il.Template(separator="\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_atlas, "N_TURNS", 1)  # of kinds, which are not tested here
        atlas = il.head_atlas(smollm2, batch, text=TEXTS, n_sequences=N_SEQUENCES)
    assert not atlas.left_out
    hf = smollm2_hf.model
    assert batch.tokens.shape[1] == N_DEMONSTRATIONS * N_TOKENS_OF_DEMONSTRATION + 2
    assert bool(batch.attention_mask.all())
    return SimpleNamespace(
        model=smollm2,
        hf=hf,
        batch=batch,
        atlas=atlas,
        passes=[plain_llama.run(hf, ids) for ids in batch.tokens],
        answers=batch.answer_tokens.tolist(),
        rivals=batch.other_label_tokens[:, 0].tolist(),
        heads=[(layer, layer % 9) for layer in range(0, 30, 2)],
    )


def assert_same(case, name, by_sample, tolerance=TOLERANCE):
    """Assert that a score is the mean of what a reference has of each sample [sample layer head]."""
    expected = torch.stack([torch.as_tensor(sample) for sample in by_sample]).double().mean(0)
    scale = max(1.0, float(expected.abs().max()))
    assert expected.std() > 10 * tolerance * scale  # a reference of zeros would prove nothing
    assert (case.atlas[name].mean - expected).abs().max() <= tolerance * scale, name


def by_layer(values):
    return torch.stack(list(values))


def norm(hf, x):
    """Return x over its root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + hf.config.rms_norm_eps).sqrt()


def unembedding(hf):
    """Return W_U after the final norm's gain [d_model vocab]."""
    return hf.model.norm.weight.detach()[:, None] * hf.lm_head.weight.detach().T


def head_outputs(case, seen):
    """Return what each head writes at the last position [layer head d_model]."""
    outputs = []
    for layer, z in enumerate(seen.z):
        outputs.append(
            torch.einsum("hd,hdm->hm", z[:, -1], plain_llama.output_weights(case.hf, layer))
        )
    return torch.stack(outputs)


def log_odds(case, row, log_probs):
    return log_probs[..., case.answers[row]] - log_probs[..., case.rivals[row]]


def test_all_scores_have_a_reference_here():
    assert {*READING_SCORES, *EDITING_SCORES, "copying"} == set(DEFINITIONS)


def test_attention_to_random_tokens(case):
    tokens = repeated_sequences(case.model, n=N_SEQUENCES, n_tokens=N_TOKENS, seed=0).tokens
    assert tokens.shape == (N_SEQUENCES, 2 * N_TOKENS)
    assert torch.equal(tokens[:, :N_TOKENS], tokens[:, N_TOKENS:])
    queries = torch.arange(N_TOKENS, 2 * N_TOKENS)
    n_back = (queries[:, None] - torch.arange(2 * N_TOKENS)).double()
    samples = {name: [] for name in list(DEFINITIONS)[:6]}
    for sequence in tokens:
        pattern = by_layer(plain_llama.run(case.hf, sequence).pattern).double()
        attention = pattern[:, :, N_TOKENS:]
        for name, key in (
            ("previous_token", queries - 1),
            ("duplicate_token", queries - N_TOKENS),
            ("induction", queries - N_TOKENS + 1),
            ("first_token", torch.zeros_like(queries)),
        ):
            samples[name].append(attention[:, :, torch.arange(N_TOKENS), key].mean(-1))
        surprise = -attention.clamp(min=1e-300).log()
        samples["entropy"].append((attention * surprise).sum(-1).mean(-1))
        samples["distance"].append((attention * n_back).sum(-1).mean(-1))
    for name, by_sample in samples.items():
        assert_same(case, name, by_sample)


def test_scores_of_texts(case):
    previous, suppression, columns = [], [], unembedding(case.hf)
    for text in TEXTS:
        ids = il.tokenize(case.model, il.Text(text)).tokens[0]
        seen = plain_llama.run(case.hf, ids)
        pattern = by_layer(seen.pattern)
        positions = torch.arange(1, len(ids))
        previous.append(pattern[:, :, positions, positions - 1].mean(-1))
        scale = norm(case.hf, seen.final) / seen.final
        of_layers = torch.zeros(30, 9, dtype=torch.float64)
        for layer, x in enumerate(seen.x):
            W_O, n_counted = plain_llama.output_weights(case.hf, layer), 0
            for position in range(1, len(ids)):
                earlier = [
                    token for token in ids[:position].tolist() if token != int(ids[position])
                ]
                if not earlier:
                    continue
                logits = norm(case.hf, x[position]) @ columns
                predicted = max(earlier, key=lambda token, logits=logits: float(logits[token]))
                occurrences = (ids[:position] == predicted).nonzero()[:, 0]
                attention = pattern[layer, :, position, occurrences]
                moved = torch.einsum(
                    "hk,hkd,hdm->hm", attention, seen.v[layer][:, occurrences], W_O
                )
                added = moved * scale[position] @ columns[:, predicted]
                of_layers[layer] -= added.double()
                n_counted += 1
            of_layers[layer] /= n_counted
        suppression.append(of_layers)
    assert_same(case, "previous_token_in_text", previous)
    assert_same(case, "copy_suppression", suppression, TOLERANCE_OF_LOGITS)


def value_inputs(case, layer, tokens):
    """Return embeddings as a layer's values read them [token d_model]."""
    block = case.hf.model.layers[layer]
    embeddings = case.hf.get_input_embeddings().weight.detach()[tokens]
    return norm(case.hf, embeddings) * block.input_layernorm.weight.detach()


def test_copying_by_the_eigenvalues_of_the_map_from_the_stream_to_itself(case):
    """The map W_V W_O W_U W_E of d_model dimensions has the eigenvalues of the vocabulary's, other
    than zero.
    """
    tokens = torch.arange(case.hf.config.vocab_size)
    for layer, head in case.heads[::5]:
        read = value_inputs(case, layer, tokens)
        through_vocabulary = (unembedding(case.hf) @ read).double()  # [d_model d_model]
        values = case.hf.model.layers[layer].self_attn.v_proj.weight.detach()
        W_V = values.unflatten(0, (3, -1))[head // 3].T.double()
        W_O = plain_llama.output_weights(case.hf, layer)[head].double()
        eigenvalues = np.linalg.eigvals((W_V @ W_O @ through_vocabulary).numpy())
        expected = eigenvalues.real.sum() / np.abs(eigenvalues).sum()
        assert abs(float(case.atlas["copying"].mean[layer, head]) - expected) < TOLERANCE


def test_tokens_that_heads_promote(case):
    (ids,) = random_tokens(case.model, 1, 200, 0)
    tokens, columns = torch.tensor(ids), unembedding(case.hf)
    is_promoted = []
    for layer in range(30):
        values = case.hf.model.layers[layer].self_attn.v_proj(value_inputs(case, layer, tokens))
        by_head = values.detach().unflatten(-1, (3, -1)).repeat_interleave(3, dim=1)
        moved = torch.einsum("nhd,hdm->hnm", by_head, plain_llama.output_weights(case.hf, layer))
        promoted = (moved @ columns[:, tokens]).argmax(-1)
        is_promoted.append((promoted == torch.arange(200)).double().mean(-1))
    assert_same(case, "promotes_attended", [torch.stack(is_promoted)])


def test_direct_effects(case):
    columns, contrast, increase = unembedding(case.hf), [], []
    for row, seen in enumerate(case.passes):
        final = seen.final[-1]
        scale = float(norm(case.hf, final)[0] / final[0])
        before = (by_layer(x[-1] for x in seen.x) * scale @ columns).log_softmax(-1)[:, None]
        streams = by_layer(x[-1] for x in seen.x)[:, None] + head_outputs(case, seen)
        after = (streams * scale @ columns).log_softmax(-1)
        answer = case.answers[row]
        increase.append(after[..., answer] - before[..., answer])
        contrast.append(log_odds(case, row, after) - log_odds(case, row, before))
    assert_same(case, "contrast", contrast, TOLERANCE_OF_LOGITS)
    assert_same(case, "increase", increase, TOLERANCE_OF_LOGITS)


def assert_same_effects(case, name, by_prompt, tolerance=TOLERANCE_OF_LOGITS):
    """Assert that a score of edited heads is the mean of what a reference has of each prompt."""
    expected = torch.stack(by_prompt).double().mean(0)
    ours = torch.stack([case.atlas[name].mean[head] for head in case.heads])
    assert expected.abs().max() > 100 * tolerance, name  # so that a hundredth of it would show
    assert (ours - expected).abs().max() <= tolerance, name


def test_heads_zeroed_alone(case):
    effects = []
    for row, (ids, seen) in enumerate(zip(case.batch.tokens, case.passes, strict=True)):
        zeros = [torch.zeros(64)] * len(case.heads)
        after = plain_llama.written(case.hf, ids, case.heads, zeros)
        effects.append(log_odds(case, row, seen.logits[-1]) - log_odds(case, row, after))
    assert_same_effects(case, "effect", effects)


def test_exchanges_of_queries_keys_and_values(case):
    """The last position of a head attends with another query, or to other keys or values at the
    labels.
    """
    donors = il.donor_prompts(PROMPTS)
    labels = [N_TOKENS_OF_DEMONSTRATION * i + 2 for i in range(N_DEMONSTRATIONS)]
    lost = {name: [] for name in ("exchange", "keys", "values")}
    for row, (ids, seen) in enumerate(zip(case.batch.tokens, case.passes, strict=True)):
        donor_passes = {}
        for name in ("query", "texts", "labels"):
            donor = il.tokenize(case.model, donors[name][row], template=il.Template(separator="\n"))
            donor_passes[name] = plain_llama.run(case.hf, donor.tokens[0])
        vectors = {name: [] for name in lost}
        for layer, head in case.heads:
            for name, vector_of_head in vectors.items():
                q, k, v = (x[layer][head][None].clone() for x in (seen.q, seen.k, seen.v))
                if name == "exchange":
                    q = donor_passes["query"].q[layer][head][None]
                elif name == "keys":
                    k[:, labels] = donor_passes["texts"].k[layer][head][labels]
                else:
                    v[:, labels] = donor_passes["labels"].v[layer][head][labels]
                attention = plain_llama.attention(case.hf, q, k)
                vector_of_head.append((attention @ v)[0, -1])
        for name, vector_of_head in vectors.items():
            after = plain_llama.written(case.hf, ids, case.heads, vector_of_head)
            before = log_odds(case, row, seen.logits[-1])
            lost[name].append(before - log_odds(case, row, after))
    for name, by_prompt in lost.items():
        assert_same_effects(case, name, by_prompt)


def test_function_vector_effects(case):
    """`compute_indirect_effect` of Todd et al.: p(answer) on prompts with shuffled labels, with the
    head's mean output over the intact prompts in place of its own, minus without.
    """
    effects, means = [], []
    for layer, head in case.heads:
        means.append(torch.stack([seen.z[layer][head, -1] for seen in case.passes]).mean(0))
    for row, prompt in enumerate(PROMPTS):
        shuffled = with_shuffled_labels(case.batch.prompts[row], row)
        assert shuffled.demonstrations != prompt.demonstrations
        batch = il.tokenize(case.model, shuffled, template=il.Template(separator="\n"))
        ids, answer = batch.tokens[0], case.answers[row]
        after = plain_llama.written(case.hf, ids, case.heads, means)
        before = plain_llama.run(case.hf, ids).logits[-1].log_softmax(-1)
        effects.append(after[:, answer].exp() - before[answer].exp())
    assert_same_effects(case, "indirect_effect", effects, TOLERANCE_OF_PROBABILITIES)


def test_attention_to_labels_and_of_labels(case):
    samples = {name: [] for name in ("true", "false", "reads")}
    for prompt, seen in zip(PROMPTS, case.passes, strict=True):
        pattern = by_layer(seen.pattern)
        true, false, reads = (torch.zeros(30, 9) for _ in range(3))
        for i, demonstration in enumerate(prompt.demonstrations):
            text = N_TOKENS_OF_DEMONSTRATION * i
            label = text + 2
            counted = true if demonstration.label == prompt.answer else false
            counted += pattern[:, :, -1, label]
            reads += pattern[:, :, label, text] / N_DEMONSTRATIONS
        for name, sums in (("true", true), ("false", false), ("reads", reads)):
            samples[name].append(sums)
    differences = [a - b for a, b in zip(samples["true"], samples["false"], strict=True)]
    assert_same(case, "true_label_attention", samples["true"])
    assert_same(case, "false_label_attention", samples["false"])
    assert_same(case, "label_difference", differences)
    assert_same(case, "label_reads_text", samples["reads"])


def test_task_subspace(case):
    """The least-squares projection of a head's output onto the unembeddings of the labels."""
    recognition, learning = [], []
    for row, seen in enumerate(case.passes):
        labels = [case.answers[row], case.rivals[row]]
        W = case.hf.lm_head.weight.detach()[labels].double().T
        outputs = head_outputs(case, seen).double()
        coefficients = torch.linalg.lstsq(W, outputs.flatten(0, 1).T).solution
        lengths = (W @ coefficients).square().sum(0).unflatten(0, (30, 9))
        recognition.append(lengths)
        learning.append(outputs @ (W[:, 0] - W[:, 1]) / lengths)
    assert_same(case, "task_recognition", recognition)
    assert_same(case, "task_learning", learning, TOLERANCE_OF_LOGITS)


def test_similarity_of_query_and_keys_by_class(case):
    shares = []
    for prompt, seen in zip(PROMPTS, case.passes, strict=True):
        is_larger, n_pairs = torch.zeros(30, 9), 0
        labels = [demonstration.label for demonstration in prompt.demonstrations]
        for i, label in enumerate(labels):
            for j, other in enumerate(labels):
                if label != prompt.answer or other == prompt.answer:
                    continue
                n_pairs += 1
                places = [N_TOKENS_OF_DEMONSTRATION * place + 2 for place in (i, j)]
                for layer, (q, k) in enumerate(zip(seen.q, seen.k, strict=True)):
                    first, second = torch.einsum("hd,hkd->kh", q[:, -1], k[:, places])
                    is_larger[layer] += first > second
        shares.append(is_larger / n_pairs)
    assert_same(case, "similarity", shares)
