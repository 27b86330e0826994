"""Passes of any Hugging Face model in which attention is seen and edited step by step: q, k,
scores, pattern, v, z.

Every attention module with eager attention takes one product of queries and keys, one softmax, and
one product of the pattern and the values. `run` watches for these three operations inside each
layer's attention module, so it needs no knowledge of rotations, norms of queries and keys, biases
by distance, windows, soft caps or sinks: the model's own code computes them. Edits replace what
flows between the operations.

One unpadded prompt at a time. This module does not import the package.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import families
import reference_hf
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Edit = Callable[[str, int, Tensor], Tensor | None]
"""(what, layer, value) → its replacement, or None to leave it.

"resid" and "resid_post" [pos d_model] are a layer's input and output. "q", "k", "v" [head pos
d_head] are multiplied as they are; groups of keys and values are repeated. "last k" and "last v"
are asked for with the same tensors: the replacement is read by the last position only. "scores"
[head query key] are the softmax's input, "pattern" its output, and "z" [pos head d_head] is the
input of the output projection. "attn_out" and "mlp_out" [pos d_model] are what attention and FFN add
to the stream, "resid_mid" is the stream between them, and "mlp_post" [pos d_mlp] is the input of the
FFN's last projection.
"""

MIXTURE_TYPES = {families.CONFIGS[name][0] for name in families.MIXTURES}
_PRODUCTS = {
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.Tensor.bmm,
}
_ADDED_PRODUCTS = {torch.baddbmm, torch.Tensor.baddbmm}
_ALL_PRODUCTS = _PRODUCTS | _ADDED_PRODUCTS
_SOFTMAXES = {torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax}
_ROOTS = {torch.rsqrt, torch.Tensor.rsqrt}
_POWERS = {torch.pow, torch.Tensor.pow, torch.Tensor.__pow__}


@dataclass
class Pass:
    """What one pass saw, by layer, after edits; the axes are those of `Edit`."""

    resid: dict[int, Tensor] = field(default_factory=dict)
    attention_input: dict[int, Tensor] = field(default_factory=dict)
    q: dict[int, Tensor] = field(default_factory=dict)
    k: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    pattern: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    z: dict[int, Tensor] = field(default_factory=dict)
    norm_scales: dict[int, list[Tensor]] = field(default_factory=dict)
    """Scales of all norms between a layer's input and the product of queries and keys, in order."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities after the last token [vocab]."""
        return torch.log_softmax(self.logits[-1], dim=-1)


class _Watch(TorchFunctionMode):
    """Keeps, edits or freezes what the operations of the attention module that is running give."""

    def __init__(self, seen: Pass, edit: Edit, frozen: dict[int, list[Tensor]]) -> None:
        super().__init__()
        self.seen, self.edit, self.frozen = seen, edit, frozen
        self.normed: int | None = None  # the layer whose norms before attention are running
        self.layer: int | None = None  # the layer whose attention is running
        self.stage = "before"
        self.sinks: Tensor | None = None
        self.is_watching = False

    def enter_layer(self, layer: int) -> None:
        """Watch all operations from here to the end of the layer's attention."""
        self.__enter__()
        self.is_watching = True
        self.normed = layer
        self.seen.norm_scales[layer] = []

    def enter_attention(self, layer: int, attention: Any) -> None:
        self.layer, self.stage, self.sinks = layer, "product", getattr(attention, "sinks", None)

    def leave_attention(self) -> None:
        assert self.stage == "done", f"layer {self.layer}: attention without {self.stage}"
        self.layer = self.normed = None
        self.close()

    def close(self) -> None:
        """Watch no longer, also after an error."""
        if self.is_watching:
            self.is_watching = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.normed is not None:
            scaled = self._norm(func, args, kwargs)
            if scaled is not None:
                return scaled
        if self.layer is None:
            return func(*args, **kwargs)
        if self.stage == "product" and func in _ALL_PRODUCTS and all(x.ndim > 2 for x in args[:2]):
            return self._product(func, args, kwargs)
        if self.stage == "softmax" and func in _SOFTMAXES:
            return self._softmax(func, args, kwargs)
        if self.stage == "mix" and func in _PRODUCTS:
            return self._mix(func, args, kwargs)
        return func(*args, **kwargs)

    def edited(self, what: str, value: Tensor) -> Tensor:
        assert self.layer is not None
        new = self.edit(what, self.layer, value)
        value = value if new is None else new
        getattr(self.seen, what)[self.layer] = value
        return value

    def _norm(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return a norm's scale or output, None for other operations; the scale is kept, or taken
        from `frozen`.
        """
        layer = self.normed
        assert layer is not None
        scales = self.seen.norm_scales[layer]
        fixed = self.frozen.get(layer)
        if func in _ROOTS or (func in _POWERS and args[1:] == (-0.5,)):
            scale = func(*args, **kwargs) if fixed is None else fixed[len(scales)]
            scales.append(scale)
            return scale
        if func is torch.nn.functional.layer_norm:
            names = ("input", "normalized_shape", "weight", "bias", "eps")
            arguments = dict(zip(names, args, strict=False)) | kwargs
            x, eps = arguments["input"], arguments.get("eps", 1e-5)
            centered = x - x.mean(-1, keepdim=True)
            scale = (
                (centered.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
                if fixed is None
                else fixed[len(scales)]
            )
            scales.append(scale)
            y = centered * scale
            y = y if arguments.get("weight") is None else y * arguments["weight"]
            return y if arguments.get("bias") is None else y + arguments["bias"]
        assert func is not torch.nn.functional.rms_norm, "write out this norm as well"
        return None

    def _product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        if func in _ADDED_PRODUCTS:
            names = ("input", "batch1", "batch2")
            arguments = dict(zip(names, args, strict=False)) | kwargs
            first, second, options = arguments.pop("batch1"), arguments.pop("batch2"), arguments
        else:
            (first, second), options = args, kwargs
        n = first.shape[-2]
        q = first.reshape(-1, n, first.shape[-1])
        k = second.transpose(-1, -2).reshape(-1, n, first.shape[-1])
        k = k.repeat_interleave(len(q) // len(k), dim=0)

        def multiply(q: Tensor, k: Tensor) -> Tensor:
            pair = (
                q.reshape(first.shape),
                k.transpose(-1, -2).reshape(*first.shape[:-2], k.shape[-1], n),
            )
            if func in _ADDED_PRODUCTS:
                return func(
                    options["input"],
                    *pair,
                    **{name: x for name, x in options.items() if name != "input"},
                )
            return func(*pair, **options)

        q, k = self.edited("q", q), self.edited("k", k)
        assert self.layer is not None
        out, donor_keys = multiply(q, k), self.edit("last k", self.layer, k)
        if donor_keys is not None:
            out = torch.cat([out[..., :-1, :], multiply(q, donor_keys)[..., -1:, :]], dim=-2)
        self.stage, self.normed = "softmax", None
        return out

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        logits, n, shift = args[0], args[0].shape[-2], 0.0
        if (
            self.sinks is not None
        ):  # sinks have no key; models subtract a row's maximum, which sinks tell
            shift = logits[..., n:] - self.sinks.reshape(1, -1, 1, 1)
        scores = self.edited("scores", (logits[..., :n] - shift).reshape(-1, n, n)).reshape(
            *logits.shape[:-1], n
        )
        logits = torch.cat([scores + shift, logits[..., n:]], dim=-1)
        self.stage = "mix"
        return func(logits, *args[1:], **kwargs)

    def _mix(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        first, second = args
        n = first.shape[-1]
        pattern = self.edited("pattern", first.reshape(-1, n, n))
        v = second.reshape(-1, n, second.shape[-1])
        v = self.edited("v", v.repeat_interleave(len(pattern) // len(v), dim=0))

        def multiply(v: Tensor) -> Tensor:
            return func(
                pattern.reshape(first.shape), v.reshape(*first.shape[:-2], n, v.shape[-1]), **kwargs
            )

        assert self.layer is not None
        out, donor_values = multiply(v), self.edit("last v", self.layer, v)
        if donor_values is not None:
            out = torch.cat([out[..., :-1, :], multiply(donor_values)[..., -1:, :]], dim=-2)
        self.stage = "done"
        return out


def attention_of(hf: Any, layer: int) -> Any:
    """Return a layer's attention module, None if the layer has none."""
    path = reference_hf._WIRING[hf.config.model_type].out.rpartition(".")[0]
    try:
        return reference_hf._layers(hf)[layer].get_submodule(path)
    except AttributeError:
        return None


@dataclass
class _LayerHooks:
    """Hooks that keep and edit what one layer reads and writes while a prompt runs."""

    hf: Any
    layer: int
    n_tokens: int
    edit: Edit
    seen: Pass
    watch: _Watch

    def add(self, block: Any) -> list[Any]:
        """Set the hooks of a layer's modules, and return their handles."""
        wiring = reference_hf._WIRING[self.hf.config.model_type]
        handles = [
            block.register_forward_pre_hook(self.layer_starts, with_kwargs=True),
            block.register_forward_hook(self.layer_ends),
        ]
        attention = attention_of(self.hf, self.layer)
        if attention is None:
            return handles
        out = block.get_submodule(wiring.out)
        attention_output = block.get_submodule(wiring.attn_post_norm or wiring.out)
        ffn_output = block.get_submodule(wiring.ffn_post_norm or wiring.down)
        handles += [
            attention.register_forward_pre_hook(self.attention_starts, with_kwargs=True),
            attention.register_forward_hook(lambda m, a, o: self.watch.leave_attention()),
            out.register_forward_pre_hook(self.out_starts),
            attention_output.register_forward_hook(self.attention_output_ends),
            ffn_output.register_forward_hook(self.ffn_output_ends),
        ]
        if self.hf.config.model_type not in MIXTURE_TYPES:
            down = block.get_submodule(wiring.down)
            handles.append(down.register_forward_pre_hook(self.down_starts))
        return handles

    def layer_starts(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = args[0] if args else kwargs["hidden_states"]
        new = self.edit("resid", self.layer, x[0])
        x = x if new is None else new[None]
        self.seen.resid[self.layer] = x[0].detach().clone()  # some families add to it in place
        self.watch.enter_layer(self.layer)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def layer_ends(self, module: Any, args: tuple, output: Any) -> Any:
        new = self.edit("resid_post", self.layer, _first(output)[0])
        return None if new is None else _with_first(output, new[None])

    def attention_starts(self, module: Any, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self.seen.attention_input[self.layer] = x[0].detach().clone()
        self.watch.enter_attention(self.layer, attention_of(self.hf, self.layer))

    def out_starts(self, module: Any, args: tuple) -> tuple:
        n_heads = reference_hf._setting(
            self.hf.config, "num_attention_heads", "num_heads", "n_head", "n_heads"
        )
        z = args[0].reshape(self.n_tokens, n_heads, -1)
        new = self.edit("z", self.layer, z)
        self.seen.z[self.layer] = z = z if new is None else new
        return (z.reshape(args[0].shape), *args[1:])

    def attention_output_ends(self, module: Any, args: tuple, output: Any) -> Any:
        """Edit what attention adds to the stream, and the stream between it and the FFN."""
        written = self._written(output)
        new = self.edit("attn_out", self.layer, written)
        new = written if new is None else new
        if not reference_hf.is_parallel(self.hf.config):
            before = self.seen.resid[self.layer]
            middle = self.edit("resid_mid", self.layer, before + new)
            new = new if middle is None else middle - before
        return None if new is written else self._with_written(output, new)

    def ffn_output_ends(self, module: Any, args: tuple, output: Any) -> Any:
        new = self.edit("mlp_out", self.layer, self._written(output))
        return None if new is None else self._with_written(output, new)

    def down_starts(self, module: Any, args: tuple) -> tuple | None:
        new = self.edit("mlp_post", self.layer, args[0].reshape(self.n_tokens, -1))
        return None if new is None else (new.reshape(args[0].shape), *args[1:])

    @property
    def _multiplier(self) -> float:
        """By what Granite multiplies what attention and FFN add to the stream."""
        return reference_hf._setting(self.hf.config, "residual_multiplier", default=1.0)

    def _written(self, output: Any) -> Tensor:
        """Return what a module adds to the stream, [pos d_model]."""
        raw = _first(output).detach().clone()
        return raw.reshape(self.n_tokens, -1) * self._multiplier

    def _with_written(self, output: Any, new: Tensor) -> Any:
        """Return a module's output with which `new` [pos d_model] is added to the stream."""
        return _with_first(output, (new / self._multiplier).reshape(_first(output).shape))


def _first(output: Any) -> Tensor:
    """Return a module's output, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


def _with_first(output: Any, new: Tensor) -> Any:
    """Return a module's output with another tensor in place of `_first`."""
    return (new, *output[1:]) if isinstance(output, tuple) else new


def run(
    hf: Any,
    ids: Tensor,
    edit: Edit | None = None,
    *,
    frozen: dict[int, list[Tensor]] | None = None,
    grad: bool = False,
    **inputs: Any,
) -> Pass:
    """Run one prompt with edits; in the layers of `frozen`, norms before attention have these
    scales.
    """
    edit = edit or (lambda what, layer, value: None)
    seen = Pass()
    watch = _Watch(seen, edit, frozen or {})
    with ExitStack() as stack:
        stack.callback(watch.close)
        for layer, block in enumerate(reference_hf._layers(hf)):
            for handle in _LayerHooks(hf, layer, len(ids), edit, seen, watch).add(block):
                stack.callback(handle.remove)
        with torch.enable_grad() if grad else torch.no_grad():
            seen.logits = hf(ids[None], use_cache=False, **inputs).logits[0]
    return seen


def replacing(what: str, layer: int, value: Tensor) -> Edit:
    """Return the edit that puts one value in one place."""
    return lambda asked, where, _: value if (asked, where) == (what, layer) else None


def in_turn(*edits: Edit | None) -> Edit:
    """Return the edit that applies several edits, each to what the one before leaves."""

    def edit(what: str, layer: int, value: Tensor) -> Tensor | None:
        new = None
        for single_edit in edits:
            edited = None if single_edit is None else single_edit(what, layer, value)
            if edited is not None:
                new = value = edited
        return new

    return edit


def learned_positions(hf: Any, n: int) -> Tensor | None:
    """Return the position embeddings [pos d_model] in the first layer's input, None if there are
    none.
    """
    modules = [
        m for name, m in hf.named_modules() if name.rpartition(".")[2] in ("wpe", "embed_positions")
    ]
    if not modules:
        return None
    offset = getattr(modules[0], "offset", 0)  # OPT's table begins with two rows for padding
    return modules[0].weight.detach()[offset : offset + n]


@contextmanager
def _no_bias_by_distance(hf: Any) -> Iterator[None]:
    module = __import__(type(hf).__module__, fromlist=["build_alibi_tensor"])
    build = getattr(module, "build_alibi_tensor", None)
    builder = getattr(getattr(hf, "transformer", None), "build_mpt_alibi_tensor", None)
    with ExitStack() as stack:
        if build is not None:
            module.build_alibi_tensor = lambda *args, **kwargs: 0 * build(*args, **kwargs)
            stack.callback(setattr, module, "build_alibi_tensor", build)
        if builder is not None:
            hf.transformer.build_mpt_alibi_tensor = lambda *args, **kwargs: (
                0 * builder(*args, **kwargs)
            )
            stack.callback(delattr, hf.transformer, "build_mpt_alibi_tensor")
        yield


def rerun_attention(
    hf: Any,
    ids: Tensor,
    clean: Pass,
    layer: int,
    x: Tensor,
    *,
    place: bool,
    freeze_norms: bool = False,
) -> Pass:
    """Return a pass in which one layer reads the residual stream `x` [pos d_model]; see only this
    layer of it.

    Without `place`, nothing in this layer's attention knows where tokens are: rotary tokens all
    stand at position 0, and there is no bias by distance. `freeze_norms` gives norms before
    attention the scales that they have in `clean`.
    """
    frozen = {layer: clean.norm_scales[layer]} if freeze_norms else None
    inputs = {}
    if not place:  # without a mask, each position 0 would begin a text of its own, and BLOOM would not ask for its bias
        inputs["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
        if learned_positions(hf, 1) is None and not _has_alibi(hf):
            inputs["position_ids"] = torch.zeros(1, len(ids), dtype=torch.long)
    with nullcontext() if place else _no_bias_by_distance(hf):
        return run(hf, ids, replacing("resid", layer, x), frozen=frozen, **inputs)


def _has_alibi(hf: Any) -> bool:
    return hf.config.model_type in ("bloom", "mpt") or bool(getattr(hf.config, "alibi", False))


def raw_scores(hf: Any, seen: Pass, layer: int) -> Tensor:
    """Return the scores [head query key] of all pairs in a pass without bias by distance, before
    cap, mask and sinks.

    They are q · k times the factor by which the softmax's input differs from q · k where nothing is
    masked.
    """
    products = seen.q[layer] @ seen.k[layer].transpose(-1, -2)
    own_products, scores = (
        products.diagonal(dim1=-2, dim2=-1),
        seen.scores[layer].diagonal(dim1=-2, dim2=-1),
    )
    cap = reference_hf._setting(hf.config, "attn_logit_softcapping")
    if cap is not None:
        scores = cap * torch.atanh(scores / cap)
    best = own_products.abs().argmax()
    return products * (scores.flatten()[best] / own_products.flatten()[best])


def writing(what: str, layer: int, at: Any, value: Any) -> Edit:
    """Return the edit that writes a value, or a function of what is there, to one place of one
    layer.
    """

    def edit(asked: str, where: int, x: Tensor) -> Tensor | None:
        if (asked, where) != (what, layer):
            return None
        x = x.clone()
        x[at] = value(x[at]) if callable(value) else value
        return x

    return edit


def times_slopes(hf: Any, ids: Tensor, what: str, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x · ∂loss/∂x of a pattern or z, layers first, from autograd on the plain model."""
    hf.requires_grad_(True)
    seen = run(hf, ids, grad=True)
    values = [value for _, value in sorted(getattr(seen, what).items())]
    slopes = torch.autograd.grad(loss(seen.log_probs), values)
    hf.requires_grad_(False)
    return (torch.stack(values) * torch.stack(slopes)).detach()


def saliency_of(hf: Any, ids: Tensor, labels: list[int] | slice, target: int) -> Tensor:
    """Return |pattern · ∂loss/∂pattern| [layer query key], summed over heads; the loss is that
    among labels.
    """
    return (
        times_slopes(hf, ids, "pattern", lambda x: x[labels].logsumexp(0) - x[target]).abs().sum(1)
    )
