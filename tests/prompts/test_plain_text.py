"""Texts without demonstrations: any target, any position, and the same numbers as plain Hugging
Face code.
"""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import against_hf
import families
import pytest
import torch
from shared import IOI
from small_tokenizers import model_of
from tolerance import assert_close

import icl_lens as il
from icl_lens.measures.debias import balancing_weights
from icl_lens.prompts.token_ids import check_no_padding
from icl_lens.reading.last_logits import last_log_probs


def test_several_texts_and_positions_at_once_are_each_alone(ioi_pair):
    model, hf = ioi_pair
    texts = [IOI, "Mary gave John a drink"]
    batch = il.tokenize(model, list(map(il.Text, texts))).at([[3, -1], [1, 2, -2]])
    lengths = [int(il.tokenize(model, il.Text(text)).last[0]) for text in texts]
    assert batch.last.tolist() == [3, lengths[0], 1, 2, lengths[1] - 1]
    assert batch.prompt_index.tolist() == [0, 0, 1, 1, 1]
    assert batch.answer_tokens[1] == -1, "nothing follows the end of a text"
    rows = [0, 2, 3, 4]
    for row in rows:
        whole = il.tokenize(model, il.Text(texts[int(batch.prompt_index[row])]))
        assert batch.answer_tokens[row] == whole.tokens[0, batch.last[row] + 1]
    acts = il.capture(model, batch)
    assert len(acts.values.pass_v) == 2, "one pass a text"
    against_hf.check_increases(acts[rows], batch[rows], hf, conventions=against_hf.CONVENTIONS[:1])
    against_hf.check_search(acts[rows], batch[rows], certified=True, k=4)


def test_answers_are_given_as_text_or_ids(ioi_pair):
    model, _ = ioi_pair
    mary, john = (
        int(il.tokenize(model, il.Text(IOI, answer=f" {name}")).answer_tokens)
        for name in ("Mary", "John")
    )
    assert mary != john
    texts = [
        il.Text(IOI, answer=" Mary", against=" John"),
        il.Text(IOI, answer=john, against=[" Mary", 7]),
    ]
    batch = il.tokenize(model, texts)
    assert batch.answer_tokens.tolist() == [mary, john]
    assert batch.against.tolist() == [[john, -1], [mary, 7]]
    everywhere = batch.at("all")
    assert [
        int(everywhere[everywhere.prompt_index == row].answer_tokens[-1]) for row in (0, 1)
    ] == [mary, john]
    tokenized = il.tokenize(model, [il.Text(IOI), il.Text(IOI, answer=" Mary")])
    assert (tokenized.answer_tokens.tolist(), tokenized.against) == ([-1, mary], None)
    with pytest.warns(UserWarning, match=r"' Maryto' has \d tokens, .* first, .*Mary'"):
        assert il.tokenize(model, il.Text(IOI, answer=" Maryto")).answer_tokens.tolist() == [mary]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        il.tokenize(model, il.Text(IOI, answer=" Mary"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (lambda: [il.Text(IOI), il.Text(" ")], "must not be empty, got ' '"),
        (lambda: il.Text(IOI, answer=""), "must not be empty"),
        (lambda: il.Text(IOI, answer=[" Mary"]), "must be a string or a token id"),
        (lambda: il.Text(IOI, against=[]), "at least one token"),
        (lambda: il.Text(IOI + " ", answer="Mary"), "not a separate token"),
        (lambda: il.Text(IOI, answer=10_000), "token id 10000 is out of range"),
        (lambda: il.Text(IOI, answer=" Mary", against=" Mary"), "must differ"),
        (
            lambda: [il.Text(IOI), il.Text(IOI, against=" Mary")],
            "all texts or none must have tokens to compare",
        ),
        (lambda: il.Text(" ".join(["Mary"] * 100)), "context length of 64"),
        (lambda: [il.Prompt.parse(families.PROMPT), il.Text(IOI)], "got both"),
    ],
)
def test_what_does_not_fit_is_said(ioi_pair, texts, message, no_type_checks):
    with pytest.raises(il.InputError, match=message):
        il.tokenize(ioi_pair[0], texts())


def test_beginning_of_sequence_is_the_tokenizers_own(ioi_pair):
    model, _ = ioi_pair
    batch = il.tokenize(model, il.Text(IOI))
    assert (batch.tokens[0, 0] == model.tokenizer.bos_token_id) == (
        model.cfg.normalization_type.startswith("RMS")
    )
    with_bos = il.tokenize(model, il.Text(IOI), prepend_bos=True).at(0)
    assert with_bos.tokens.tolist() == [[model.tokenizer.bos_token_id]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_removed_by_the_mask(icl_mini, side):
    """Rows padded on either side score as they do alone; without a mask they are refused."""
    ids = [
        icl_mini.tokenizer(text)["input_ids"]
        for text in ("one : foo two :", "love : bar three : foo nine :")
    ]
    pad, longest = icl_mini.tokenizer.pad_token_id, max(map(len, ids))
    fill = [[pad] * (longest - len(row)) for row in ids]
    tokens = [
        [*more, *row] if side == "left" else [*row, *more]
        for row, more in zip(ids, fill, strict=True)
    ]
    mask = (torch.tensor(tokens) != pad).int().tolist()
    masked = il.PromptBatch.from_tokens(
        torch.tensor(tokens), model=icl_mini, attention_mask=torch.tensor(mask)
    )
    alone = il.PromptBatch.from_tokens(ids, model=icl_mini)
    assert masked.tokens.tolist() == alone.tokens.tolist()
    assert_close(last_log_probs(icl_mini, masked), last_log_probs(icl_mini, alone))
    word = "begins" if side == "left" else "ends"
    with pytest.raises(
        il.InputError, match=f"row 0 {word} with {len(fill[0])} padding token.*attention_mask="
    ):
        il.PromptBatch.from_tokens(tokens, model=icl_mini)
    unchecked = il.PromptBatch.from_tokens(
        tokens
    )  # without a model, padding is found when a model reads it
    for read in (il.capture, last_log_probs):
        with pytest.raises(il.InputError, match=f"row 0 {word} with {len(fill[0])} padding token"):
            read(icl_mini, unchecked)
    last_log_probs(icl_mini, il.PromptBatch.from_tokens(tokens, attention_mask=mask))


@pytest.mark.parametrize(
    ("tokens", "bos", "refused"), [([0, 5], 0, False), ([0, 0, 5], 0, True), ([0, 5], None, True)]
)
def test_one_token_that_both_begins_texts_and_pads_is_no_padding(tokens, bos, refused):
    tokenizer = SimpleNamespace(pad_token_id=0, bos_token_id=bos, eos_token_id=None)
    with pytest.raises(il.InputError, match="padding token") if refused else nullcontext():
        check_no_padding(tokenizer, [tokens])


FREE = {"tokens": [[31, 2, 40, 17, 40, 17], [5, 9, 21]], "targets": [40, 7]}


@pytest.fixture(scope="module")
def free(gpt2):
    batch = il.PromptBatch.from_tokens(FREE["tokens"], model=gpt2, targets=FREE["targets"])
    return gpt2, batch, il.capture(gpt2, batch)


def test_what_follows_a_capture_works_without_labels(free):
    model, batch, acts = free
    targets = batch.answer_tokens
    assert targets.tolist() == FREE["targets"]
    heads = il.head_log_prob_increase(acts, targets)
    assert_close(il.top_heads(acts, targets, k=3).value, heads.mean(0).flatten().topk(3).values)
    located = il.locate(model, batch, by="increase", k=3, run=il.Run(batch_size=1))
    assert located.heads == il.top_heads(acts, targets, k=3).heads
    assert_close(located.score.mean.float(), heads.mean(0))
    effects = il.head_effects(model, batch, positions="all")
    plain = last_log_probs(model, batch)[torch.arange(2), targets]
    for head in [il.Head(0, 1), il.Head(2, 3)]:
        with il.ablate_heads(model, [head]):
            without = last_log_probs(model, batch)[torch.arange(2), targets]
            assert il.capture(model, batch).z[:, head.layer, head.head].abs().max() == 0
        assert_close(effects.log_prob[:, head.layer, head.head], plain - without)
    assert effects.log_odds.isnan().all(), "no labels, no odds"
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
    again = il.Activations.from_cache(model, cache, batch)
    assert_close(il.head_log_prob_increase(again, targets), heads)
    assert acts.last_query((1, 0)).shape == (2, families.D_MODEL)
    with (
        il.edited(model, il.RemovePosition([(1, 0)])),
        il.patch_heads(model, [(2, 0)], batch, activation="v"),
    ):
        il.capture(model, batch)


def test_what_is_about_labels_is_refused(free):
    model, batch, acts = free
    for ask in [
        lambda: acts.label_log_probs,
        lambda: acts.predicted,
        lambda: il.score(model, batch),
        lambda: acts.attention_to_labels(),
        lambda: acts.attention_by_label(),
        lambda: acts.label_values((0, 0)),
        lambda: acts.label_keys((0, 0)),
        lambda: acts.own_label_ranks((0, 0)),
        lambda: balancing_weights(batch),
    ]:
        with pytest.raises(il.InputError, match="no demonstrations, so there is no label"):
            ask()
    for block in [
        il.edited(model, il.Reweight([(0, 0)], torch.ones(2, 0), renormalize=True), batch=batch),
        il.patch_heads(model, [(0, 0)], batch, activation="v", align="labels", batch=batch),
    ]:
        with pytest.raises(il.InputError, match="no demonstrations, so there is no label"), block:
            pass


def test_from_cache_reads_any_position(free):
    model, batch, _ = free
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
    acts = il.Activations.from_cache(model, cache, batch, positions=[[0, 3], [1]])
    there = il.capture(model, batch, positions=[[0, 3], [1]])
    assert acts.batch.answer_tokens.tolist() == there.batch.answer_tokens.tolist() == [2, 40, 21]
    for name in ("z", "pattern", "resid_pre"):
        assert_close(getattr(acts, name), getattr(there, name))
    assert_close(acts.values.of_layer(1), there.values.of_layer(1))


def test_rows_of_a_prompt_share_a_pass_only_where_nothing_edits_the_model(gpt2):
    """An edit at each row's last position needs a pass over every row."""
    batch = il.PromptBatch.from_tokens(FREE["tokens"][:1], model=gpt2, positions=[1, 3, 5])
    assert len(il.capture(gpt2, batch).values.pass_v) == 1
    with il.ablate_heads(gpt2, [(1, 0)], positions="last"):
        edited = il.capture(gpt2, batch)
        assert (edited.z[:, 1, 0] == 0).all()
        alone = [
            il.capture(gpt2, il.PromptBatch.from_tokens(batch.tokens[i : i + 1, : 2 * i + 2]))
            for i in range(3)
        ]
    for row, row_alone in enumerate(alone):
        assert_close(edited.resid_final[row], row_alone.resid_final[0])


def test_positions_of_a_classification_prompt(gpt2, gpt2_batch):
    """Rows have labels up to their end, an answer at the prompt's end only, and Hugging Face's
    log-probabilities.
    """
    acts = il.capture(gpt2, gpt2_batch, positions=[2, 6, -1])
    rows = acts.batch
    assert rows.prompt_index.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rows.label_positions[:3].tolist() == [[2, -1, -1, -1], [2, 5, -1, -1], [2, 5, 8, 11]]
    assert (rows.answer >= 0).tolist() == [False, False, True] * 3
    assert rows.text_ranges[1].tolist()[1:3] == [[3, 4], [6, 7]]
    assert rows.text_ranges[0].tolist()[1] == [-1, -1]
    assert rows.query_range[0].tolist() == [-1, -1]
    assert rows.query_range[2].tolist() == [12, 13]
    last = il.capture(gpt2, gpt2_batch)
    assert_close(acts[[2, 5, 8]].label_log_probs, last.label_log_probs)
    assert_close(acts.attention_to_labels()[[2, 5, 8]], last.attention_to_labels())
    with torch.no_grad():
        plain = torch.log_softmax(
            gpt2.original_model(gpt2_batch.tokens[:1, :3]).logits[0, -1], dim=-1
        )
    assert_close(acts.label_log_probs[0], plain[gpt2_batch.label_tokens])
    assert (
        il.tokenize(gpt2, list(gpt2_batch.prompts)).answer_tokens.tolist()
        == rows.answer_tokens[[2, 5, 8]].tolist()
    )


def test_tokens_without_a_model_are_their_own_names():
    batch = il.PromptBatch.from_tokens(torch.tensor([[4, 5, 6]]), against=[[1, 2]], targets=3)
    assert batch.token_strings == [["4", "5", "6"]]
    assert batch.token_roles == [["query", "query", "last"]]
    assert batch.texts == ("4 5 6",)
    assert (batch.answer_tokens.tolist(), batch.against.tolist()) == ([3], [[1, 2]])
    assert batch[[0, 0]].against.tolist() == [[1, 2], [1, 2]]
    assert len(batch) == 1


@pytest.mark.parametrize(
    ("kind", "names"), [("byte", ["love", "␣like"]), ("metaspace", ["␣love", "␣like"])]
)
def test_white_space_of_tokens_is_visible(kind, names):
    batch = il.tokenize(model_of(kind), il.Text("love like\n"), prepend_bos=False)
    assert batch.token_names[0][:2] == names
    assert not any(set(name) & set(" \n") or not name for name in batch.token_names[0])
    assert [name.strip("␣") for name in names] == [
        token.strip() for token in batch.token_strings[0][:2]
    ]
