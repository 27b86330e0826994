"""Continue prompts under edits, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from icl_lens.edits.edit import EditAtLayers
from icl_lens.edits.score import Sets, check_sets, prepare_sets
from icl_lens.edits.whole_passes import editing
from icl_lens.errors import InputError, check_integers, short_repr
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.freed_memory import make_room
from icl_lens.models.passes.locking import reserves_model
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.result.base import Result
from icl_lens.result.tables import SHOWN_ROWS, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps


@dataclass(frozen=True, repr=False)
class Generations(Result):
    """How a model continues prompts under each set of edits.

    Example:
        >>> generations = il.generate(model, batch, [[], [il.Ablate(["L5H0"])]], max_new_tokens=2)
        >>> generations.to_frame().columns.tolist()
        ['prompt', 'no edits', 'L5H0 zeroed']
    """

    texts: tuple[tuple[str, ...], ...]
    """[set prompt] what follows each prompt, up to the end of text or a stop."""
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    """[set prompt] the generated token ids, all of them."""
    sets: tuple[str, ...]
    """Each set of edits in words; the names are unique."""
    prompts: tuple[str, ...]
    """The end of each prompt: its query, or its text."""
    edits: tuple[str, ...] = ()
    """What else edited the model throughout: open `with` blocks, and other hooks."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per prompt: its end, and its continuation under each set of edits."""
        return pd.DataFrame(
            {"prompt": self.prompts, **dict(zip(self.sets, self.texts, strict=True))}
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        table = self.to_frame()
        columns: dict[str, list[str]] = {}
        for name in table:
            columns[str(name)] = [repr(text)[1:-1] for text in table[name][:SHOWN_ROWS]]
        title = f"Generations: {plural_prompts(len(table))} continued{edits_suffix(self.edits)}"
        return table_view(title, columns, len(table))


@reserves_model
def generate(
    model: Any,
    batch: PromptBatch,
    sets: Sets = ((),),
    *,
    max_new_tokens: int = 10,
    stop: str | Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Generations:
    """Continue each prompt under each set of edits, as a loop of passes over whole texts does.

    `sets` are those of `score`; the empty set is the model without edits of its own. Edits of the
    last position act at the last token of every pass, those that belong to the prompts
    (`AddVector`, `Reweight`, `Block`) where the prompts have them. A KV cache is used if it does
    not change the result. `temperature=0` takes the most probable token; otherwise tokens are
    drawn, with the same seed for each prompt under every set. `stop` are texts before which a
    continuation ends, such as the template's separator; the model's end of text always ends it.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False.

    Raise InputError for invalid edits or options, texts that get longer than the model's context,
    and edits that hold for the prompt's length only (`Patch(positions="all")`).

    Example:
        >>> sets = [[], [il.Ablate(["L5H0"])]]
        >>> generations = il.generate(model, batch, sets, max_new_tokens=3, stop="love")
        >>> len(generations.texts), generations.sets
        (2, ('no edits', 'L5H0 zeroed'))
    """
    view = ModelView.of(model)
    check_batch(batch)
    max_new_tokens, seed = check_integers(max_new_tokens=max_new_tokens, seed=seed)
    stops = [stop] if isinstance(stop, str) else list(stop)
    _check_length(model, batch, max_new_tokens)
    top_k = _checked_sampling(temperature, top_k, top_p)
    if not all(stops):
        raise InputError("stop must not be an empty text; omit it")
    options = {
        "max_new_tokens": max_new_tokens,
        "do_sample": temperature > 0,
        "temperature": temperature or 1.0,
        "top_k": top_k,
        "top_p": top_p,
        "stop_at_eos": model.tokenizer.eos_token_id is not None,
        "return_type": "tokens",
        "verbose": False,
    }
    prepared_sets = prepare_sets(view, check_sets(sets), batch)
    tokens = []
    with progress_switch(progress), steps("generating", len(prepared_sets) * len(batch)) as advance:
        for edits in prepared_sets:
            tokens.append(_continued(view, batch, edits, options, seed, advance))
    texts = []
    for tokens_of_set in tokens:
        texts.append(tuple(_text(model.tokenizer, ids, stops) for ids in tokens_of_set))
    return Generations(
        texts=tuple(texts),
        tokens=tuple(tokens),
        sets=_unique_names(prepared_sets),
        prompts=batch.queries if batch.prompts else batch.texts,
        edits=active_edits(view),
    )


def _check_length(model: Any, batch: PromptBatch, max_new_tokens: int) -> None:
    """Raise InputError if the longest prompt and new tokens exceed the context, or none are new."""
    n_ctx = getattr(model.cfg, "n_ctx", None)
    limit = "any number"
    is_too_long = False
    if n_ctx is not None:
        limit = n_ctx - (int(batch.last.max()) + 1)
        is_too_long = max_new_tokens > limit
    if max_new_tokens < 1 or is_too_long:
        raise InputError(
            f"max_new_tokens must be between 1 and {limit}, what is left of the model's context, "
            f"got {max_new_tokens}"
        )


def _checked_sampling(temperature: float, top_k: int | None, top_p: float | None) -> int | None:
    """Return `top_k` as an integer; raise InputError for invalid options of drawing."""
    if not temperature >= 0:
        raise InputError(
            f"temperature must be non-negative, got {short_repr(temperature)}; 0 takes the most "
            "probable token"
        )
    if top_k is not None:
        (top_k,) = check_integers(top_k=top_k)
    if (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise InputError(
            "top_k must be at least 1 and top_p above 0 and at most 1, got "
            f"{short_repr(top_k)} and {top_p!r}"
        )
    return top_k


def _continued(
    view: ModelView,
    batch: PromptBatch,
    edits: Sequence[EditAtLayers],
    options: dict[str, Any],
    seed: int,
    advance: Callable[[int], None],
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that follow each prompt under one set of edits."""
    is_cached = not view.has_hooks and all(edit_at.edit.supports_cache for edit_at in edits)
    continuations = []
    for row in range(len(batch)):
        prompt = batch[row].tokens
        edits_of_row = [edit_at.select([row]) for edit_at in edits]
        room = make_room(view, 1, prompt.shape[1])
        hooks = [*room, (view.last_logits_hook, _last_position)]
        # The lock comes first, or another thread's draws would move this thread's.
        with (
            editing(view, *edits_of_row),
            view.inference_pass(),
            view.model.hooks(fwd_hooks=hooks),
            torch.random.fork_rng(),
        ):
            torch.manual_seed(seed)
            tokens = view.model.generate(prompt, use_past_kv_cache=is_cached, **options)
        continuations.append(tuple(tokens[0, prompt.shape[1] :].tolist()))
        advance(1)
    return tuple(continuations)


def _last_position(x: Tensor, hook: Any) -> Tensor:
    """Select the last position, whose logits alone are read; all positions' take more memory."""
    return x[:, -1:]


def _unique_names(prepared_sets: Sequence[Sequence[EditAtLayers]]) -> tuple[str, ...]:
    """Return each set of edits in words; sets of the same words get their number."""
    names = []
    for edits in prepared_sets:
        names.append(", ".join(edit_at.description for edit_at in edits) or "no edits")
    unique_names = []
    for number, name in enumerate(names):
        unique_names.append(name if names.count(name) == 1 else f"{name} ({number})")
    return tuple(unique_names)


def _text(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> str:
    """Return the text of generated tokens up to the end of text or the first stop."""
    end_of_text = tokenizer.eos_token_id
    if end_of_text in ids:
        ids = ids[: ids.index(end_of_text)]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends, default=len(text))]
