"""SmolLM2-135M-Instruct with 4-bit weights, a real model: its numbers agree with transformers and
the reference.
"""

import warnings
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import function_vector_recipe as recipe
import pytest
import reference_hf
import torch
import vectors
from transformer_lens.head_detector import detect_head

import icl_lens as il
from experiments.benchmark.function_costs import operations, prompts_of_length
from icl_lens.reading.repeated_tokens import repeated_sequences

ATOL = 1e-4
N_PROMPTS, K = 4, 20
PROSE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(smollm2):
    return smollm2


@pytest.fixture(scope="module")
def hf(smollm2_hf):
    return smollm2_hf


@pytest.fixture(scope="module")
def acts(model):
    return il.capture(model, il.tokenize(model, il.load_task("sentiment-number", n=N_PROMPTS)))


def test_logits_are_transformers_own(model, hf):
    tokens = hf.tokenizer(PROSE, add_special_tokens=False).input_ids[:200]
    assert len(tokens) == 200
    assert model.tokenizer(PROSE, add_special_tokens=False).input_ids[:200] == tokens
    with torch.no_grad():
        theirs = hf.model(torch.tensor([tokens])).logits
        mine = model(torch.tensor([tokens]))
    assert (mine - theirs).abs().max() <= ATOL
    assert theirs.std() > 1


@pytest.mark.parametrize("n_tokens", [100, 400])
def test_explain_takes_at_most_twelve_forward_passes(model, n_tokens):
    """In operations of matrix products, of a prompt of about this length."""
    (prompt,) = prompts_of_length(model, 1, n_tokens)
    batch = il.tokenize(model, prompt)
    il.score(model, batch)  # the first batch of a length also runs the Hugging Face model
    forward = operations(lambda: il.score(model, batch))
    assert operations(lambda: il.explain(model, prompt, progress=False)) < 12 * forward


def test_attention_scores_rank_heads_like_those_of_transformer_lens(model):
    """`head_detector` reads the tokens of both showings, of which the first has no earlier ones."""
    sequences = repeated_sequences(model, n=3, n_tokens=24, seed=0).tokens
    ours = il.repeated_token_scores(model, n=3, n_tokens=24, seed=0)
    kinds = ("previous_token", "duplicate_token", "induction")
    theirs = dict.fromkeys(kinds, 0.0)
    for sequence in sequences[:, None]:
        detected = SimpleNamespace(cfg=model.cfg, to_tokens=lambda tokens: tokens)
        _, cache = model.run_with_cache(
            sequence,
            names_filter=lambda name: name.endswith("hook_pattern"),
            remove_batch_dim=True,
        )
        for kind in kinds:
            theirs[kind] += detect_head(detected, sequence, f"{kind}_head", cache=cache) / 3
    for kind in kinds:
        correlation = il.metrics.spearman(getattr(ours, kind).flatten(), theirs[kind].flatten())
        assert correlation >= 0.95, kind


def test_the_papers_prompt(model):
    """The figures that the documentation states."""
    explanation = il.explain(
        model, "love : bar like : bar eight : foo two : foo one :", n_ablated=1
    )
    assert explanation.predicted == "foo"
    assert 100 * explanation.scores.probs["foo"] == pytest.approx(52.35, abs=0.1)
    assert 100 * explanation.scores.probs["bar"] == pytest.approx(11.5, abs=0.1)


@pytest.fixture(scope="module")
def references(hf, acts):
    rows = zip(acts.batch.tokens, acts.batch.last, strict=True)
    return [reference_hf.Reference(hf.model, tokens[: int(last) + 1]) for tokens, last in rows]


def test_heads_agree_with_the_reference(acts, references):
    """Increases of the answer, and its contrast with the other label, of all 270 heads on every
    prompt.
    """
    increases = il.head_log_prob_increase(acts, acts.batch.answer_tokens)
    contrasts = il.head_log_prob_increase(
        acts, acts.batch.answer_tokens, against=acts.batch.other_label_tokens
    )
    for i, reference in enumerate(references):
        answer, other_label = (
            int(acts.batch.answer_tokens[i]),
            int(acts.batch.other_label_tokens[i]),
        )
        expected = reference.increase("heads", answer)
        assert (increases[i] - expected).abs().max() <= ATOL
        assert (
            contrasts[i] - reference.increase("heads", answer, [other_label])
        ).abs().max() <= ATOL
        assert expected.abs().max() > 100 * ATOL


def test_certified_parts_are_the_largest_of_all(acts, references):
    """All parts of two prompts, 30 layers times 9 heads times every position, by the reference."""
    parts = il.top_subheads(acts, k=K, by="increase")
    assert parts.certified
    for i in range(2):
        everything = references[i].increase("subheads", int(acts.batch.answer_tokens[i]))
        places = everything[parts.layer[i], parts.head[i], parts.position[i]]
        assert (parts.value[i] - places).abs().max() <= ATOL
        assert (parts.value[i] - everything.flatten().topk(K).values).abs().max() <= ATOL
        assert (
            parts.n_exact[i] < parts.n_parts[i] == everything.numel()
        )  # most are left out by their bounds


def test_the_keys_of_induction_heads_come_from_a_previous_token_head(model):
    """On random tokens shown twice, for the two heads that attend most to the token after the
    earlier occurrence.
    """
    ids = torch.randint(200, 20000, (6, 20), generator=torch.Generator().manual_seed(0))
    batch = il.PromptBatch.from_tokens(
        torch.cat([ids, ids[:, :6]], dim=1), model=model, targets=ids[:, 6]
    )
    follows = (
        il.capture(model, batch).pattern[..., 6].mean(0)
    )  # after the earlier copy of the last token
    previous = il.repeated_token_scores(model).previous_token
    heads = [
        il.Head.from_index(int(index), follows.shape[1])
        for index in follows.flatten().topk(2).indices
    ]
    assert min(float(follows[head]) for head in heads) > 0.5
    edge_effects = il.head_to_head_effects(model, batch, heads, part="k", at=6)
    for number, head in enumerate(heads):
        effects = edge_effects.log_prob[:, number].mean(0)
        writer = il.Head.parse(edge_effects.writers[int(effects.argmax())])
        assert previous[writer] > 0.5, f"{writer} → {head}"
        assert effects.max() > 0.1


def test_the_queries_of_name_movers_come_from_heads_that_attend_to_the_second_subject(model):
    """Indirect-object identification (Wang et al. 2022): movers attend to the name that
    S-inhibition heads spare.
    """
    names, texts = ["Mary", "John", "Tom", "Anna"], []
    for number, (object_name, subject) in enumerate(permutations(names, 2)):
        first, second = (object_name, subject) if number % 2 else (subject, object_name)
        text = f"When {first} and {second} went to the store, {subject} gave a drink to"
        texts.append(il.Text(text, answer=f" {object_name}", against=f" {subject}"))
    batch = il.tokenize(model, texts)
    acts, rows = il.capture(model, batch), torch.arange(len(batch))
    at = {
        name: torch.tensor(
            [pick([i for i, id in enumerate(row) if id == token]) for row, token in tokens]
        )
        for name, pick, tokens in (
            (
                "object",
                min,
                list(zip(batch.tokens.tolist(), batch.answer_tokens.tolist(), strict=True)),
            ),
            (
                "subject",
                max,
                list(zip(batch.tokens.tolist(), batch.against[:, 0].tolist(), strict=True)),
            ),
        )
    }
    attention = {name: acts.pattern[rows, ..., place].mean(0) for name, place in at.items()}
    increase = il.head_log_prob_increase(acts, batch.answer_tokens, against=batch.against).mean(0)
    movers = [
        head
        for head in acts.view.heads()
        if attention["object"][head] > 0.4 and increase[head] > 0.3
    ]
    movers = sorted(movers, key=lambda head: -float(increase[head]))[:2]
    assert movers
    edge_effects = il.head_to_head_effects(model, batch, movers, part="q", against=batch.against)
    for number, mover in enumerate(movers):
        effects = edge_effects.log_odds[:, number].mean(0)
        writer = il.Head.parse(edge_effects.writers[int(effects.argmax())])
        assert effects.max() > 0.1, mover
        assert attention["subject"][writer] > 0.4, f"{writer} → {mover}"


def test_explain_and_score_warn_of_an_answer_without_its_space(model):
    text = il.Text("The capital of France is", answer="Paris")
    with pytest.warns(UserWarning, match="pass answer=' Paris' if this is meant"):
        il.explain(model, text, k=1, n_random=1)
    batch = il.tokenize(model, text)
    with pytest.warns(UserWarning, match="pass answer=' Paris' if this is meant"):
        il.score(model, batch, read=lambda log_probs, prompt: log_probs[:, 0])
    pairs = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid")]
    prompt = il.Prompt(pairs, "Japan", "Tokyo", ("Paris", "Rome", "Madrid", "Tokyo"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        il.score(
            model,
            il.tokenize(model, prompt, template=il.Template("{text} -> {label}", separator="\n")),
        )


def rows(batch: il.PromptBatch) -> list[list[int]]:
    return [
        tokens[: int(last) + 1].tolist()
        for tokens, last in zip(batch.tokens, batch.last, strict=True)
    ]


def test_function_vectors_are_those_of_the_published_recipe(model, hf):
    """Ten demonstrations: effects of all heads, the ten largest, and what their vector gains
    zero-shot.
    """
    task = vectors.draw("country-capital")
    task = replace(
        task,
        clean=task.clean[:4],
        shuffled=task.shuffled[:2],
        asked=task.asked[:4],
        test=task.test[:8],
    )
    clean, corrupted = (
        vectors.tokenized(model, prompts) for prompts in (task.clean, task.shuffled)
    )
    mean_outputs = recipe.mean_outputs(hf.model, rows(clean))
    theirs = recipe.indirect_effects(
        hf.model, rows(corrupted), corrupted.answer_tokens.tolist(), mean_outputs
    )
    ours = vectors.indirect_effects(model, task).double()
    torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0)
    assert theirs.mean(0).max() > 0.02
    heads = recipe.top_heads(theirs, vectors.N_HEADS)
    assert [tuple(head) for head in vectors.best_heads(ours.numpy(), vectors.N_HEADS)] == heads
    vector = il.function_vector(model, clean, [il.Head(*head) for head in heads])
    expected_vector = recipe.function_vector(mean_outputs, heads)
    torch.testing.assert_close(vector.double(), expected_vector.double(), atol=ATOL, rtol=0)
    asked, test = (vectors.tokenized(model, prompts) for prompts in (task.asked, task.test))
    layer = il.vector_gains(model, vector, asked).best
    before = recipe.log_probs_with(hf.model, rows(test))
    after = recipe.log_probs_with(hf.model, rows(test), expected_vector, layer)
    gains = il.vector_gains(model, vector, test, layers=[layer])
    expected_gain = (after - before)[torch.arange(len(test)), test.answer_tokens]
    assert expected_gain.mean() > 1
    torch.testing.assert_close(gains.gain[:, 0], expected_gain, atol=1e-3, rtol=0)
    assert gains.top1[:, 0].tolist() == (after.argmax(1) == test.answer_tokens).tolist()
