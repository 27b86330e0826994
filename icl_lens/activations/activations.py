"""Record the activations of one forward pass: last-position vectors, last-query attention rows, label inputs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.decompose import head_outputs, repeat_kv
from icl_lens.activations.serialization import read_metadata, read_tensors, write_tensors
from icl_lens.errors import InputError
from icl_lens.models.locking import locks_model
from icl_lens.models.norms import NormView
from icl_lens.models.readout import Readout, norm_scale
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_vocabulary
from icl_lens.prompts.token_ids import TokenPositions

# Relative tolerance of the checked sums, by dtype. Some families' RMSNorm always rounds to float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}

KIND, VERSION = "activations", 2
"""Kind and version of the files that `Activations.save` writes; the version increases when a field changes meaning."""


@dataclass(frozen=True)
class Activations:
    """Activations of one forward pass; made by `capture` or `Activations.from_cache`.

    All tensors are at each prompt's own last position unless they have a position axis. Vectors are in
    residual-stream units and the model's dtype (`readout` computes in float32, or float64 for float64 models).
    For families with a norm after attention or FFN (Gemma-2/3), `attn_out` and `mlp_out` are the normed outputs that
    reach the residual stream, and `attn_scale`, `mlp_scale` hold that norm's scale at the last position.

    Rows that are positions of the same prompt share its values (`pass_v`, `pass_index`); `v` and `values` expand them
    to one per row.

    Example:
        >>> acts.resid_pre.shape, acts.pattern.shape
        (torch.Size([1, 8, 96]), torch.Size([1, 8, 6, 19]))
        >>> acts.label_log_probs.shape
        torch.Size([1, 2])
    """

    batch: PromptBatch
    view: ModelView
    readout: Readout
    resid_pre: Float[Tensor, "batch layer d_model"]
    attn_out: Float[Tensor, "batch layer d_model"]
    mlp_out: Float[Tensor, "batch layer d_model"]
    resid_final: Float[Tensor, "batch d_model"]
    z: Float[Tensor, "batch layer head d_head"]
    pattern: Float[Tensor, "batch layer head key"]
    pass_v: Float[Tensor, "run layer key kv_head d_head"]
    q: Float[Tensor, "batch layer head d_head"]
    mlp_post: Float[Tensor, "batch layer neuron"] | None
    label_resid_pre: Float[Tensor, "batch layer demo d_model"]
    label_attn_out: Float[Tensor, "batch layer demo d_model"]
    attn_scale: Float[Tensor, "batch layer"] | None = None
    mlp_scale: Float[Tensor, "batch layer"] | None = None
    pass_index: Int[Tensor, " batch"] | None = None
    """Each row's index into `pass_v`; None if row i has `pass_v[i]`."""

    @classmethod
    def from_cache(
        cls,
        model: Any,
        cache: Any,
        batch: PromptBatch,
        *,
        positions: TokenPositions | None = None,
        check: bool = True,
    ) -> "Activations":
        """Build activations from an existing TransformerLens cache (`model.run_with_cache(batch.tokens, …)`).

        `positions` reads positions other than the last, as in `capture`. The cache must come from these tokens, have a
        batch axis, and hold all hooks of an unfiltered `run_with_cache`. Raise InputError if a hook is missing (the
        message names the first), if shapes do not match the batch, or if the cached embeddings are not those of the
        batch's tokens.
        """
        _check_same_tokens(model, cache, batch)
        recorder = _Recorder(ModelView.of(model), batch if positions is None else _ReadPlan.at(batch, positions))
        for name, keep in recorder.hooks():
            try:
                value = cache[name]
            except KeyError:
                raise InputError(
                    f"cache must contain {name!r}; create it with model.run_with_cache(batch.tokens, "
                    "attention_mask=batch.attention_mask) and no names_filter"
                ) from None
            if value.ndim < 3 or value.shape[0] != len(batch):
                raise InputError(
                    f"cache[{name!r}] must have {len(batch)} rows, one per prompt, got shape {tuple(value.shape)}; "
                    "keep the batch axis and cache batch.tokens itself"
                )
            keep(value)
        return recorder.finish(check=check)

    def __repr__(self) -> str:
        size = f"{self.view.n_layers} layers × {self.view.n_heads} heads"
        return f"Activations({self.view.name}: {self.batch.size_summary}, {size})"

    @property
    def v(self) -> Float[Tensor, "batch layer key kv_head d_head"]:
        """Values at every position, copied per row where rows share them; `values` copies only one layer."""
        return self.pass_v if self.pass_index is None else self.pass_v[self.pass_index]

    def values(self, layer: int) -> Float[Tensor, "batch key kv_head d_head"]:
        """Return one layer's values at every position, b_V included."""
        return self.pass_v[:, layer] if self.pass_index is None else self.pass_v[self.pass_index, layer]

    def token_log_probs(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Return the model's log-probability of one token per row (`batch.answer_tokens`), nats, with all biases."""
        self.check_device()
        readout = self.readout.using(final_norm="frozen", bias=True)
        return readout.token_log_probs(self.resid_final[:, None], tokens.to(self.resid_final.device))[:, 0]

    @property
    def label_log_probs(self) -> Float[Tensor, "batch label"]:
        """Log-probability of each label's token after the prompt, nats, with all biases regardless of `readout.bias`.

        Raise InputError for prompts without demonstrations.
        """
        self.batch.require_labels("label to score", NO_LABELS_HINT)
        self.check_device()
        log_probs = self.readout.using(final_norm="frozen", bias=True).log_probs(self.resid_final)
        return log_probs[:, self.batch.label_tokens.to(log_probs.device)]

    @property
    def predicted(self) -> Tensor:
        """[batch] index of the most probable label among each prompt's labels."""
        mask = self.batch.label_mask.to(self.label_log_probs.device)
        return self.label_log_probs.masked_fill(~mask, -torch.inf).argmax(-1)

    @property
    def head_inputs(self) -> Float[Tensor, "batch layer head d_head"]:
        """Each head's z times the scale of a norm after attention; multiplied by W_O it is the head output."""
        z = self.z.to(self.readout.dtype)
        return z if self.attn_scale is None else z * self.attn_scale[..., None, None]

    def head_outputs(self, layer: int) -> Float[Tensor, "batch head d_model"]:
        """Return what each head of a layer writes into the residual stream at the last position."""
        z = self.z[:, layer].to(self.readout.dtype)
        if self.attn_scale is not None:
            z = z * self.attn_scale[:, layer, None, None]
        return head_outputs(z, self.view.W_O(layer))

    def head_pattern(self, layer: int) -> Float[Tensor, "batch head key"]:
        """Return the attention row times the scale of a norm after attention: pattern · v · W_O is the head output."""
        pattern = self.pattern[:, layer].to(self.readout.dtype)
        return pattern if self.attn_scale is None else pattern * self.attn_scale[:, layer, None, None]

    def head_values(self, layer: int) -> Float[Tensor, "batch key head d_head"]:
        """Return values at every position, key-value groups repeated for their query heads, b_V included."""
        return repeat_kv(self.values(layer).to(self.readout.dtype), self.view.n_heads)

    def at_labels(self, x: Float[Tensor, "batch key *rest"]) -> Float[Tensor, "batch demo *rest"]:
        """Return `x` at the label positions; zero where a prompt has fewer demonstrations."""
        return _at(x, self.batch.label_positions.to(x.device))

    def to(self, device: torch.device | str) -> "Activations":
        """Return a copy with all recorded tensors on `device`, for instance to keep many captures off the GPU.

        Weights stay with the model. Methods that use weights raise InputError unless the activations are on the model's
        device (`acts.view.unembed_device`).
        """
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        readout = replace(self.readout, scale=self.readout.scale.to(device))
        return replace(self, batch=self.batch.to(device), readout=readout, **tensors)

    def check_device(self) -> None:
        """Raise InputError unless the activations are on the model's device."""
        here, home = self.z.device, self.view.unembed_device
        if here != home:
            raise InputError(
                f"activations must be on the model's device {home}, got {here}; use acts.to({str(home)!r})"
            )

    def save(self, path: str | Path) -> None:
        """Write all recorded tensors to one safetensors file, which `load` reads with the same model.

        Raise InputError if the folder does not exist or is not writable.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     acts.save(f"{folder}/acts.safetensors")
            ...     again = il.Activations.load(f"{folder}/acts.safetensors", model)
            >>> again
            Activations(icl-mini: 1 prompt × 19 tokens, 8 layers × 6 heads)
        """
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        of_batch, about_batch = self.batch.to_state()
        about = {
            "model": self.view.name,
            "architecture": self.view.architecture,
            "layers": self.view.n_layers,
            "heads": self.view.n_heads,
            "dtype": str(self.view.model.W_U.dtype).removeprefix("torch."),
            "weights": self.view.fingerprint(),
            "final_norm": self.readout.final_norm,
            "bias": self.readout.bias,
            "batch": about_batch,
        }
        tensors |= {f"batch.{name}": value for name, value in of_batch.items()}
        write_tensors(path, KIND, VERSION, tensors, about)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "Activations":
        """Read activations that `save` wrote, onto the model's device.

        Raise InputError for any other file, and for activations of another model or other weights (another dtype,
        processed weights, further training).
        """
        view = ModelView.of(model)
        about = read_metadata(path, KIND, VERSION)
        theirs = [about[name] for name in ("architecture", "layers", "heads", "dtype")]
        dtype = str(view.model.W_U.dtype).removeprefix("torch.")
        ours = [view.architecture, view.n_layers, view.n_heads, dtype]
        if theirs != ours or about["weights"] != view.fingerprint():
            shown = ["{} of {} layers × {} heads in {}".format(*one) for one in (theirs, ours)]
            what = "with other weights (training or processing)" if theirs == ours else shown[1]
            raise InputError(
                f"{str(path)!r} was recorded from {about['model']} ({shown[0]}), got model {view.name} ({what}); load "
                "the recorded model or capture again"
            )
        tensors = read_tensors(path, view.unembed_device)
        of_batch = {
            name.removeprefix("batch."): tensors.pop(name) for name in list(tensors) if name.startswith("batch.")
        }
        readout = view.readout(tensors["resid_final"]).using(final_norm=about["final_norm"], bias=about["bias"])
        batch = PromptBatch.from_state(of_batch, about["batch"])
        return cls(**{"mlp_post": None, **tensors}, batch=batch, view=view, readout=readout)

    def __getitem__(self, index: Any) -> "Activations":
        """Select prompts by slice or index list."""
        if isinstance(index, int):
            index = slice(index, index + 1)
        parts: dict[str, Any] = {
            name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor) and name != "pass_v"
        }
        batch = self.batch[index]
        width = batch.tokens.shape[1]
        parts["pattern"] = parts["pattern"][..., :width]
        v, runs = self.pass_v[:, :, :width], index
        if "pass_index" in parts:
            runs, parts["pass_index"] = parts["pass_index"].unique(return_inverse=True)
        parts["pass_v"] = v[runs]
        return replace(self, batch=batch, readout=self.readout.select_prompts(index), **parts)


@locks_model
def capture(
    model: Any, batch: PromptBatch, *, positions: TokenPositions | None = None, check: bool = True
) -> Activations:
    """Run one forward pass over the batch and keep only what the analysis reads.

    Logits are computed at each prompt's last position only. Memory: per prompt and layer, the values at every
    position plus a few last-position and label-position vectors.

    `positions` reads positions other than the last from the same pass, one row per prompt and position: the result's
    batch is `batch.at(positions)`. A batch made by `at` or `tokenize_text(positions=…)` also runs each prompt once,
    unless hooks are active on the model: then each row runs separately, as the hooks expect. Memory for p positions of
    a prompt of n tokens: the prompt's values once, layers · n · key-value heads · d_head numbers, plus, for each
    position, layers · (3 d_model + 2 heads · d_head + d_mlp + heads · n). That makes 0.4 GB in float32 for 50 positions
    of 1,000 tokens in GPT-2 large. Capture larger inputs in pieces (`batch.split`).

    `check` (cheap) verifies that Σ heads + b_O = attention output and x + attn + ffn = next x, and raises InputError
    for a model family where they do not hold. Turn it off inside interventions that edit the residual stream itself.

    Example:
        >>> acts = il.capture(model, batch)
        >>> acts.head_outputs(2).shape
        torch.Size([1, 6, 96])
    """
    if not isinstance(batch, PromptBatch):
        raise InputError(
            f"batch must be a PromptBatch of tokenized prompts, got {type(batch).__name__}; pass "
            "il.tokenize(model, prompts)"
        )
    view = ModelView.of(model)
    over: PromptBatch | _ReadPlan = batch
    if positions is not None:
        over = _ReadPlan.at(batch, positions)
    elif batch.prompt_index is not None and not view.has_hooks:
        over = _ReadPlan.shared(batch)
    recorder = _Recorder(view, over)
    run = over.run if isinstance(over, _ReadPlan) else batch
    logits = _last_logits(model, run, [(name, _reader(keep)) for name, keep in recorder.hooks()])
    return recorder.finish(check=check, logits=logits)


NO_LABELS_HINT = "il.last_log_probs(model, batch) has the log-probability of every token"


@dataclass(frozen=True)
class _ReadPlan:
    """A forward pass read at several positions per row: the batch to run and the rows to read."""

    run: PromptBatch
    rows: PromptBatch
    of: Int[Tensor, " batch"]
    """Row of `run` that each row is read from."""

    @classmethod
    def at(cls, batch: PromptBatch, positions: TokenPositions) -> "_ReadPlan":
        rows = replace(batch, prompt_index=None).at(positions)
        assert rows.prompt_index is not None
        of = rows.prompt_index
        known = batch.prompt_index
        return cls(batch, rows if known is None else replace(rows, prompt_index=known[of]), of)

    @classmethod
    def shared(cls, batch: PromptBatch) -> "_ReadPlan":
        """Run only the longest row of each prompt; the other rows are prefixes of it."""
        assert batch.prompt_index is not None
        prompts, of = batch.prompt_index.unique(return_inverse=True)
        last = torch.where(of[None] == torch.arange(len(prompts), device=of.device)[:, None], batch.last, -1)
        return cls(batch[last.argmax(1)], batch, of)


def last_log_probs(model: Any, batch: PromptBatch) -> Float[Tensor, "batch d_vocab"]:
    """Return the model's log-probabilities after each prompt, nats: one forward pass, logits at the last position only.

    Inside interventions these are the edited model's. Computed in float32 (float64 for float64 models).

    Example:
        >>> il.last_log_probs(model, batch).exp().sum().round()
        tensor(1.)
    """
    logits = _last_logits(model, batch, [])
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def label_log_probs(model: Any, batch: PromptBatch) -> Float[Tensor, "batch label"]:
    """Return the model's log-probability of each label's token after each prompt, nats; see `last_log_probs`.

    Raise InputError for prompts without demonstrations.

    Example:
        >>> il.label_log_probs(model, batch).shape
        torch.Size([1, 2])
    """
    batch.require_labels("label to score", NO_LABELS_HINT)
    log_probs = last_log_probs(model, batch)
    return log_probs[:, batch.label_tokens.to(log_probs.device)]


def _last_logits(model: Any, batch: PromptBatch, hooks: list[tuple[str, Callable[..., Any]]]) -> Tensor:
    def only_last(x: Tensor, hook: Any) -> Tensor:
        return x[torch.arange(len(x), device=x.device), batch.last.to(x.device), None]

    view = ModelView.of(model)
    check_vocabulary(model, batch, "batch")
    with (
        torch.no_grad(),
        view.inference_pass() as lean,
        model.hooks(fwd_hooks=[*hooks, (view.last_logits_hook, only_last)]),
    ):
        logits = model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits", **lean)[:, 0]
    check_finite(logits)
    return logits


def check_finite(logits: Float[Tensor, "batch d_vocab"]) -> None:
    """Raise InputError, naming the first such prompt, if the model's output is NaN or infinite."""
    best = logits.amax(-1)
    if bool(best.isfinite().all()):
        return
    row = int((~best.isfinite()).nonzero()[0])
    what = "NaN" if bool(best[row].isnan()) else "infinite"
    remedy = (
        "float16 overflows beyond 65,504, so load the model in bfloat16 or float32"
        if logits.dtype == torch.float16
        else "reload the model if its weights are not finite, or remove active edits"
    )
    raise InputError(f"model output after prompt {row} must be finite, got {what} values; {remedy}")


def _reader(keep: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook_fn(value: Tensor, hook: Any) -> None:
        keep(value)

    return hook_fn


def _at(x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return x [batch pos …] at [batch n] positions, zero where the position is -1; `rows` defaults to all rows."""
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    picked = x[rows[:, None], positions.clamp(min=0)]
    missing = (positions < 0).reshape(*positions.shape, *[1] * (picked.ndim - 2))
    return picked.masked_fill(missing, 0)


def _check_same_tokens(model: Any, cache: Any, batch: PromptBatch) -> None:
    """Raise InputError if the cache was made from other tokens than the batch's."""
    remedy = (
        "create it with model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask), since strings may be "
        "tokenized differently, for instance with a beginning-of-sequence token"
    )
    try:
        cached = cache["hook_embed"]
    except KeyError:
        return  # a filtered cache: missing hooks are reported when they are read
    if cached.ndim != 3 or len(cached) != len(batch):
        return  # reported when the hooks are read
    if cached.shape[1] != batch.tokens.shape[1]:
        raise InputError(
            f"cache must be of tokens of shape {tuple(batch.tokens.shape)}, got {tuple(cached.shape[:2])}; {remedy}"
        )
    own = _embedded(model, batch).to(cached.device)
    real = batch.attention_mask.to(cached.device).bool()
    error = (own.to(cached) - cached)[real].abs().max()
    if not error <= 1e-3 * own[real].abs().max():
        raise InputError(f"cache must be of the batch's tokens, got other embeddings; {remedy}")


class _Stop(Exception):
    """Raised in a hook to end a forward pass early."""


def _embedded(model: Any, batch: PromptBatch) -> Float[Tensor, "batch pos d_embed"]:
    """Return the batch's token embeddings from a truncated forward pass, since families scale or norm them."""
    seen: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> None:
        seen.append(value.detach().clone())
        raise _Stop

    with suppress(_Stop), torch.no_grad(), model.hooks(fwd_hooks=[("hook_embed", keep)]):
        model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
    return seen[0]


class _Recorder:
    """Fills preallocated tensors from hook values, one layer at a time."""

    def __init__(self, view: ModelView, over: PromptBatch | _ReadPlan):
        self.view, self.device = view, view.unembed_device
        self.batch = over.rows if isinstance(over, _ReadPlan) else over
        self.run = over.of.to(self.device) if isinstance(over, _ReadPlan) else None
        self.width = self.batch.tokens.shape[1]
        # Rows read at the last position of their pass can be compared with the logits of that pass.
        self.run_last = over.run.last if isinstance(over, _ReadPlan) else None
        self.last = self.batch.last.to(self.device)
        self.labels = self.batch.label_positions.to(self.device)
        self.store: dict[str, Tensor] = {}

    def hooks(self) -> list[tuple[str, Callable[[Tensor], None]]]:
        """Return (hook name, callback) pairs for all recorded values."""
        view, hooks = self.view, []
        for layer in range(view.n_layers):
            hooks += [
                (
                    view.hook(layer, "hook_resid_pre"),
                    self._keep("resid_pre", layer, labels="label_resid_pre"),
                ),
                (view.hook(layer, "attn.hook_q"), self._keep("q", layer)),
                (view.hook(layer, "attn.hook_v"), self._keep_all("pass_v", layer)),
                (view.hook(layer, "attn.hook_pattern"), self._keep_row("pattern", layer)),
                (view.hook(layer, "attn.hook_z"), self._keep("z", layer)),
                (view.hook(layer, "hook_attn_out"), self._keep("attn_out", layer, labels="label_attn_out")),
                (view.hook(layer, "hook_mlp_out"), self._keep("mlp_out", layer)),
            ]
            if f"blocks.{layer}.mlp.hook_post" in view.hook_names:
                hooks.append((f"blocks.{layer}.mlp.hook_post", self._keep("mlp_post", layer)))
        hooks.append((view.hook(view.n_layers - 1, "hook_resid_post"), self._keep("resid_final", None)))
        return hooks

    def _slot(self, name: str, layer: int | None, value: Tensor) -> None:
        if layer is None:
            self.store[name] = value
            return
        if name not in self.store:
            shape = (value.shape[0], self.view.n_layers, *value.shape[1:])
            self.store[name] = value.new_empty(shape)
        self.store[name][:, layer] = value

    def _rows(self, value: Tensor) -> Tensor:
        """Return the row of the pass that each row is read from."""
        return torch.arange(len(value), device=value.device) if self.run is None else self.run.to(value.device)

    def _keep(self, name: str, layer: int | None, labels: str | None = None) -> Callable[[Tensor], None]:
        def keep(value: Tensor) -> None:
            if name == "mlp_post" and value.ndim != 3:
                return
            value = value.detach()
            rows = self._rows(value)
            self._slot(name, layer, value[rows, self.last.to(value.device)].to(self.device))
            if labels is not None:
                self._slot(labels, layer, _at(value, self.labels.to(value.device), rows).to(self.device))

        return keep

    def _keep_all(self, name: str, layer: int) -> Callable[[Tensor], None]:
        def keep(value: Tensor) -> None:
            value = value.detach().to(self.device)
            if value.shape[2] != self.view.n_kv_heads:  # TransformerLens may repeat key-value groups
                value = value[:, :, :: value.shape[2] // self.view.n_kv_heads]
            self._slot(name, layer, value[:, : self.width])

        return keep

    def _keep_row(self, name: str, layer: int) -> Callable[[Tensor], None]:
        def keep(value: Tensor) -> None:
            row = value.detach()[self._rows(value), :, self.last.to(value.device), : self.width]
            self._slot(name, layer, row.to(self.device))

        return keep

    def finish(self, *, check: bool, logits: Tensor | None = None) -> Activations:
        view, store = self.view, self.store
        acts = Activations(
            batch=self.batch,
            view=view,
            readout=view.readout(store["resid_final"]),
            mlp_post=store.pop("mlp_post", None),
            pass_index=self.run,
            **store,
        )
        layers = range(view.n_layers)
        attn_posts = [view.attn_post_norm(layer) for layer in layers]
        if any(post is not None for post in attn_posts):
            mlp_posts = [view.mlp_post_norm(layer) for layer in layers]
            acts = replace(
                acts,
                attn_scale=_post_scales(attn_posts, [self._raw_attn_out(acts, layer) for layer in layers]),
                mlp_scale=_post_scales(mlp_posts, [self._raw_mlp_out(acts, layer) for layer in layers]),
            )
        if check:
            self._check(acts, logits)
        return acts

    def _raw_attn_out(self, acts: Activations, layer: int) -> Tensor:
        """Return the attention output before the norm that follows it."""
        W_O, b_O = self.view.raw_W_O(layer).to(acts.readout.dtype), self.view.raw_b_O(layer)
        out = einsum(acts.z[:, layer].to(W_O.dtype), W_O, "batch head d_head, head d_head d_model -> batch d_model")
        return out if b_O is None else out + b_O

    def _raw_mlp_out(self, acts: Activations, layer: int) -> Tensor:
        """Return the FFN output before the norm that follows it."""
        if acts.mlp_post is None:
            raise InputError(f"{self.view.name} is not supported: it has a norm after its FFN but no mlp.hook_post")
        W_out, b_out = self.view.raw_W_out(layer).to(acts.readout.dtype), self.view.raw_b_out(layer)
        out = acts.mlp_post[:, layer].to(W_out.dtype) @ W_out
        return out if b_out is None else out + b_out

    def _check(self, acts: Activations, logits: Tensor | None) -> None:
        """Raise InputError if the outputs of the model's blocks do not add up as the formulas assume."""
        x = acts.resid_pre.to(acts.readout.dtype)
        following = torch.cat([x[:, 1:], acts.resid_final[:, None].to(x.dtype)], dim=1)
        sums = x + acts.attn_out.to(x.dtype) + acts.mlp_out.to(x.dtype)
        tolerance = TOLERANCE.get(acts.z.dtype, 1e-3)
        name = self.view.architecture
        for layer in range(self.view.n_layers):
            heads = acts.head_outputs(layer).sum(1)
            b_O = self.view.b_O(layer)
            if b_O is not None:
                heads = heads + (b_O if acts.attn_scale is None else b_O * acts.attn_scale[:, layer, None])
            for what, ours, theirs in (
                ("the heads' outputs do not sum to the attention output", heads, acts.attn_out[:, layer]),
                (
                    "attention and FFN outputs do not add up to the residual stream",
                    sums[:, layer],
                    following[:, layer],
                ),
            ):
                scale = following[:, layer].norm(dim=-1) + theirs.to(ours.dtype).norm(dim=-1)
                error = float(((ours - theirs.to(ours.dtype)).norm(dim=-1) / (scale + 1e-30)).max())
                if not error <= tolerance:
                    raise InputError(
                        f"{name} is not supported: in layer {layer} {what} (relative error {error:.1e}, allowed "
                        f"{tolerance:.0e}), so its blocks transform outputs in an unknown way"
                    )
        if logits is None:
            return
        readout, final = acts.readout, acts.resid_final
        if self.run is not None and self.run_last is not None:
            whole = (self.last == self.run_last.to(self.device)[self.run]).nonzero()[:, 0]
            readout, final, logits = readout.select_prompts(whole), final[whole], logits[self.run[whole]]
            if not len(whole):
                return
        ours = readout.logits(final)
        error = float((ours - logits.to(ours.device, ours.dtype)).abs().max() / (ours.abs().max() + 1e-30))
        if not error <= tolerance:
            raise InputError(
                f"{name} is not supported: final norm and unembedding do not reproduce the model's logits (relative "
                f"error {error:.1e}, allowed {tolerance:.0e})"
            )


def _post_scales(posts: list[NormView | None], raw: list[Tensor]) -> Tensor:
    columns = [
        x.new_ones(len(x)) if post is None else norm_scale(x, eps=post.eps, center=post.center)
        for post, x in zip(posts, raw, strict=True)
    ]
    return torch.stack(columns, dim=1)
