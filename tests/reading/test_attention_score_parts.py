"""Score parts and value parts: exact sums in every family, and equal to independent derivatives and
hooked passes.
"""

from functools import cache

import pytest
import torch
from family_tables import SOFT_CAPPED
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.view import ModelView
from icl_lens.reading import writers
from icl_lens.reading.head_parts import head_values, scaled_pattern
from icl_lens.reading.reasons import attention_reasons
from icl_lens.reading.writer_groups import layer_of
from icl_lens.result.number_format import signed

LAYER = 2


@pytest.fixture(scope="module")
def captured(load_tiny):
    @cache
    def get(name):
        model = load_tiny(name)
        batch = il.tokenize(model, PROMPTS, prepend_bos=False)
        return model, batch, il.capture(model, batch, writers=True)

    return get


def test_first_order_value_parts_are_the_derivative_of_the_increase(captured):
    """By increase, parts sum to the difference quotient of the increase of a small multiple of the
    subhead.
    """
    _, batch, acts = captured("llama_gqa")
    head, step = il.Head(LAYER, 1), 1e-3
    assert il.value_parts(acts, head).is_exact, "by contrast"
    parts = il.value_parts(acts, head, by="increase")
    assert not parts.is_exact
    at = batch.label_positions[:, :1]
    pattern = scaled_pattern(acts, LAYER)[:, 1].gather(1, at)[..., None]
    values = head_values(acts, LAYER)[:, :, 1][torch.arange(len(batch))[:, None], at]
    u = (pattern * values) @ acts.view.W_O(LAYER)[1]
    x = acts.resid_pre[:, LAYER, None].double()
    readout = acts.readout
    above, below = (
        readout.token_log_probs(x + sign * step * u, batch.answer_tokens) for sign in (1, -1)
    )
    torch.testing.assert_close(
        parts.value[:, :1], ((above - below) / (2 * step)).float(), atol=2e-3, rtol=2e-2
    )


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "bloom", "qwen3"])
def test_a_writing_head_splits_by_the_positions_it_read(captured, name):
    _, batch, acts = captured(name)
    parts = il.attention_score_parts(acts, "L2H0")
    values = il.value_parts(acts, "L2H0", batch.answer_tokens, against=batch.other_label_tokens)
    for writer in ("L0H1", "L1H2"):
        number = parts.writers.index(writer)
        scale = float(parts.query_parts.norm(dim=-1).max() * parts.key_parts.norm(dim=-1).max())
        assert_close(
            parts.by_position(writer, "query").sum(-1), parts.query_side[..., number], scale=scale
        )
        by_key = parts.by_position(writer, "key")
        assert_close(by_key.sum(-1), parts.key_side[..., number], scale=scale)
        after = torch.arange(by_key.shape[-1]) > batch.label_positions[..., None]
        assert by_key[after].abs().max() == 0  # a head at a label reads nothing after it
        assert_close(values.by_position(writer).sum(-1), values.parts[..., number])
    with pytest.raises(il.InputError, match="before L2H0"):
        parts.by_position("L2H1", "key")


def test_printed_means_leave_padding_out(gpt2):
    prompts = [
        il.Prompt.parse("love : bar eight : foo one :", answer="foo"),
        il.Prompt.parse("love : bar eight : foo two : foo one :", answer="foo"),
    ]
    acts = il.capture(gpt2, il.tokenize(gpt2, prompts), writers=True)
    parts = il.attention_score_parts(acts, "L2H0")
    means = parts.to_frame().groupby("writer")[["query_side", "key_side"]].mean()
    lines = str(parts).splitlines()
    assert "5 keys of 2 prompts" in lines[0]
    for writer in ("L1H2", "F1"):
        (line,) = [line for line in lines if line.split()[:1] == [writer]]
        assert line.split()[1:] == [signed(value) for value in means.loc[writer]]


def test_contrasts_between_groups_of_keys(captured):
    _, batch, acts = captured("llama_gqa")
    parts = il.attention_score_parts(acts, "L2H3")
    same = parts.of_label(batch.answer)
    why = parts.contrast(same)
    scores = parts.scores
    other_labels = ~same & (parts.positions >= 0)
    expected = (scores * same).sum(1) / same.sum(1) - (scores * other_labels).sum(
        1
    ) / other_labels.sum(1)
    scale = float(why.pairs.abs().max())
    for total in (why.value, why.query_side.sum(-1), why.key_side.sum(-1), why.pairs.sum((1, 2))):
        assert_close(total, expected, scale=scale)
    assert_close(why.pairs.sum(2), why.query_side, scale=scale)
    top = why.top_pairs(3)
    assert len(top) == 3 * len(batch)
    first = top.iloc[0]
    pair = parts.writers.index(first["query_writer"]), parts.writers.index(first["key_writer"])
    assert_close(first["value"], why.pairs[0][pair], scale=scale)
    assert abs(first["value"]) == pytest.approx(float(why.pairs[0].abs().max()))
    with pytest.raises(il.InputError, match="each select a key"):
        parts.contrast(torch.ones_like(same))


def test_writers_from_a_cache_and_for_chosen_positions(gpt2, gpt2_batch):
    _, cache = gpt2.run_with_cache(gpt2_batch.tokens, attention_mask=gpt2_batch.attention_mask)
    captured = il.capture(gpt2, gpt2_batch, writers=True)
    cached = il.Activations.from_cache(gpt2, cache, gpt2_batch, writers=True)
    ours, theirs = (il.attention_score_parts(acts, "L2H1") for acts in (captured, cached))
    assert_close(ours.key_side, theirs.key_side, scale=float(ours.key_side.abs().max()))
    with pytest.raises(il.InputError, match="position 1; capture"):
        il.attention_score_parts(captured, "L2H1", keys=[1])
    acts_at_positions = il.capture(gpt2, gpt2_batch, writers=[0, 1])
    assert il.attention_score_parts(acts_at_positions, "L2H1", keys=[0, 1]).scores.shape == (3, 2)
    with pytest.raises(il.InputError, match="writers=True"):
        il.attention_score_parts(il.capture(gpt2, gpt2_batch), "L2H1")


def test_plain_text_has_parts_at_all_positions(gpt2):
    batch = il.tokenize(gpt2, il.Text("love like eight two one", answer=" foo"))
    acts = il.capture(gpt2, batch, writers=True)
    parts = il.attention_score_parts(acts, "L1H0")
    assert parts.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert_close(parts.query_side.sum(-1), parts.scores, scale=float(parts.query_side.abs().max()))


def test_parts_that_do_not_sum_are_refused_by_name(captured, monkeypatch):
    """Here, the gain of a norm is read wrongly."""
    _, _, acts = captured("llama_gqa")
    norm = acts.view.attn_input_norm(LAYER)
    monkeypatch.setattr(
        ModelView, "attn_input_norm", lambda self, layer: norm._replace(gain=norm.gain * 1.1)
    )
    with pytest.raises(
        il.InputError, match="attention scores of LlamaForCausalLM are not supported"
    ):
        il.attention_score_parts(acts, "L2H1")


def test_words_of_parts(icl_mini):
    """A key part is what the writer wrote; query parts sum, up to constants, to `last_query`."""
    batch = il.tokenize(icl_mini, PROMPTS[:1])
    acts = il.capture(icl_mini, batch, writers=True)
    head = il.Head(3, 2)
    parts = il.attention_score_parts(acts, head)
    total = torch.stack([parts.vectors(writer, "key") for writer in parts.writers]).sum(0)
    assert_close(total, acts.label_keys(head), scale=float(total.abs().max()))
    total = torch.stack([parts.vectors(writer, "query")[:, 0] for writer in parts.writers]).sum(0)
    assert_close(total, acts.last_query(head), scale=float(total.abs().max()) * 8)
    values = il.value_parts(acts, head, batch.answer_tokens, against=batch.other_label_tokens)
    total = torch.stack([values.vectors(writer) for writer in values.writers]).sum(0)
    assert_close(total, acts.label_values(head), scale=float(total.abs().max()))


@pytest.mark.parametrize("n_few", [0, 3])
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3", "olmo2"])
def test_parts_without_kept_vectors_are_those_with_them(captured, monkeypatch, name, n_few):
    """W_O is multiplied first for all rows, or for the keys only (12 rows; 3 of queries)."""
    _, batch, acts = captured(name)
    monkeypatch.setattr(writers.Writers, "_few_rows", 1000)
    with_vectors = acts.to("cpu")
    score_parts = il.attention_score_parts(with_vectors, "L2H1")
    assert "_vectors" in vars(with_vectors.writers)
    before = score_parts.pattern_without("key", norm="recomputed")
    monkeypatch.setattr(writers.Writers, "_few_rows", n_few)
    monkeypatch.setattr(writers, "WRITER_BYTES", 1)
    fresh = acts.to("cpu")
    new = il.attention_score_parts(fresh, "L2H1")
    assert_close(new.pattern_without("key", norm="recomputed"), before, scale=8.0)
    scale = float(
        score_parts.query_parts.norm(dim=-1).amax() * score_parts.key_parts.norm(dim=-1).amax()
    )
    assert_close(new.key_side, score_parts.key_side, scale=scale)
    assert_close(new.query_side, score_parts.query_side, scale=scale)
    for writer in score_parts.writers:  # the vectors of one writer alone are the same
        rows = acts.writers.rows_at(batch.last[:, None])[:, 0]
        matrix = torch.eye(acts.view.d_model)
        all_at_once = fresh.writers.split(rows, LAYER, matrix)[:, score_parts.writers.index(writer)]
        assert_close(
            acts.writers.written(rows, LAYER, writer),
            all_at_once,
            scale=float(all_at_once.abs().max()),
        )
    assert "_vectors" not in vars(fresh.writers)


def test_long_prompts_keep_no_attention_of_every_label(icl_mini):
    """What is kept grows with labels plus positions, not with their product."""

    def bytes_per_token(n):
        demonstrations = [il.Demonstration("love", ("foo", "bar")[i % 2]) for i in range(n)]
        batch = il.tokenize(icl_mini, [il.Prompt(demonstrations, query="one", answer="foo")])
        writer_fields = vars(il.capture(icl_mini, batch, writers=True).writers)
        tensors = [value for value in writer_fields.values() if isinstance(value, torch.Tensor)]
        return (
            sum(value.numel() * value.element_size() for value in tensors) / batch.tokens.shape[1]
        )

    assert bytes_per_token(40) < 1.1 * bytes_per_token(10)


@pytest.mark.parametrize("name", ["gpt2", *SOFT_CAPPED])
def test_only_a_soft_cap_leaves_out_the_values(load_tiny, name):
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS[:1], prepend_bos=False)
    acts = il.capture(model, batch, writers=True)
    more, less = batch.label_positions[0, :2].tolist()
    why, vectors = attention_reasons(
        acts, il.Head(LAYER, 0), [more], [less], batch.answer_tokens, None
    )
    assert bool(why.value) == ("value" in vectors) == (name == "gpt2")
    if name == "gpt2":
        with pytest.raises(il.InputError, match="targets must be between"):
            attention_reasons(acts, il.Head(LAYER, 0), [more], [less], torch.tensor([-1]), None)


def test_biases_have_no_layer():
    assert [layer_of(name) for name in ("embed", "L12H3", "F4")] == [-1, 12, 4]
    with pytest.raises(ValueError, match="'bias' has no layer"):
        layer_of("bias")
