"""Map residual-stream vectors to logits through the final norm and the unembedding."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_at_least, check_choice
from icl_lens.models.content_words import is_content_word
from icl_lens.models.passes.memory import LOGIT_BYTES
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS
from icl_lens.result.view import View, table_view

FinalNorm = Literal["frozen", "own"]
Keep = Callable[[str], bool] | Literal["words"] | None
"""Which tokens are shown: words of at least two letters that are not stop words, or those a
function accepts.
"""

N_RANDOM_VECTORS = 64
"""Number of random directions that `Readout.describe` compares vectors with."""
MIN_STANDOUT = 2.0
"""Standout (see `Readout.describe`) below which words are shown in gray; about 1 in 20 random
directions exceeds it.
"""


@dataclass(frozen=True)
class Readout:
    """The map from a residual-stream vector to logits, with explicit conventions.

    `logits(y) = soft_cap(logit_scale · norm(y) @ W_U + b_U)`. With `final_norm="frozen"`, the
    norm's scale is that of each prompt's final residual, so that the logits of parts add up; with
    `"own"`, it is computed for each vector (the standard logit lens). `bias=False` omits the final
    norm's shift and b_U, as the paper's GPT-2 code does.

    In methods that use the norm's scale, the FIRST axis of the vectors must be the prompt, because
    the frozen scale belongs to a prompt. Source: docs/howto/numbers.md.

    Example:
        >>> acts.readout.final_norm, acts.readout.bias
        ('frozen', True)
        >>> own = acts.readout.using(final_norm="own", bias=False)
        >>> own.token_log_probs(acts.resid_pre, targets).shape
        torch.Size([1, 8])
    """

    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"] | None
    gain: Float[Tensor, " d_model"] | None
    """The final norm's weight; None if it has none."""
    shift: Float[Tensor, " d_model"] | None
    """The final norm's bias; None if it has none."""
    scale: Float[Tensor, " batch"]
    """What the norm multiplies each prompt's final residual by: 1 / its standard deviation or root
    mean square.
    """
    eps: float
    center: bool
    """Whether the norm subtracts the mean (LayerNorm)."""
    normalize: bool = True
    """Whether the norm scales at all."""
    logit_scale: float = 1.0
    soft_cap: float | None = None
    decode: Callable[[int], str] | None = None
    """Token id -> string; None without a tokenizer."""
    final_norm: FinalNorm = "frozen"
    bias: bool = True

    def using(self, *, final_norm: FinalNorm, bias: bool) -> "Readout":
        """Return the readout with another convention; raise InputError for an unknown
        `final_norm`.
        """
        check_choice("final_norm", final_norm, ("frozen", "own"))
        return replace(self, final_norm=final_norm, bias=bias)

    def select_prompts(self, index: Any) -> "Readout":
        """Return the readout for the selected prompts."""
        return replace(self, scale=self.scale[index])

    @property
    def dtype(self) -> torch.dtype:
        """float64 for float64 models, else float32 (also for half precision)."""
        return self.scale.dtype

    @property
    def is_affine(self) -> bool:
        """Whether logits are affine in the vector, as the bounds of `icl_lens.reading.search`
        require.
        """
        return self.soft_cap is None and (self.final_norm == "frozen" or not self.normalize)

    def norm(self, x: Float[Tensor, "batch *rest d_model"]) -> Float[Tensor, "batch *rest d_model"]:
        """Apply the final norm to `x`, with its shift if `bias`."""
        y = self._linear(x, self._scale(x))
        return y if self.shift is None or not self.bias else y + self.shift

    def _linear(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Apply the linear part of the norm: centering, scale, gain."""
        x = x.to(self.dtype)
        if self.center:
            x = x - x.mean(-1, keepdim=True)
        if scale is not None:
            x = x * scale
        return x if self.gain is None else x * self.gain

    def _scale(self, x: Tensor) -> Tensor | None:
        if not self.normalize:
            return None
        if self.final_norm == "own":
            return norm_scale(x.to(self.dtype), eps=self.eps, center=self.center)[..., None]
        return self.scale.reshape(-1, *[1] * (x.ndim - 1))

    def logits(
        self, x: Float[Tensor, "batch *rest d_model"]
    ) -> Float[Tensor, "batch *rest d_vocab"]:
        """Return logits of the full vocabulary, `[..., d_vocab]`; for many vectors use
        `token_log_probs`.
        """
        logits = self._unembed(self.norm(x))
        if self.bias and self.b_U is not None:
            logits = logits + self.b_U
        return self._cap(logits)

    def unembed(self, y: Float[Tensor, "*rest d_model"]) -> Float[Tensor, "*rest d_vocab"]:
        """Return the model's logits of vectors to which its final norm was applied."""
        logits = self._unembed(y.to(self.dtype))
        return self._cap(logits if self.b_U is None else logits + self.b_U)

    def select_tokens(self, tokens: Int[Tensor, " token"]) -> "Readout":
        """Return the readout whose vocabulary consists of some tokens, in their order."""
        b_U = None if self.b_U is None else self.b_U[tokens]
        return replace(self, W_U=self.W_U[:, tokens].contiguous(), b_U=b_U)

    def _cap(self, logits: Tensor) -> Tensor:
        return (
            logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        )

    def log_probs(
        self, x: Float[Tensor, "batch *rest d_model"]
    ) -> Float[Tensor, "batch *rest d_vocab"]:
        """Return log-probabilities of the full vocabulary, nats."""
        return torch.log_softmax(self.logits(x), dim=-1)

    def token_log_probs(
        self,
        x: Float[Tensor, "batch n d_model"],
        tokens: Int[Tensor, " batch"],
        *,
        against: Int[Tensor, "batch other"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """Return the log-probability of each prompt's token, for `n` vectors per prompt, nats.

        With `against`, padded with -1, return log p(token) − log Σ p(against): the softmax's
        normalizer cancels, so only the columns of W_U for these tokens are read. Vectors are
        processed in pieces, so `[batch, n, d_vocab]` is never stored.
        """
        batch, n, _ = x.shape
        out = x.new_empty((batch, n), dtype=self.dtype)
        if against is not None:
            for rows, vectors in self.contrast_pieces(batch, n, against.shape[1]):
                relative_logits = self.select_prompts(rows).relative_logits(
                    x[rows, vectors], tokens[rows], against[rows]
                )
                out[rows, vectors] = -torch.logsumexp(relative_logits, dim=-1)
            return out
        for rows, vectors in self.pieces(batch, n):
            logits = self.select_prompts(rows).logits(x[rows, vectors])
            logits -= logits.amax(-1, keepdim=True)
            token_index = tokens[rows, None, None].expand(-1, logits.shape[1], 1)
            target = logits.gather(-1, token_index)[..., 0]
            normalizer = logits.exp_().sum(-1).log()  # in place: half the time and memory
            out[rows, vectors] = target - normalizer
            del logits  # before the next piece is computed
        return out

    def pieces(self, batch: int, n: int) -> Iterator[tuple[slice, slice]]:
        """Split `[batch, n]` vectors into pieces whose logits fit in `LOGIT_BYTES`."""
        size = max(1, LOGIT_BYTES // (self.W_U.shape[1] * self.scale.element_size()))
        if n <= size:
            step = max(1, size // n)
            for start in range(0, batch, step):
                yield slice(start, min(start + step, batch)), slice(0, n)
        else:
            for row in range(batch):
                for start in range(0, n, size):
                    yield slice(row, row + 1), slice(start, min(start + size, n))

    def contrast_pieces(self, batch: int, n: int, n_against: int) -> Iterator[tuple[slice, slice]]:
        """Split `[batch, n]` vectors into pieces that, with their `relative_logits`, fit in
        `LOGIT_BYTES`.
        """
        width = self.W_U.shape[0] + n_against
        size = max(1, LOGIT_BYTES // (width * self.scale.element_size()))
        n_rows, n_vectors = max(1, size // max(n, n_against + 1)), max(1, min(n, size))
        for row in range(0, batch, n_rows):
            for start in range(0, n, n_vectors):
                yield slice(row, min(row + n_rows, batch)), slice(start, min(start + n_vectors, n))

    def relative_logits(
        self,
        x: Float[Tensor, "batch n d_model"],
        tokens: Int[Tensor, " batch"],
        against: Int[Tensor, "batch other"],
    ) -> Float[Tensor, "batch n other"]:
        """Return the logits of the tokens in `against` minus that of each prompt's token; -inf
        where `against` is -1.

        Their negative logsumexp is log p(token) − log Σ p(against).
        """
        y = self.norm(x)
        missing = (against < 0)[:, None]
        if self.soft_cap is None:
            relative = y @ self.relative_columns(tokens, against).mT * self.logit_scale
            if self.bias and self.b_U is not None:
                b_U = self.b_U.to(self.dtype)
                relative = relative + (b_U[against.clamp(min=0)] - b_U[tokens][:, None])[:, None]
            return relative.masked_fill(missing, -torch.inf)
        scored = torch.cat([tokens[:, None], against.clamp(min=0)], dim=1)
        logits = y @ self.token_columns(scored).mT * self.logit_scale
        if self.bias and self.b_U is not None:
            logits = logits + self.b_U.to(self.dtype)[scored][:, None]
        logits = self._cap(logits)
        return (logits[..., 1:] - logits[..., :1]).masked_fill(missing, -torch.inf)

    def relative_columns(
        self, tokens: Int[Tensor, " batch"], against: Int[Tensor, "batch other"]
    ) -> Float[Tensor, "batch other d_model"]:
        """Return W_U's columns of the `against` tokens minus that of each prompt's token; zero for
        -1.
        """
        columns = self.token_columns(against.clamp(min=0)) - self.token_columns(tokens)[:, None]
        return columns.masked_fill((against < 0)[..., None], 0.0)

    def contrast_direction(
        self, tokens: Int[Tensor, " batch"], against: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch d_model"]:
        """Return `g` such that `u · g` is what u adds to log p(token) − log p(against), nats.

        It is the same at any layer.

        Raise InputError unless logits are affine (`is_affine`). Source: docs/howto/numbers.md.
        """
        return self.direction(-self.relative_columns(tokens, against[:, None])[:, 0])

    def _unembed(self, y: Tensor) -> Tensor:
        """Return `y @ W_U * logit_scale`, upcasting a half-precision W_U in slices."""
        y = y if self.logit_scale == 1.0 else y * self.logit_scale
        if self.W_U.dtype == y.dtype:
            # Flatten to one matrix: a permuted stack would be multiplied matrix by matrix, at half
            # the speed.
            return (
                (y.reshape(-1, y.shape[-1]) @ self.W_U).unflatten(0, y.shape[:-1])
                if y.ndim > 1
                else y @ self.W_U
            )
        d_model, d_vocab = self.W_U.shape
        out = y.new_empty((*y.shape[:-1], d_vocab))
        step = max(1, LOGIT_BYTES // (2 * d_model * y.element_size()))
        for start in range(0, d_vocab, step):
            out[..., start : start + step] = y @ self.W_U[:, start : start + step].to(y.dtype)
        return out

    def pull_back(
        self, weights: Float[Tensor, "batch *rest d_vocab"]
    ) -> Float[Tensor, "batch *rest d_model"]:
        """Return `g` with `u · g = Σ_j weights_j b_j(u)`, where b_j(u) is what part u adds to the
        logit of token j.

        Raise InputError unless logits are affine (`is_affine`). Source: docs/howto/numbers.md.
        """
        self._check_affine()
        if self.W_U.dtype == weights.dtype:
            g = weights @ self.W_U.T
        else:
            d_model, d_vocab = self.W_U.shape
            g = weights.new_zeros((*weights.shape[:-1], d_model))
            step = max(1, LOGIT_BYTES // (2 * d_model * weights.element_size()))
            for start in range(0, d_vocab, step):
                part = weights[..., start : start + step]
                g += part @ self.W_U[:, start : start + step].to(weights.dtype).T
        return self.direction(g)

    def direction(
        self, columns: Float[Tensor, "batch *rest d_model"]
    ) -> Float[Tensor, "batch *rest d_model"]:
        """Return `g` such that `u · g` is what adding u to x adds to `logit_scale · norm(x) ·
        columns`.
        """
        self._check_affine()
        g = columns * self.logit_scale
        if self.gain is not None:
            g = g * self.gain
        if self.normalize:
            g = g * self.scale.reshape(-1, *[1] * (g.ndim - 1))
        return g - g.mean(-1, keepdim=True) if self.center else g

    def _check_affine(self) -> None:
        if not self.is_affine:
            raise InputError(
                "readout must be affine for a pull-back, got own norm or logit soft-cap; use "
                "final_norm='frozen'"
            )

    def token_columns(self, tokens: Int[Tensor, "*rest"]) -> Float[Tensor, "*rest d_model"]:
        """Return W_U's columns of the tokens."""
        # Convert each column once, since prompts often share labels; `index_select` would copy all
        # of a transposed W_U.
        distinct, where = tokens.unique(return_inverse=True)
        return self.W_U.T[distinct].to(self.dtype)[where]

    def vocabulary_scores(
        self, vectors: Float[Tensor, "*rest d_model"], *, bias: bool = False
    ) -> Float[Tensor, "*rest d_vocab"]:
        """Return scores by which to rank tokens for directions in the residual stream.

        Each direction is centered if the final norm centers, then multiplied by the norm's gain and
        W_U. The norm's scale is omitted: it does not change the order, so both `final_norm`
        conventions give the same ranking. By default, biases are omitted as well, since they do not
        belong to a part of the stream. Source: Dar et al. 2022, as used in the paper's section 3.2.
        """
        scores = self._unembed(self._linear(vectors, None))
        if not bias:
            return scores
        offset = 0.0 if self.b_U is None else self.b_U.to(self.dtype)
        return scores + offset + (0.0 if self.shift is None else self._unembed(self.shift))

    def top_tokens(
        self,
        vectors: Float[Tensor, "*rest d_model"],
        k: int = 10,
        *,
        bias: bool = False,
        keep: Keep = None,
    ) -> list[Any]:
        """Return the `k` top tokens of each vector as strings: nested lists shaped like `vectors`
        without d_model.

        `keep="words"` shows only words of at least two letters that are not stop words, and a
        function of token strings those for which it is true; the next tokens replace the rest. It
        filters only the 20 k tokens with the highest scores (at least 200), so fewer than `k` may
        be returned. Raise InputError for an invalid `k`, `keep` or shape, and if the model has no
        tokenizer.
        """
        check_at_least(1, k=k)
        if vectors.shape[-1:] != self.W_U.shape[:1]:
            raise InputError(
                f"vectors must have shape [… d_model={len(self.W_U)}], got {tuple(vectors.shape)}"
            )
        flat = vectors.reshape(-1, vectors.shape[-1])
        names: list[list[str]] = []
        for scores in self._score_pieces(flat, bias=bias):
            names += self._top_names(scores, [k] * len(scores), keep)[0]
            del scores  # before the next piece is computed
        shape = vectors.shape[:-1]
        return _nest(names, shape) if len(shape) else names[0]

    def describe(
        self,
        vectors: Float[Tensor, "n d_model"],
        tokens: Int[Tensor, " n"],
        *,
        k: int = 10,
        keep: Keep = None,
    ) -> "VectorDescriptions":
        """Return `top_tokens`, `ranks` of `tokens` (-1: no token) and standouts of vectors, from
        one product with W_U.

        A vector's peak is (highest score − mean score) / standard deviation of its scores over the
        vocabulary. Its standout is how many standard deviations its peak is above the mean peak of
        random directions. With `keep`, the highest score is that of the first token shown. Peaks do
        not depend on a vector's length, so all vectors are compared with the same random
        directions.
        """
        n = len(vectors)
        random = torch.randn(
            N_RANDOM_VECTORS, vectors.shape[-1], generator=torch.Generator().manual_seed(0)
        )
        directions = torch.cat([vectors.to(self.dtype), random.to(vectors.device, self.dtype)])
        names, peaks, ranks = list[list[str]](), list[Tensor](), list[Tensor]()
        for scores in self._score_pieces(directions):
            start = len(names)
            n_names = [k if start + i < n else 1 for i in range(len(scores))]
            top_names, highest = self._top_names(scores, n_names, keep)
            names += top_names
            mean = scores.mean(-1)
            spread = (scores.norm(dim=-1).square() / scores.shape[-1] - mean.square()).sqrt()
            peaks.append(((highest - mean) / spread).nan_to_num(0.0))
            ranks += [
                1 + (row > row[token]).sum() if token >= 0 else torch.tensor(0, device=row.device)
                for row, token in zip(
                    scores, tokens[start : start + len(scores)].tolist(), strict=False
                )
            ]
            del scores  # before the next piece is computed
        peak, random_peaks = torch.cat(peaks).split([n, N_RANDOM_VECTORS])
        return VectorDescriptions(
            names[:n], torch.stack(ranks), (peak - random_peaks.mean()) / random_peaks.std()
        )

    def _score_pieces(
        self, flat: Float[Tensor, "n d_model"], *, bias: bool = False
    ) -> Iterator[Tensor]:
        """Yield `vocabulary_scores` of some vectors at a time, within `LOGIT_BYTES`."""
        for piece in flat.split(
            max(1, LOGIT_BYTES // (self.W_U.shape[1] * self.scale.element_size()))
        ):
            yield self.vocabulary_scores(piece, bias=bias)

    def _top_names(
        self, scores: Float[Tensor, "n d_vocab"], k: list[int], keep: Keep
    ) -> tuple[list[list[str]], Float[Tensor, " n"]]:
        """Return each row's k top tokens that `keep` accepts, and the score of the first.

        Only the highest scores are searched, so there may be fewer tokens. If none is accepted, the
        score is the lowest one searched: an upper bound on the score of any accepted token.
        """
        if self.decode is None:
            raise InputError("model must have a tokenizer for token names; load it with one")
        if isinstance(keep, str):
            check_choice("keep", keep, ("words",))
            keep = is_content_word
        best = scores.topk(
            min(max(k) if keep is None else max(20 * max(k), 200), scores.shape[1]), dim=-1
        )
        names_of_rows: list[list[str]] = []
        first_places: list[int] = []
        for row, n_names in zip(best.indices.tolist(), k, strict=True):
            names = enumerate(map(self.decode, row))
            accepted = ((place, name) for place, name in names if keep is None or keep(name))
            top = list(islice(accepted, n_names))
            names_of_rows.append([name for _, name in top])
            first_places.append(top[0][0] if top else len(row) - 1)
        places = torch.tensor(first_places, device=scores.device)[:, None]
        return names_of_rows, best.values.gather(1, places)[:, 0]

    def ranks(
        self,
        vectors: Float[Tensor, "*rest d_model"],
        token_ids: Int[Tensor, "*rest"],
        *,
        bias: bool = False,
    ) -> Int[Tensor, "*rest"]:
        """Return the rank of a token in the full vocabulary for each vector; 1 is the top, and ties
        share a rank.

        `token_ids` has the shape of `vectors` without d_model (broadcast if smaller).
        """
        shape = vectors.shape[:-1]
        flat = vectors.reshape(-1, vectors.shape[-1])
        tokens = token_ids.to(flat.device).expand(shape).reshape(-1)
        ranks, start = torch.empty_like(tokens), 0
        for scores in self._score_pieces(flat, bias=bias):
            score = scores.gather(-1, tokens[start : start + len(scores), None])
            ranks[start : start + len(scores)] = 1 + (scores > score).sum(-1)
            start += len(scores)
            del scores  # before the next piece is computed
        return ranks.reshape(shape)


@dataclass(frozen=True, repr=False)
class VectorDescriptions(Displayed):
    """What `Readout.describe` finds for each vector: top tokens, the rank of a token (0 if not
    requested), standout.
    """

    tokens: list[list[str]]
    ranks: Int[Tensor, " n"]
    standouts: Float[Tensor, " n"]

    def to_frame(self) -> pd.DataFrame:
        """Return words (the top tokens), standout and rank: one row per vector."""
        words = [" ".join(words) for words in self.tokens]
        return pd.DataFrame(
            {"words": words, "standout": self.standouts.tolist(), "rank": self.ranks.tolist()}
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        columns: dict[str, list[object]] = {
            "top tokens": [" ".join(words) for words in self.tokens[:SHOWN_ROWS]],
            "rank": self.ranks[:SHOWN_ROWS].tolist(),
            "standout": list(map(signed, self.standouts[:SHOWN_ROWS].tolist())),
        }
        n_vectors = len(self.tokens)
        return table_view(f"VectorDescriptions({n_vectors} vectors)", columns, n_vectors)


def norm_scale(
    x: Float[Tensor, "*rest d_model"], *, eps: float, center: bool
) -> Float[Tensor, "*rest"]:
    """Return a norm's scale: 1 / sqrt(variance + eps) if `center` (LayerNorm), else 1 / sqrt(mean
    square + eps).
    """
    if center:
        x = x - x.mean(-1, keepdim=True)
    return torch.rsqrt(x.pow(2).mean(-1) + eps)


def _nest(names: list[list[str]], shape: torch.Size) -> list[Any]:
    nested: list[Any] = names
    for size in reversed(shape[1:]):
        nested = [nested[i : i + size] for i in range(0, len(nested), size)]
    return nested
