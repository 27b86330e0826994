"""A `PromptBatch` as tensors and JSON values, in which files store it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from icl_lens.foundation.shapes import check_shapes
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.decisions import Decisions
from icl_lens.prompts.prompt import Demonstration, Prompt, Template

VALUES = ("labels", "token_strings", "token_names", "texts", "vocabulary", "prepend_bos")
"""Fields that JSON stores as they are."""


def batch_state(batch: PromptBatch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a batch as tensors and JSON-serializable values, from which `batch_from_state`
    restores it.
    """
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    values = {name: getattr(batch, name) for name in VALUES}
    decisions = batch.decisions
    tensors["n_appended"] = decisions.n_appended
    if decisions.prompt_index is not None:
        tensors["decision_index"] = decisions.prompt_index
    values["whole_labels"], values["label_groups"] = decisions.whole_labels, decisions.groups
    values["template"] = asdict(batch.template)
    values["prompts"] = []
    for prompt in batch.prompts:
        pairs = [[shot.text, shot.label] for shot in prompt.demonstrations]
        values["prompts"].append([pairs, prompt.query, prompt.answer, prompt.labels])
    return tensors, values


def batch_from_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> PromptBatch:
    """Restore a batch from what `batch_state` returned.

    Raise InputError, KeyError, TypeError or ValueError for values that are not those of a batch.
    """
    prompts = []
    for pairs, query, answer, labels in values["prompts"]:
        demonstrations = [Demonstration(*pair) for pair in pairs]
        prompts.append(Prompt(demonstrations, query, answer, labels))
    fields = dict(tensors)
    decisions = _decisions(fields, values)
    check_shapes(PromptBatch, fields)
    prepend_bos = values.get("prepend_bos")
    if not (prepend_bos is None or isinstance(prepend_bos, bool)):
        raise ValueError("prepend_bos is neither true, false nor null")
    vocabulary = values.get("vocabulary", "")
    if not isinstance(vocabulary, str):
        raise ValueError("its vocabulary is no text")
    batch = PromptBatch(
        **fields,
        decisions=decisions,
        labels=_texts(values["labels"]),
        prompts=tuple(prompts),
        template=Template(**values["template"]),
        token_strings=list(map(list, map(_texts, values["token_strings"]))),
        token_names=list(map(list, map(_texts, values["token_names"]))),
        texts=_texts(values["texts"]),
        vocabulary=vocabulary,
        prepend_bos=prepend_bos,
    )
    _check_lengths(batch)
    _check_ranges(batch)
    return batch


def _decisions(tensors: dict[str, Tensor], values: dict[str, Any]) -> Decisions:
    """Take the tensors of a batch's decisions out of all of its tensors; return its decisions.

    Files of texts without demonstrations may lack `n_appended`.
    """
    n_rows = len(tensors["last"])
    no_labels = Decisions.without_labels(n_rows)
    of_decisions: dict[str, Any] = {
        "n_appended": tensors.pop("n_appended", no_labels.n_appended.to(tensors["last"].device)),
        "prompt_index": tensors.pop("decision_index", None),
    }
    check_shapes(Decisions, of_decisions, {"batch": n_rows})
    whole_labels = _texts(values.get("whole_labels", ()))
    groups = tuple(map(_texts, values.get("label_groups", ())))
    return Decisions(whole_labels, groups, **of_decisions)


def _check_lengths(batch: PromptBatch) -> None:
    """Raise ValueError for lists of another length than the batch."""
    n_rows, n_labels = len(batch), len(batch.labels)
    if n_rows < 1:
        raise ValueError("it has no rows")
    for name in ("prompts", "texts", "token_strings", "token_names"):
        n_entries = len(getattr(batch, name))
        may_be_empty = name in ("prompts", "texts")
        if n_entries != n_rows and not (may_be_empty and n_entries == 0):
            raise ValueError(f"{name} has {n_entries} entries for {n_rows} rows")
    if len(batch.label_tokens) != n_labels:
        raise ValueError(
            f"label_tokens has {len(batch.label_tokens)} entries for {n_labels} labels"
        )


def _check_ranges(batch: PromptBatch) -> None:
    """Raise ValueError for positions and indices out of range."""
    width, n_labels = batch.tokens.shape[1], len(batch.labels)
    limits = {
        "last": (0, width),
        "attention_mask": (0, 2),
        "label_positions": (-1, width),
        "label_ranges": (-1, width + 1),
        "text_ranges": (-1, width + 1),
        "demonstration_ranges": (-1, width + 1),
        "query_range": (-1, width + 1),
        "label_index": (-1, n_labels),
        "answer": (-1, n_labels),
    }
    for name, (low, end) in limits.items():
        values = getattr(batch, name)
        if not bool(((values >= low) & (values < end)).all()):
            raise ValueError(f"{name} must be at least {low} and below {end}")


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    """Return texts of a file; raise TypeError for anything else."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{values!r:.80} is not a list of texts")
    return tuple(values)
