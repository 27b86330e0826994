"""What a head's metric makes of one prompt: of what is asked, and of what stands at each label."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.attribution.qk_metric import build_metric, identity_rotation, query_key_metric
from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@torch.no_grad()
def label_similarity(
    model: Any, batch: PromptBatch, heads: Sequence[Head | tuple[int, int] | str]
) -> Float[Tensor, "batch head query demo"]:
    """How alike heads find what is asked and what each label stands for: scores of queries with the labels' keys.

    Queries: where each demonstration's label is predicted (`batch.prediction_positions`), and the last. Keys: at the labels'
    last tokens. Position is left out as in `query_key_metric`, whose `scores` these are; so keys behind a query, which
    the model does not see, have one as well. In a head that compares texts by class, queries and keys of one label
    score higher. Zero where a prompt has fewer demonstrations, and where its first label has nothing before it. One
    forward pass; only the residual stream at these positions is kept.

    Raises InputError for unknown heads, an empty list of them, and prompts without demonstrations; HiddenAngles for a
    model that rotates queries and keys and does not show how.
    Source: the paper, section 5; docs/howto/numbers.md.

    Example:
        >>> il.label_similarity(model, batch, ["L2H0", "L4H0"]).shape
        torch.Size([1, 2, 5, 4])
    """
    view = ModelView.of(model)
    chosen = [view.check_head(head) for head in heads]
    if not chosen:
        raise InputError("heads is empty; name the heads whose scores you want, as in heads=['L3H1']")
    batch.require_labels("label position to read", "il.query_key_metric(model, head).scores compares any two inputs")
    labels, last = batch.label_positions, batch.last[:, None]
    before = batch.prediction_positions
    if before is None:
        raise InputError("the batch does not say where its labels are predicted; make it with il.tokenize")
    positions = torch.cat([before, last, labels], dim=1)
    seen: dict[str, Tensor] = {}  # by the name asked for: bridges know hooks by several

    def at_positions(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: Any) -> None:
            rows = torch.arange(len(value), device=value.device)[:, None]
            seen[name] = value.detach()[rows, positions.clamp(min=0).to(value.device)].to(view.unembed_device)

        return keep

    def first(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: Any) -> None:
            seen[name] = value.detach()[0, 0]

        return keep

    layers = {head.layer: view.hook(head.layer, "hook_resid_pre") for head in chosen}
    rotating = [layer for layer in layers if attention_scores.attention_scoring(view, layer).position == "rotary"]
    angles = {layer: attention_scores.rotation_hooks(view, layer) for layer in rotating}
    for layer in (layer for layer, names in angles.items() if names is None):
        attention_scores.rotation_table(view, layer, torch.zeros(1, 1, dtype=torch.long))  # raises before the pass
    hooks = [(name, at_positions(name)) for name in layers.values()]
    hooks += [(name, first(name)) for names in angles.values() for name in names or ()]
    with view.model.hooks(fwd_hooks=hooks):
        last_log_probs(model, batch)

    found = []
    for head in chosen:
        names = angles.get(head.layer)
        metric = (
            query_key_metric(view, head)
            if names is None
            else build_metric(view, head, None, identity_rotation(*(seen[name] for name in names)))
        )
        queries, keys = seen[layers[head.layer]].split([labels.shape[1] + 1, labels.shape[1]], 1)
        found.append(metric.scores(queries, keys))
    known = (positions >= 0).to(view.unembed_device)
    there = known[:, : labels.shape[1] + 1, None] & known[:, None, labels.shape[1] + 1 :]
    return torch.stack(found, dim=1).masked_fill(~there[:, None], 0)
