"""Function vectors as their paper describes them, in plain Hugging Face passes with forward hooks.

1. A head's mean output: its part of the attention output, after W_O and without b_O, at the last
   token, averaged over prompts.
2. Its indirect effect on a prompt: how much p(answer) changes when the mean output replaces its own
   at the last token.
3. The function vector: the sum of the mean outputs of the heads with the largest average indirect
   effects.
4. Its effect: added to the residual stream after a layer, at the last token of prompts without
   demonstrations.

One unpadded prompt at a time; no code of the package. Source: Todd et al., arXiv 2310.15213,
section 2.
"""

import copy
import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import reference_hf
import torch
from torch import Tensor

Ids = Sequence[int]


def _layers(hf: Any) -> Any:
    return hf.get_submodule(reference_hf._WIRING[hf.config.model_type].layers)


def _projections(hf: Any) -> list[Any]:
    """Return each layer's attention output projection."""
    return [
        layer.get_submodule(reference_hf._WIRING[hf.config.model_type].out) for layer in _layers(hf)
    ]


def _weights(hf: Any) -> list[Tensor]:
    """Return each layer's W_O [head d_head d_model]."""
    weights = [reference_hf._weight_in_out(module) for module in _projections(hf)]
    return [
        weight.reshape(hf.config.num_attention_heads, -1, weight.shape[-1]) for weight in weights
    ]


def mean_outputs(hf: Any, prompts: Iterable[Ids]) -> Tensor:
    """Return the heads' mean outputs at the last token [layer head d_model]."""
    outputs = []
    for ids in prompts:
        z: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer, module in enumerate(_projections(hf)):
                hook = module.register_forward_pre_hook(
                    lambda _, x, layer=layer, z=z: z.update({layer: x[0][0, -1]})
                )
                stack.callback(hook.remove)
            _run(hf, [ids])
        outputs_of_layers = [
            torch.einsum("hd,hdm->hm", z[i].reshape(W.shape[:2]), W)
            for i, W in enumerate(_weights(hf))
        ]
        outputs.append(torch.stack(outputs_of_layers))
    return torch.stack(outputs).double().mean(0)


def indirect_effects(
    hf: Any, prompts: Sequence[Ids], answers: Sequence[int], means: Tensor
) -> Tensor:
    """Return how much p(answer) each head's mean output recovers on each prompt [prompt layer
    head].

    The tokens before the last one run once, and the last one reads their keys and values.
    """
    n_layers, n_heads = means.shape[:2]
    gains = torch.zeros(len(prompts), n_layers, n_heads, dtype=torch.float64)
    weights = _weights(hf)
    for row, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.no_grad():
            cache = hf(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        before = _run(hf, [ids])[0, answer].double().exp()
        for layers in torch.arange(n_layers).split(10):
            rows = [(int(layer), head) for layer in layers for head in range(n_heads)]

            def replace(
                module: Any, x: Any, output: Tensor, *, layer: int, rows: list[Any] = rows
            ) -> Tensor:
                output = output.clone()
                z = x[0][:, -1].reshape(len(rows), n_heads, -1)
                for i, (where, head) in enumerate(rows):
                    if where == layer:
                        head_output = z[i, head] @ weights[layer][head]
                        output[i, -1] = (
                            output[i, -1] - head_output + means[layer, head].to(head_output)
                        )
                return output

            with ExitStack() as stack:
                for layer, module in enumerate(_projections(hf)):

                    def hook(*args: Any, layer: int = layer) -> Tensor:
                        return replace(*args, layer=layer)

                    stack.callback(module.register_forward_hook(hook).remove)
                log_probs = _run(hf, [ids] * len(rows), cache)
            after = log_probs[:, answer].double().exp()
            for i, (layer, head) in enumerate(rows):
                gains[row, layer, head] = after[i] - before
    return gains


def top_heads(effects: Tensor, n: int) -> list[tuple[int, int]]:
    """Return the n heads (layer, head) with the largest average of effects [prompt layer head]."""
    mean = effects.mean(0)
    heads = list(itertools.product(range(mean.shape[0]), range(mean.shape[1])))
    return sorted(heads, key=lambda head: float(mean[head]), reverse=True)[:n]


def function_vector(means: Tensor, heads: Iterable[tuple[int, int]]) -> Tensor:
    """Return the sum of the heads' mean outputs [d_model]."""
    return torch.stack([means[layer, head] for layer, head in heads]).sum(0)


def log_probs_with(
    hf: Any, prompts: Iterable[Ids], vector: Tensor | None = None, layer: int = 0
) -> Tensor:
    """Return log-probabilities after each prompt [prompt vocab], with a vector added after a layer
    at the last one.
    """
    log_probs = []
    for ids in prompts:
        with ExitStack() as stack:
            if vector is not None:

                def add(module: Any, x: Any, output: Any, vector: Tensor = vector) -> Any:
                    stream = output[0] if isinstance(output, tuple) else output
                    stream = torch.cat([stream[:, :-1], stream[:, -1:] + vector.to(stream)], dim=1)
                    return (stream, *output[1:]) if isinstance(output, tuple) else stream

                stack.callback(_layers(hf)[layer].register_forward_hook(add).remove)
            log_probs.append(_run(hf, [ids])[0])
    return torch.stack(log_probs)


def _run(hf: Any, rows: Sequence[Ids], cache: Any = None) -> Tensor:
    """Return log-probabilities after the last token [row vocab]; with a `cache`, only this token
    runs.
    """
    tokens = torch.tensor(rows)
    with torch.no_grad():
        if cache is None:
            logits = hf(tokens, use_cache=False).logits
        else:
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(len(rows))
            logits = hf(tokens[:, -1:], past_key_values=cache, use_cache=True).logits
    return torch.log_softmax(logits[:, -1], dim=-1)
