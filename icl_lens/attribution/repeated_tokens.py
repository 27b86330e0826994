"""Induction and previous-token scores: attention to random tokens shown twice, where words and
meaning cannot help.
"""

import random
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.passes import last_logits
from icl_lens.errors import InputError, check_integers
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import RenderedPrompt
from icl_lens.prompts.token_alignment import require_fast_tokenizer, special_prefix, tokenize_texts
from icl_lens.result.base import Result
from icl_lens.result.tables import SHOWN_ROWS, columns_first, long_frame
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps

N_SEQUENCES = 40
N_TOKENS = 24


@dataclass(frozen=True, repr=False)
class RepeatedTokenScores(Result):
    """How much each head attends, on repeated random tokens, to the token that came next before and
    to the last one.

    Example:
        >>> il.repeated_token_scores(model, n=8).to_frame().columns.tolist()
        ['name', 'induction', 'previous_token', 'layer', 'head']
    """

    induction: Float[Tensor, "layer head"]
    """Attention to the token that followed the current token's earlier occurrence, 0 to 1."""
    previous_token: Float[Tensor, "layer head"]
    """Attention to the token before, 0 to 1."""

    def to_frame(self) -> pd.DataFrame:
        """Return name, induction, previous_token, layer and head: one row per head, largest
        induction score first.
        """
        frame = long_frame(self.induction, ("layer", "head"), value="induction")
        frame["previous_token"] = self.previous_token.float().flatten().numpy()
        frame = columns_first(frame, "name", "induction", "previous_token")
        return frame.sort_values("induction", ascending=False, kind="stable", ignore_index=True)

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        rows = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[object]] = {"head": rows["name"].tolist()}
        for name in ("induction", "previous_token"):
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
    """Return each head's induction and previous-token scores.

    The scores are means over `n` sequences, which show `n_tokens` different random tokens twice,
    and over the tokens of the second showing. Attention spread evenly scores about 1 / (1.5 ·
    n_tokens). If this takes longer than two seconds, a terminal or notebook shows a progress bar,
    unless `progress` is False. Raise InputError for a slow tokenizer, `n` below 1, and `n_tokens`
    below two or above the vocabulary or half the context. Source: Olsson et al. (2022).

    Example:
        >>> scores = il.repeated_token_scores(model).induction
        >>> str(il.Head.from_index(int(scores.argmax()), 6)), round(float(scores.max()), 2)
        ('L4H0', 0.06)
    """
    prefix = prefix_tokens(model)
    if 2 * n_tokens + len(prefix) > model.cfg.n_ctx:
        raise InputError(
            f"n_tokens must be at most {(model.cfg.n_ctx - len(prefix)) // 2}, half the context, "
            f"got {n_tokens}"
        )
    rows = [[*prefix, *tokens, *tokens] for tokens in random_tokens(model, n, n_tokens, seed)]
    second = range(len(rows[0]) - n_tokens, len(rows[0]))
    queries = torch.tensor(second)
    view, attended = ModelView.of(model), list[Tensor]()

    def keep(pattern: Tensor, hook: Any) -> None:
        keys = torch.stack([queries - n_tokens + 1, queries - 1])
        of_queries = pattern[:, :, queries, keys]  # sequence head score query
        attended.append(of_queries.double().mean(-1).cpu())

    hooks = [(view.hook(layer, "attn.hook_pattern"), keep) for layer in range(view.n_layers)]
    batch, by_sequence = PromptBatch.from_tokens(rows, model=model), list[Tensor]()
    with progress_switch(progress), steps("attention to repeated tokens", n) as advance:
        for sequences in batch.split(rows_at_once(view, len(rows[0]))):
            attended.clear()
            last_logits(model, sequences, hooks)
            by_sequence.append(torch.stack(attended, dim=1))
            advance(len(sequences))
    return RepeatedTokenScores(*torch.cat(by_sequence).mean(0).unbind(-1))


def random_tokens(model: Any, n: int, n_tokens: int, seed: int) -> list[list[int]]:
    """Return n rows of different tokens of the vocabulary, none of them special, in random
    order.
    """
    n, n_tokens, seed = check_integers(n=n, n_tokens=n_tokens, seed=seed)
    usable = _usable_tokens(model)
    if n < 1 or not 2 <= n_tokens <= len(usable):
        raise InputError(
            f"n must be at least 1 and n_tokens between 2 and {len(usable)}, got n={n} and "
            f"n_tokens={n_tokens}"
        )
    rng = random.Random(seed)
    return [rng.sample(usable, n_tokens) for _ in range(n)]


def _usable_tokens(model: Any) -> list[int]:
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
    words = (tokenizer.decode([token]).strip() for token in _usable_tokens(model))
    word = next(word for word in words if word.isascii() and word.isalpha())
    (text,) = tokenize_texts(tokenizer, [RenderedPrompt(word, (), (), (0, len(word)))])
    return special_prefix(tokenizer, text, None)
