"""A head's query-key metric applied to prompts: similarity of the query to each label position."""

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
    """Return the similarity scores of heads between the queries of a prompt and the keys of its labels.

    Queries: the positions where labels are predicted (`batch.prediction_positions`), and the last position. Keys: the
    labels' last tokens. The scores are `query_key_metric(...).scores` without position, so keys after a query, which
    the model masks, have scores too. In a head that compares texts by class, queries and keys of the same label score
    higher. Zero where a prompt has fewer demonstrations, and where nothing precedes its first label. One forward pass;
    only the residual stream at these positions is kept.

    Raise InputError for unknown heads, an empty list of heads, and prompts without demonstrations, and
    RotaryAnglesUnavailable for a rotary model that does not expose its angles.
    Source: the paper, section 5; docs/howto/numbers.md.

    Example:
        >>> il.label_similarity(model, batch, ["L2H0", "L4H0"]).shape
        torch.Size([1, 2, 5, 4])
    """
    view = ModelView.of(model)
    chosen = [view.check_head(head) for head in heads]
    if not chosen:
        raise InputError("heads must name at least one head, got none; e.g. ['L3H1']")
    batch.require_labels("label position to read", "use il.query_key_metric(model, head).scores on any two inputs")
    labels, last = batch.label_positions, batch.last[:, None]
    before = batch.prediction_positions
    if before is None:
        raise InputError("batch must have prediction_positions, got None; create it with il.tokenize")
    positions = torch.cat([before, last, labels], dim=1)
    seen: dict[str, Tensor] = {}  # keyed by the requested name: a bridge's hooks have several names

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
        attention_scores.rotation_table(view, layer, torch.zeros(1, 1, dtype=torch.long))  # raise before the pass
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
