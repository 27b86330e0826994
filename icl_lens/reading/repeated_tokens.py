"""Scores of attention to random tokens shown twice, where words and meaning cannot help.

1. `repeated_sequences` draws the sequences, which begin as the model's prompts do.
2. `repeated_token_attention` reads each head's attention from the tokens of the second showing, in
   one pass, and returns a number per sequence.
3. `repeated_token_scores` returns the means of three of these scores.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_integers
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import RenderedPrompt
from icl_lens.prompts.token_alignment import require_fast_tokenizer, special_prefix, tokenize_texts
from icl_lens.reading.last_logits import last_logits
from icl_lens.result.base import Result
from icl_lens.result.tables import SHOWN_ROWS, columns_first, long_frame
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps

N_SEQUENCES = 40
N_TOKENS = 24


ATTENTION_SCORES = (
    "induction",
    "previous_token",
    "duplicate_token",
    "first_token",
    "entropy",
    "distance",
)
"""The scores of `repeated_token_attention`, in its order."""


@dataclass(frozen=True, repr=False)
class RepeatedTokenScores(Result):
    """How much each head attends, on repeated random tokens, to the token that came next before, to
    the last one, and to the same one.

    Example:
        >>> il.repeated_token_scores(model, n=8).to_frame().columns.tolist()
        ['name', 'induction', 'previous_token', 'duplicate_token', 'layer', 'head']
    """

    version: ClassVar[int] = 2
    induction: Float[Tensor, "layer head"]
    """Attention to the token that followed the current token's earlier occurrence, 0 to 1."""
    previous_token: Float[Tensor, "layer head"]
    """Attention to the token before, 0 to 1."""
    duplicate_token: Float[Tensor, "layer head"]
    """Attention to the current token's earlier occurrence, 0 to 1."""

    def to_frame(self) -> pd.DataFrame:
        """Return name, induction, previous_token, duplicate_token, layer and head: one row per
        head, largest induction score first.
        """
        frame = long_frame(self.induction, ("layer", "head"), value="induction")
        for name in ("previous_token", "duplicate_token"):
            frame[name] = getattr(self, name).float().flatten().numpy()
        frame = columns_first(frame, "name", "induction", "previous_token", "duplicate_token")
        return frame.sort_values("induction", ascending=False, kind="stable", ignore_index=True)

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        rows = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[object]] = {"head": rows["name"].tolist()}
        for name in ("induction", "previous_token", "duplicate_token"):
            columns[name.replace("_", " ")] = [f"{value:.3f}" for value in rows[name]]
        return table_view("RepeatedTokenScores, mean attention", columns, self.induction.numel())


def repeated_token_scores(
    model: Any,
    *,
    n: int = N_SEQUENCES,
    n_tokens: int = N_TOKENS,
    seed: int = 0,
    progress: bool | None = None,
) -> RepeatedTokenScores:
    """Return each head's induction, previous-token and duplicate-token scores.

    The scores are means over `n` sequences, which show `n_tokens` different random tokens twice,
    and over the tokens of the second showing. Attention spread evenly scores about 1 / (1.5 ·
    n_tokens). `il.head_atlas` has them with intervals, beside other scores. If this takes longer
    than two seconds, a terminal or notebook shows a progress bar, unless `progress` is False. Raise
    InputError for a slow tokenizer, `n` below 1, and `n_tokens` below two or above the vocabulary
    or half the context. Source: Olsson et al. (2022), Wang et al. (2022, duplicate tokens).

    Example:
        >>> scores = il.repeated_token_scores(model).induction
        >>> str(il.Head.from_index(int(scores.argmax()), 6)), round(float(scores.max()), 2)
        ('L4H0', 0.06)
    """
    with progress_switch(progress):
        attention = repeated_token_attention(model, n=n, n_tokens=n_tokens, seed=seed)
    return RepeatedTokenScores(*(attention[name].mean(0) for name in ATTENTION_SCORES[:3]))


def repeated_sequences(model: Any, *, n: int, n_tokens: int, seed: int) -> PromptBatch:
    """Return `n` sequences that show `n_tokens` different random tokens twice, after the tokens
    that begin every text.

    Raise InputError like `repeated_token_scores`.
    """
    prefix = prefix_tokens(model)
    if 2 * n_tokens + len(prefix) > model.cfg.n_ctx:
        raise InputError(
            f"n_tokens must be at most {(model.cfg.n_ctx - len(prefix)) // 2}, half the context, "
            f"got {n_tokens}"
        )
    rows = [[*prefix, *tokens, *tokens] for tokens in random_tokens(model, n, n_tokens, seed)]
    return PromptBatch.from_tokens(rows, model=model)


def repeated_token_attention(
    model: Any, *, n: int = N_SEQUENCES, n_tokens: int = N_TOKENS, seed: int = 0
) -> dict[str, Float[Tensor, "sequence layer head"]]:
    """Return the scores of `ATTENTION_SCORES`, means over the tokens of each sequence's second
    showing.

    The first four are attention, 0 to 1: to the token after the current token's earlier occurrence,
    to the token before, to the earlier occurrence, and to the first token of the sequence.
    `entropy` is that of the attention to all positions, nats, and `distance` the mean number of
    tokens back to the attended one. One forward pass.
    """
    batch = repeated_sequences(model, n=n, n_tokens=n_tokens, seed=seed)
    n_positions = batch.tokens.shape[1]
    queries = torch.arange(n_positions - n_tokens, n_positions)
    view, by_layer = ModelView.of(model), list[Tensor]()

    def keep(pattern: Tensor, hook: Any) -> None:
        of_heads: list[Tensor] = []
        for of_head in pattern.detach().split(1, dim=1):  # float64 takes twice the pattern's memory
            of_queries = of_head[:, :, queries].double().cpu()
            of_heads.append(attention_statistics(of_queries, queries, n_tokens))
        by_layer.append(torch.cat(of_heads, dim=1))

    hooks = [(view.hook(layer, "attn.hook_pattern"), keep) for layer in range(view.n_layers)]
    by_sequence = list[Tensor]()
    with steps("attention to repeated tokens", n) as advance:
        for sequences in batch.split(rows_at_once(view, n_positions)):
            by_layer.clear()
            last_logits(model, sequences, hooks)
            by_sequence.append(torch.stack(by_layer, dim=1))
            advance(len(sequences))
    return dict(zip(ATTENTION_SCORES, torch.cat(by_sequence).unbind(-1), strict=True))


def attention_statistics(
    attention: Float[Tensor, "sequence head query key"],
    queries: Int[Tensor, " query"],
    n_tokens: int,
) -> Float[Tensor, "sequence head score=6"]:
    """Return the means over queries of `ATTENTION_SCORES`.

    `queries` are the queries' positions, `n_tokens` after the same tokens.
    """
    keys = torch.stack([queries - n_tokens + 1, queries - 1, queries - n_tokens, 0 * queries])
    to_keys = attention[:, :, torch.arange(len(queries)), keys].mean(-1)
    entropy = torch.special.entr(attention).sum(-1).mean(-1)
    n_back = (queries[:, None] - torch.arange(attention.shape[-1])).to(attention)
    distance = (attention * n_back).sum(-1).mean(-1)
    return torch.cat([to_keys, entropy[..., None], distance[..., None]], dim=-1)


def random_tokens(model: Any, n: int, n_tokens: int, seed: int) -> list[list[int]]:
    """Return n rows of different tokens of the vocabulary, none of them special, in random
    order.
    """
    n, n_tokens, seed = check_integers(n=n, n_tokens=n_tokens, seed=seed)
    usable = usable_tokens(model)
    if n < 1 or not 2 <= n_tokens <= len(usable):
        raise InputError(
            f"n must be at least 1 and n_tokens between 2 and {len(usable)}, got n={n} and "
            f"n_tokens={n_tokens}"
        )
    rng = random.Random(seed)
    return [rng.sample(usable, n_tokens) for _ in range(n)]


def usable_tokens(model: Any) -> list[int]:
    """Return the tokens of the vocabulary that are not special."""
    special = {*getattr(model.tokenizer, "all_special_ids", ())}
    return [
        token
        for token in range(min(len(model.tokenizer), model.cfg.d_vocab))
        if token not in special
    ]


def prefix_tokens(model: Any) -> list[int]:
    """Return the tokens that the model's tokenizer puts before every text."""
    tokenizer = require_fast_tokenizer(model)
    words = (tokenizer.decode([token]).strip() for token in usable_tokens(model))
    word = next(word for word in words if word.isascii() and word.isalpha())
    (text,) = tokenize_texts(tokenizer, [RenderedPrompt(word, (), (), (0, len(word)))])
    return special_prefix(tokenizer, text, None)
