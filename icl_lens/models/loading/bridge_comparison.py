"""Compare a bridge with the Hugging Face model that it was built from, so that the user's model is
what is measured.

A bridge runs attention code of its own. It does not see a `forward` that was replaced on a
module, and it may read a configuration otherwise than the model.

1. A model that a user built or changed in memory, or whose code is not of transformers, runs on a
   few tokens before its bridge is built (`probe`). The bridge runs on the same tokens after that
   (`check_probe`).
2. A model from files is not compared on loading, which would take two passes more
   (`defer_comparison`). Whatever needs the model
   before a batch was compared compares it on a few tokens first (`compare_deferred`): a pass
   with edits, the reading of a weight, or the processing of weights.
3. The first batch of each kind (padded or not, twice as long as before) is compared with the model
   itself, alone, row by row (`compare_batch`). For that, a copy that shares the weights has the
   modules that the bridge has replaced (`unbridged`).
4. Shortcuts that continue a prefix are only taken if earlier tokens do not read later ones
   (`reads_only_earlier_tokens`).
5. A difference beyond rounding is an InputError, unless a new bridge of the same model does not
   show it: then the bridge's weights were edited after it was built. Rounding is measured: the
   model runs once more, with noise of one rounding step on the output of every matrix.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from icl_lens.errors import InputError
from icl_lens.models.loading.bridge_causes import likely_cause
from icl_lens.models.loading.shared_weights import unbridged
from icl_lens.models.loading.supported import check_supported
from icl_lens.models.loading.user_tokenizer import copy_tokenizer, not_read_again
from icl_lens.models.passes.independent_rows import independent_rows
from icl_lens.models.passes.inference import inference_kwargs, log_probs_of
from icl_lens.models.passes.locking import model_lock, thread_noted
from icl_lens.models.passes.module_hooks import hooks_removed, package_of
from icl_lens.models.passes.offload import execution_device

N_PROBE_TOKENS = 8
"""Random tokens on which a model is compared before its first batch."""
MAX_ROUNDING_STEPS = 4.0
"""How many times as large as the effect of noise of one rounding step a difference may be."""
SHARE_TOLERANCE = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 1e-2}
"""The largest difference that is taken for rounding without measuring it, by the model's type: as a
share of the spread of the log-probabilities (`Difference.share`).
"""
COARSE_SHARE_TOLERANCE = 5e-2
"""The same for bfloat16, and for types with even fewer digits."""

# Model -> kinds of batches that were compared; models that are not compared (again).
_COMPARED: "WeakKeyDictionary[Any, set[tuple[bool, int]]]" = WeakKeyDictionary()
_EXEMPT: "WeakSet[Any]" = WeakSet()
_IS_CAUSAL: "WeakKeyDictionary[Any, bool]" = WeakKeyDictionary()
# Attribute of bridges, which copies of them have too.
_IS_DEFERRED = "_icl_lens_comparison_is_deferred"
_COMPARING_METHODS = ("forward", "enable_compatibility_mode", "process_weights")
# Model -> threads inside `comparison_postponed`.
_POSTPONED: "WeakKeyDictionary[Any, set[int]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Probe:
    """Log-probabilities of the Hugging Face model itself after each of a few tokens."""

    tokens: Int[Tensor, "1 pos"]
    log_probs: Float[Tensor, "pos d_vocab"]
    dtype: torch.dtype


def probe(hf_model: Any) -> Probe | None:
    """Run a Hugging Face model on a few random tokens; return None if it cannot run on tokens
    alone.
    """
    try:
        config = hf_model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(int(config.vocab_size), (1, N_PROBE_TOKENS), generator=generator)
        return Probe(tokens, hugging_face_log_probs(hf_model, tokens), hf_model.dtype)
    except Exception:  # models of other inputs, or whose kernels need another device
        return None  # there is nothing to compare with


def hugging_face_log_probs(
    hf_model: Any, tokens: Int[Tensor, "1 pos"]
) -> Float[Tensor, "read d_vocab"]:
    """Return the log-probabilities of a Hugging Face model after each token of one row, in
    evaluation mode.

    In `last_logits_only`, they are those after the last token.
    """
    parameters = (parameter.device for parameter in hf_model.parameters() if not parameter.is_meta)
    tokens = tokens.to(execution_device(hf_model) or next(parameters, torch.device("cpu")))
    training = [module for module in hf_model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
        if getattr(hf_model.config, "output_attentions", False):
            options["output_attentions"] = False  # a bridge's setting; all layers' would be kept
        with torch.no_grad():
            logits = hf_model(input_ids=tokens, **options).logits
    finally:
        for module in training:
            module.training = True
    return log_probs_of(logits[0]).cpu()


@contextmanager
def last_logits_only(hf_model: Any) -> Iterator[None]:
    """Compute logits after the last token only, in the block: those of a long row take more memory
    than the rest of its pass.

    If the unembedding has hooks, which may count on all positions, all logits are computed.
    """
    unembedding = getattr(hf_model, "get_output_embeddings", lambda: None)()
    is_module = isinstance(unembedding, nn.Module)
    if not is_module or unembedding._forward_pre_hooks or unembedding._forward_hooks:
        yield
        return

    def select_last(module: Any, args: Any) -> Any:
        return (args[0][..., -1:, :], *args[1:]) if args else args

    handle = unembedding.register_forward_pre_hook(select_last)
    try:
        yield
    finally:
        handle.remove()


def bridge_log_probs(
    model: Any, tokens: Int[Tensor, "row pos"]
) -> Float[Tensor, "row pos d_vocab"]:
    """Return the log-probabilities of a bridge after each token of rows of one length."""
    tokens = tokens.to(model.cfg.device)
    with torch.no_grad(), independent_rows(model), inference_kwargs(model) as arguments:
        logits = model(
            tokens, attention_mask=torch.ones_like(tokens), return_type="logits", **arguments
        )
    return log_probs_of(logits).cpu()


def reads_only_earlier_tokens(model: Any) -> bool:
    """Return whether a model's output at a token does not depend on later ones, as one-token rows
    over a prefix need.

    Two rows that differ in their last token run once per model, in one pass without edits.
    """
    if model not in _IS_CAUSAL:
        generator = torch.Generator().manual_seed(0)
        n_vocab = int(model.cfg.d_vocab)
        first = torch.randint(
            n_vocab, (1, min(N_PROBE_TOKENS, int(model.cfg.n_ctx))), generator=generator
        )
        second = first.clone()
        second[0, -1] = (second[0, -1] + 1) % n_vocab
        before, after = bridge_log_probs(model, torch.cat([first, second]))[:, :-1]
        dtype = model.W_U.dtype
        _IS_CAUSAL[model] = difference_of(before, after, dtype).is_within_tolerance(dtype)
    return _IS_CAUSAL[model]


def check_probe(model: Any, expected: Probe | None, hf_model: Any = None) -> None:
    """Raise InputError if a new bridge differs from the model itself, by more than rounding, on the
    probe's tokens.

    A model whose own output is NaN cannot be compared; every function refuses what it gives.
    `hf_model` is the model as the user gave it, in which the likely cause is looked for.
    """
    if expected is None or bool(expected.log_probs.isnan().any()):
        return
    hooked: list[bool] = []
    handle = (
        model.unembed.register_forward_hook(lambda *_: hooked.append(True))
        if hasattr(model, "unembed")
        else None
    )
    try:
        difference = difference_of(
            expected.log_probs, bridge_log_probs(model, expected.tokens)[0], expected.dtype
        )
    except InputError:
        raise
    except Exception as error:  # of many types: the bridge cannot run what the model runs
        if is_refused(model):
            return
        raise InputError(
            f"TransformerLens cannot run {_class_name(model)}, which runs without it "
            f"({type(error).__name__}: {(str(error) or 'no reason').splitlines()[0]}); "
            f"{likely_cause(model, hf_model)}"
        ) from error
    finally:
        if handle is not None:
            handle.remove()
    if (
        handle is not None and not hooked and not is_refused(model)
    ):  # such as a forward that runs another model
        raise InputError(
            f"{_class_name(model)} must run its own modules, so that they can be read and edited, "
            f"but does not; {likely_cause(model, hf_model)}"
        )
    if not _is_rounding(model, expected.tokens, difference, expected.dtype):
        if is_refused(model):
            return
        raise _difference_error(model, difference, hf_model, "")


def defer_comparison(model: Any) -> None:
    """Let the first batch compare a new bridge of a model from files, and `compare_deferred` what
    comes before it.

    TransformerLens' own methods compare it first, too: passes of the user, and the processing of
    weights, which leaves nothing to compare with.
    """
    vars(model)[_IS_DEFERRED] = True
    for name in _COMPARING_METHODS:
        vars(model)[name] = MethodType(_comparing_first(name), model)


def _comparing_first(name: str) -> Callable[..., Any]:
    """Return a method that compares a bridge if that was deferred, and then runs its class's method
    `name`.
    """

    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        compare_deferred(model)
        return getattr(type(model), name)(model, *args, **kwargs)

    return method


def compare_deferred(model: Any) -> None:
    """Compare a bridge on a few tokens if its comparison was deferred and no batch has been
    compared since.

    Hooks are removed for that. Raise InputError if the bridge differs from the model itself.
    """
    if _IS_DEFERRED not in vars(model) or get_ident() in _POSTPONED.get(model, ()):
        return
    with model_lock(model), comparison_postponed(model):
        if _IS_DEFERRED in vars(model):  # no other thread has compared it while this one waited
            with hooks_removed(model):
                _compare_on_probe(model)
            _end_deferral(model)


def _end_deferral(model: Any) -> None:
    """Note that a bridge was compared, and give it its class's methods again."""
    vars(model).pop(_IS_DEFERRED, None)
    for name in _COMPARING_METHODS:
        method = vars(model).get(name)
        if method is not None and package_of(method) == "icl_lens":  # not one of the user
            del vars(model)[name]


@contextmanager
def comparison_postponed(model: Any) -> Iterator[None]:
    """Let this thread use a bridge inside the `with` block before it is compared."""
    with thread_noted(_POSTPONED, model):
        yield


def _compare_on_probe(model: Any) -> None:
    """Raise InputError if a bridge differs from its model on a few tokens, unless its weights were
    edited.
    """
    with independent_rows(model):
        expected = probe(unbridged(model))
    try:
        check_probe(model, expected)
    except InputError:
        assert expected is not None
        if _new_bridge_differs(model, expected.tokens, expected.log_probs[-1:], expected.dtype):
            raise
        _EXEMPT.add(model)


def _kind(lengths: list[int]) -> tuple[bool, int]:
    """Return whether a batch is padded, and the kind of its longest row."""
    return len(set(lengths)) > 1, _length_kind(max(lengths))


def _length_kind(length: int) -> int:
    """Return the number of bits of a row's last position, which grows when lengths double."""
    return (length - 1).bit_length()


def is_new_kind(model: Any, last: Int[Tensor, " batch"]) -> bool:
    """Return whether no batch of this kind has been compared with the Hugging Face model yet, and
    this one can be.

    A HookedTransformer has no model to compare with, and processed weights replace those of the
    model.
    """
    if model in _EXEMPT or not _is_comparable(model):
        return False
    return _kind((last + 1).tolist()) not in _COMPARED.setdefault(model, set())


def compare_batch(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    last: Int[Tensor, " batch"],
    logits: Float[Tensor, "batch d_vocab"],
) -> None:
    """Raise InputError if logits after the prompts of a new kind of batch are not those of the
    model itself.

    The shortest row is compared, which sees padding if there is any, and the longest too if it
    would be of another kind. Log-probabilities must agree up to rounding.
    """
    lengths = (last + 1).tolist()
    kind, compared = _kind(lengths), _COMPARED.setdefault(model, set())
    compared.add(kind)
    rows = [lengths.index(min(lengths))]
    if _length_kind(min(lengths)) != _length_kind(max(lengths)):
        rows.append(lengths.index(max(lengths)))
    dtype = model.W_U.dtype
    for row in rows:
        alone = tokens[row : row + 1, : lengths[row]]
        try:
            with model_lock(model), independent_rows(model):
                original = unbridged(model)
                with last_logits_only(original):
                    expected = hugging_face_log_probs(original, alone)[-1:]
        except Exception:  # as in `probe`
            _EXEMPT.add(model)
            return
        difference = difference_of(expected, log_probs_of(logits[row : row + 1]).cpu(), dtype)
        if _is_rounding(model, alone, difference, dtype, last_only=True):
            continue
        if not _new_bridge_differs(model, alone, expected, dtype):
            _EXEMPT.add(model)  # its weights were edited after it was built
            return
        compared.discard(kind)
        raise _difference_error(model, difference, None, f" after prompt {row}")
    _end_deferral(model)


def _is_comparable(model: Any) -> bool:
    """Return whether a bridge still holds the model that it was built from, with its weights as
    they were.
    """
    original = getattr(model, "original_model", None)
    is_processed = getattr(model, "compatibility_mode", False) or getattr(
        model, "_weights_processed", False
    )
    return isinstance(original, nn.Module) and hasattr(original, "config") and not is_processed


@dataclass(frozen=True)
class Difference:
    """How far two sets of log-probabilities of the same tokens are apart."""

    nats: float
    """The largest difference."""
    share: float
    """The difference in parts of the spread of the log-probabilities, as compared with rounding.

    In float32 and float64, it is that of the position with the largest. In half precision, where
    rounding sends single tokens to other experts, it is that of the median position.
    """

    def is_within_tolerance(self, dtype: torch.dtype) -> bool:
        """Return whether the difference is taken for rounding without measuring it."""
        return self.share <= SHARE_TOLERANCE.get(dtype, COARSE_SHARE_TOLERANCE)


def difference_of(
    expected: Float[Tensor, "pos d_vocab"],
    measured: Float[Tensor, "pos d_vocab"],
    dtype: torch.dtype,
) -> Difference:
    """Return how far log-probabilities are from the expected ones; infinite for other sizes and for
    NaN.
    """
    if expected.shape != measured.shape:
        return Difference(math.inf, math.inf)
    expected, measured = expected.double(), measured.double()
    change = (measured - expected).abs()
    spread = (expected - expected.mean(-1, keepdim=True)).abs().amax(-1)
    shares = change.amax(-1) / (spread + 1e-30)
    share = float(shares.max() if dtype in (torch.float32, torch.float64) else shares.median())
    return Difference(float(change.max()), math.inf if math.isnan(share) else share)


def _is_rounding(
    model: Any,
    tokens: Int[Tensor, "1 pos"],
    difference: Difference,
    dtype: torch.dtype,
    *,
    last_only: bool = False,
) -> bool:
    """Return whether rounding explains a difference, by how far noise of one rounding step moves
    the model.
    """
    if difference.is_within_tolerance(dtype):
        return True
    if not _is_comparable(model) or not math.isfinite(difference.share):
        return False
    step = torch.finfo(dtype).eps
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        step = 2.0**-11  # TensorFloat-32
    try:
        with model_lock(model), independent_rows(model):
            original = unbridged(model)
            clean = hugging_face_log_probs(original, tokens)
            with _rounding_noise(original, step):
                noisy = hugging_face_log_probs(original, tokens)
    except Exception:  # the model's own code does not run any more
        return False
    where = slice(-1, None) if last_only else slice(None)
    effect_of_noise = difference_of(clean[where], noisy[where], dtype)
    return difference.share <= MAX_ROUNDING_STEPS * effect_of_noise.share


@contextmanager
def _rounding_noise(hf_model: Any, step: float) -> Iterator[None]:
    """Multiply the outputs of all modules with a matrix by 1 + step · normal noise."""
    generator = torch.Generator().manual_seed(0)

    def add_noise(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        return output * (1 + step * torch.randn(output.shape, generator=generator).to(output))

    with ExitStack() as stack:
        for module in hf_model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim > 1:
                stack.callback(module.register_forward_hook(add_noise).remove)
        yield


def _new_bridge_differs(
    model: Any,
    tokens: Int[Tensor, "1 pos"],
    expected: Float[Tensor, "1 d_vocab"],
    dtype: torch.dtype,
) -> bool:
    """Return whether a new bridge of the same model also differs from `expected`, so that no edit
    of weights is why.

    A new bridge that cannot be built or run differs too.
    """
    from transformer_lens.model_bridge import TransformerBridge

    with model_lock(model):
        shared = unbridged(model)
    tokenizer = copy_tokenizer(model.tokenizer)
    try:
        with not_read_again(tokenizer):
            new = TransformerBridge.boot_transformers(
                str(model.cfg.model_name), hf_model=shared, tokenizer=tokenizer, dtype=dtype
            ).eval()
        new_log_probs = bridge_log_probs(new, tokens)[0, -1:]
    except Exception:
        return True
    difference = difference_of(expected, new_log_probs, dtype)
    return not _is_rounding(new, tokens, difference, dtype, last_only=True)


def is_refused(model: Any) -> bool:
    """Return whether every function refuses the model anyway, with a reason of its own."""
    try:
        check_supported(model)
    except InputError:
        return True
    return False


def _difference_error(model: Any, difference: Difference, hf_model: Any, where: str) -> InputError:
    return InputError(
        f"TransformerLens computes other log-probabilities than {_class_name(model)} itself: they "
        f"differ by up to {difference.nats:.2g} nats{where}, more than rounding explains; "
        f"{likely_cause(model, hf_model)}"
    )


def _class_name(model: Any) -> str:
    return type(getattr(model, "original_model", model)).__name__
