"""The readout against the norm written out, its pull-back against autograd, ranks and words by
hand.
"""

import pytest
import torch
from tolerance import assert_close

from icl_lens.models.content_words import is_content_word
from icl_lens.models.readout import MIN_STANDOUT, Readout


def make(*, center=True, logit_scale=1.0, dtype=torch.float64):
    """A readout with nothing trivial in it."""
    g = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype)

    return Readout(
        W_U=draw(6, 11),
        b_U=draw(11),
        gain=1 + 0.3 * draw(6),
        shift=draw(6) if center else None,
        scale=draw(3).abs() + 0.5,
        eps=1e-5,
        center=center,
        logit_scale=logit_scale,
        decode=lambda token: f"t{token}",
    )


def vectors(*shape):
    return torch.randn(*shape, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
@pytest.mark.parametrize("center", [True, False])
def test_pull_back_is_the_gradient(center, logit_scale):
    """u · pull_back(w) = Σ_j w_j b_j(u): the gradient of the weighted logits."""
    readout = make(center=center, logit_scale=logit_scale)
    weights = torch.randn(3, 11, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = vectors(3).requires_grad_(True)
    (readout.logits(x) * weights).sum().backward()
    assert_close(readout.pull_back(weights), x.grad)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_out_in_float32(half, monkeypatch):
    """An upcast in slices gives what upcasting W_U as a whole gives."""
    readout = make(dtype=torch.float32)
    low = Readout(**{**vars(readout), "W_U": readout.W_U.to(half)})
    whole = Readout(**{**vars(readout), "W_U": readout.W_U.to(half).float()})
    monkeypatch.setattr("icl_lens.models.readout.LOGIT_BYTES", 2 * 6 * 4 * 3)
    x = vectors(3).float()
    assert low.logits(x).dtype == torch.float32
    assert_close(low.logits(x), whole.logits(x))
    weights = torch.randn(3, 11, generator=torch.Generator().manual_seed(5))
    assert_close(low.pull_back(weights), whole.pull_back(weights))


def test_ranks_and_words_by_hand():
    """With the identity as unembedding and no centering, a vector's largest entry is its top
    token.
    """
    readout = Readout(
        W_U=torch.eye(4),
        b_U=torch.tensor([0.0, 0.0, 0.0, 9.0]),
        gain=None,
        shift=None,
        scale=torch.ones(1),
        eps=0.0,
        center=False,
        decode="a the foo b".split().__getitem__,
    )
    vector = torch.tensor([[0.3, 0.9, 0.5, 0.1]])
    assert readout.top_tokens(vector, k=4) == [["the", "foo", "a", "b"]]
    assert readout.top_tokens(vector[0], k=1) == ["the"]
    assert readout.top_tokens(vector, k=2, keep="words") == [["foo"]]
    assert readout.top_tokens(vector, k=1, bias=True) == [["b"]]
    assert readout.top_tokens(vector.expand(2, 3, 4), k=1) == [[["the"]] * 3] * 2
    assert readout.ranks(vector, torch.tensor([2])).tolist() == [2]
    assert readout.ranks(vector.expand(2, 4), torch.tensor([1, 3])).tolist() == [1, 4]
    assert readout.ranks(torch.zeros(1, 4), torch.tensor([2])).tolist() == [1], (
        "ties share the better rank"
    )


def test_ranks_do_not_depend_on_the_convention():
    x, tokens = vectors(3), torch.tensor([1, 2, 3])
    frozen, with_own_norm = (make().using(final_norm=norm, bias=True) for norm in ("frozen", "own"))
    assert torch.equal(frozen.ranks(x, tokens), with_own_norm.ranks(x, tokens))
    scores = frozen.using(final_norm="own", bias=False).logits(x)
    by_logits = 1 + (scores > scores.gather(1, tokens[:, None])).sum(1)
    assert torch.equal(frozen.ranks(x, tokens), by_logits)


def test_only_planted_directions_stand_out():
    """A token's own column stands out at any scale; random directions hardly ever do."""
    W_U = torch.randn(48, 900, generator=torch.Generator().manual_seed(3))
    readout = Readout(
        W_U,
        b_U=None,
        gain=None,
        shift=None,
        scale=torch.ones(1),
        eps=0.0,
        center=True,
        decode=lambda token: f"t{token}",
    )
    planted = W_U[:, [5, 77, 640]].T
    random = torch.randn(400, 48, generator=torch.Generator().manual_seed(4))
    vectors, tokens = torch.cat([planted, 100 * random, torch.zeros(1, 48)]), torch.full((404,), -1)
    tokens[:4] = torch.tensor([5, 640, 640, 0])
    descriptions = readout.describe(vectors, tokens, k=2)
    assert [names[0] for names in descriptions.tokens[:3]] == ["t5", "t77", "t640"]
    assert descriptions.tokens == readout.top_tokens(vectors, 2)
    assert torch.equal(descriptions.ranks[:4], readout.ranks(vectors[:4], tokens[:4]))
    assert descriptions.ranks[4:].tolist() == [0] * 400
    assert (descriptions.standouts[:3] > 3 * MIN_STANDOUT).all()
    assert 0.005 < (descriptions.standouts[3:-1] > MIN_STANDOUT).double().mean() < 0.09
    assert descriptions.standouts[3:-1].mean().abs() < 0.5
    assert descriptions.standouts[-1] < -MIN_STANDOUT
    assert_close(readout.describe(0.01 * vectors, tokens).standouts, descriptions.standouts)
    # A token that is not shown cannot make a vector stand out.
    hidden = readout.describe(
        planted, tokens[:3], keep=lambda name: name not in ("t5", "t77", "t640")
    )
    assert (hidden.standouts < descriptions.standouts[:3] - MIN_STANDOUT).all()
    assert all("t5" not in names for names in hidden.tokens)


@pytest.mark.parametrize(
    ("token", "keep"),
    [(" foo", True), ("▁love", True), (" the", False), ("1", False), (" :", False), ("a", False)],
)
def test_function_words_digits_and_signs_are_no_content_words(token, keep):
    assert is_content_word(token) is keep
