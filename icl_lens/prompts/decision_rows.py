"""Rows and columns of a batch whose labels begin alike (see `Decisions`)."""

from dataclasses import replace

import torch

from icl_lens.prompts.batch import PromptBatch


def with_own_labels(batch: PromptBatch) -> PromptBatch:
    """Return the batch with only the `labels` that its prompts choose between or show."""
    demonstrated = batch.label_index[batch.label_index >= 0].unique()
    used = batch.label_mask.any(0).index_fill(0, demonstrated, True).nonzero()[:, 0]
    if len(used) == len(batch.labels):
        return batch
    # New index of each label; the last entry stands for no label (-1).
    new_index = torch.full((len(batch.labels) + 1,), -1, device=used.device)
    new_index[used] = torch.arange(len(used), device=used.device)
    groups = tuple(batch.decisions.groups[label] for label in used.tolist())
    return replace(
        batch,
        labels=tuple(batch.labels[label] for label in used.tolist()),
        decisions=replace(batch.decisions, groups=groups),
        label_tokens=batch.label_tokens[used],
        label_mask=batch.label_mask[:, used],
        label_index=new_index[batch.label_index],
        answer=new_index[batch.answer],
    )


def first_decisions(batch: PromptBatch) -> PromptBatch:
    """Return one row per prompt, the one that ends with the prompt."""
    prompt_index = batch.decisions.prompt_index
    if prompt_index is None:
        return batch
    before = torch.cat([prompt_index.new_full((1,), -1), prompt_index[:-1]])
    first_rows = batch[prompt_index != before]
    return replace(first_rows, decisions=replace(first_rows.decisions, prompt_index=None))
