"""Contrasts, log p(target) − log Σ p(against), and searches: memory and refusals; values: the
sweep.
"""

from itertools import product

import against_hf
import families
import pytest
import torch
from shared import SEVERAL
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.readout import Readout
from icl_lens.reading.scored_tokens import default_comparison


def contrasts(batch):
    """Return two forms of `against`: one token per prompt, and several."""
    return {"one": batch.other_label_tokens, "several": SEVERAL}


def ranking(asked):
    """The same options for a search, which must be asked for increases."""
    return asked if asked.get("against") is not None else {"by": "increase"} | asked


def everything(acts, targets, **asked):
    """The result of every function of one capture that takes `against`."""
    return {
        "layers": torch.stack(list(il.layer_log_prob_increase(acts, targets, **asked))),
        "heads": il.head_log_prob_increase(acts, targets, **asked),
        "subheads": il.subhead_log_prob_increase(acts, targets, **asked),
        "neurons": il.neuron_log_prob_increase(acts, 1, targets, **asked),
        "top_subheads": il.top_subheads(acts, targets, k=7, **ranking(asked)).value,
        "top_heads": il.top_heads(acts, targets, k=7, **ranking(asked)).value.float(),
    }


def refuse(*_):
    raise AssertionError("must not be called")


def test_search_goes_on_while_a_bound_is_larger(gpt2_acts, gpt2_batch):
    """The 42 largest bounds of a prompt do not include all of its 40 largest parts."""
    top = against_hf.check_search(gpt2_acts, gpt2_batch, certified=True, k=40)
    assert top.n_exact.max() > 42


def test_own_norm_is_exhaustive_and_says_so(gpt2_acts, gpt2_batch):
    top = against_hf.check_search(gpt2_acts, gpt2_batch, certified=False, final_norm="own")
    assert torch.equal(top.n_exact, top.n_parts)
    heads = il.top_heads(gpt2_acts, k=3, by="increase", final_norm="own")
    mean = (
        il.head_log_prob_increase(gpt2_acts, gpt2_batch.answer_tokens, final_norm="own")
        .mean(0)
        .flatten()
        .topk(3)
    )
    assert (heads.certified, heads.n_exact) == (False, 12)
    assert_close(heads.value, mean.values)


@pytest.mark.slow
def test_few_parts_of_a_thousand_prompts_are_evaluated(icl_mini):
    searches = []
    for part in il.tokenize(icl_mini, il.load_task("sentiment-number", n=1000, seed=0)).split(100):
        searches.append(
            against_hf.check_search(il.capture(icl_mini, part), part, certified=True, k=20)
        )
    n_exact, n_parts = (
        torch.cat([getattr(top, name) for top in searches]) for name in ("n_exact", "n_parts")
    )
    assert float(n_exact.double().mean()) < 60 < float(n_parts.double().mean())


def test_one_token_has_two_spellings(gpt2_acts, gpt2_batch):
    """[batch], [batch 1] and [batch n] padded with -1 are the same question."""
    targets, other_labels = gpt2_batch.answer_tokens, gpt2_batch.other_label_tokens
    padded = torch.full((3, 4), -1)
    padded[:, 2] = other_labels[:, 0]
    increases = [
        il.head_log_prob_increase(gpt2_acts, targets, against=compared)
        for compared in (other_labels[:, 0], other_labels, padded)
    ]
    assert torch.equal(increases[0], increases[1])
    assert torch.equal(increases[0], increases[2])
    assert il.top_heads(gpt2_acts, targets, k=3, against=padded).n_exact == 12


def test_the_vocabulary_is_never_projected_on(gpt2_acts, gpt2_batch, monkeypatch):
    """Neither one nor several tokens, whatever the norm, need more than their own columns of
    W_U.
    """
    for name in ("_unembed", "logits", "pieces", "pull_back"):
        monkeypatch.setattr(Readout, name, refuse)
    for against, norm in product(contrasts(gpt2_batch).values(), ("frozen", "own")):
        everything(gpt2_acts, gpt2_batch.answer_tokens, against=against, final_norm=norm)


def test_a_linear_contrast_makes_no_vectors(gpt2_acts, gpt2_batch, monkeypatch):
    """Parts are products with g in the heads' own space: no [batch, part, d_model]."""
    for name in ("head_outputs", "subhead_values", "neuron_values"):
        monkeypatch.setattr(f"icl_lens.reading.increases.{name}", refuse)
    monkeypatch.setattr("icl_lens.reading.search.head_outputs", refuse)
    everything(gpt2_acts, gpt2_batch.answer_tokens, against=gpt2_batch.other_label_tokens)


@pytest.mark.parametrize("against", [None, SEVERAL], ids=["none", "several"])
def test_small_pieces_change_nothing(gpt2_acts, gpt2_batch, monkeypatch, against):
    """The byte budgets only cut the work, between prompts and within one."""
    before = everything(gpt2_acts, gpt2_batch.answer_tokens, against=against)
    for rows, parts in ((0, 0), (3, 5), (20, 50)):
        monkeypatch.setattr("icl_lens.models.readout.LOGIT_BYTES", rows * 4 * families.VOCAB_SIZE)
        monkeypatch.setattr("icl_lens.reading.increases.PART_BYTES", parts * 4 * families.D_MODEL)
        for name, in_pieces in everything(
            gpt2_acts, gpt2_batch.answer_tokens, against=against
        ).items():
            assert_close(in_pieces, before[name], msg=name)


def test_other_labels_are_the_prompts_own_except_its_answer(gpt2):
    """Each prompt's own labels except its answer, whatever labels other prompts of the batch have,
    padded with -1.
    """
    words = ("foo", "bar", "red", "yes")
    ids = dict(zip(words, map(families.WORDS.index, words), strict=True))
    prompts = [
        il.Prompt([il.Demonstration("cat", "foo"), il.Demonstration("dog", "bar")], "one", "bar"),
        il.Prompt([il.Demonstration("cat", word) for word in words[:3]], "two", "bar", words[:3]),
        il.Prompt([il.Demonstration("cat", "red"), il.Demonstration("dog", "yes")], "two"),
        il.Prompt([il.Demonstration("cat", "yes")], "two", "yes"),
    ]
    batch = il.tokenize(gpt2, prompts)
    expected = [[ids["foo"], -1], [ids["foo"], ids["red"]], [-1, -1], [-1, -1]]
    assert batch.other_label_tokens.tolist() == expected
    assert batch[[1, 0]].other_label_tokens.tolist() == [expected[1], expected[0]]
    assert batch[[0]].other_label_tokens.tolist() == [[ids["foo"]]]
    assert batch[[3]].other_label_tokens.tolist() == [[-1]]
    predicted = torch.tensor([ids[word] for word in ("foo", "red", "yes", "yes")])
    assert default_comparison(batch, predicted).tolist() == [
        [ids["bar"], -1],
        [ids["bar"], ids["foo"]],
        [ids["red"], -1],
        [-1, -1],
    ]
    two_prompts = batch[[0, 3]]
    with pytest.raises(il.InputError, match="got none for prompt 1"):
        il.locate(gpt2, two_prompts, by="contrast", k=2, against=two_prompts.other_label_tokens)
    with pytest.raises(
        il.InputError, match=r"prompt 1 must have another label .* or pass by='increase'"
    ):
        il.locate(gpt2, two_prompts, by="contrast", k=2)
    assert il.locate(gpt2, two_prompts, k=2, by="increase").by == "increase"


def test_searches_rank_by_contrast_with_the_other_labels(
    gpt2, gpt2_acts, gpt2_batch, no_type_checks
):
    """Without arguments, the answers are compared with the other labels; increases have to be asked
    for.
    """
    other_labels = gpt2_batch.other_label_tokens
    for search in (
        lambda **asked: il.top_heads(gpt2_acts, k=5, **asked),
        lambda **asked: il.top_subheads(gpt2_acts, k=5, **asked),
    ):
        default, contrast, increase = (
            search(),
            search(by="contrast", against=other_labels),
            search(by="increase"),
        )
        assert (default.by, increase.by) == ("contrast", "increase")
        assert torch.equal(default.value, contrast.value)
        assert not torch.equal(default.value, increase.value)
        with pytest.raises(il.InputError, match="against must be None with by='increase'"):
            search(by="increase", against=other_labels)
        with pytest.raises(
            il.InputError, match="by must be one of 'contrast', 'increase', got 'effect'"
        ):
            search(by="effect")
    top = il.top_heads(gpt2_acts, k=5, by="increase")
    assert_close(top.value, il.head_log_prob_increase(gpt2_acts).mean(0).flatten().topk(5).values)


def test_texts_are_compared_with_the_tokens_they_are_given(gpt2):
    """Without labels, the score is the contrast with `against`, or else the increase."""
    text = "love bar love"
    alone, compared = (
        il.capture(gpt2, il.tokenize(gpt2, il.Text(text, answer=" bar", against=against)))
        for against in (None, " foo")
    )
    assert il.top_heads(alone, k=3).by == "increase"
    assert_close(
        il.top_heads(alone, k=3).value, il.head_log_prob_increase(alone)[0].flatten().topk(3).values
    )
    located = il.top_heads(compared, k=3)
    expected = (
        il.head_log_prob_increase(compared, against=compared.batch.against)[0].flatten().topk(3)
    )
    assert located.by == "contrast"
    assert_close(located.value, expected.values)
    with pytest.raises(
        il.InputError, match="by must be 'increase' without tokens to compare with, got 'contrast'"
    ):
        il.top_heads(alone, k=3, by="contrast")
