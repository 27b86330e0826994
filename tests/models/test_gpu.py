"""The same numbers on a GPU as on the CPU: on a real GPU if there is one, and on a pretended
one.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import sweep
import torch
from pretend_gpu import on_a_pretended_gpu
from sweep import CALLS, Case
from tolerance import assert_close
from transformers import PreTrainedTokenizerFast

import icl_lens as il

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]

REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
NOT_PRETENDED = {"Activations.load"}
"""Functions that ask the device itself for tensors."""


PRETENDED = [("gpt2", "pretended"), ("llama_gqa", "pretended")]
ALL_REAL = [pytest.param((name, "real"), marks=REAL) for name in ("gpt2", "llama_gqa", "gptj")]


def in_turn() -> Iterator[Any]:
    """Yield every function with a family on a pretended GPU, which take turns, and with all
    families on a real one.
    """
    for number, name in enumerate(sorted(CALLS.keys() - NOT_PRETENDED)):
        yield pytest.param(
            PRETENDED[number % 2], name, id=f"{PRETENDED[number % 2][0]}-pretended-{name}"
        )
    for real_family in ALL_REAL:
        for name in sorted(CALLS):
            yield pytest.param(
                real_family.values[0],
                name,
                id=f"{real_family.values[0][0]}-real-{name}",
                marks=REAL,
            )


@pytest.fixture(scope="module")
def pair(request: Any, family_folder: Any) -> Iterator[tuple[Case, Case, str]]:
    """A tiny model on the CPU and on a GPU, each with the same prompts, and the kind of GPU."""
    name, kind = request.param
    folder = family_folder(name)
    ours, theirs = (
        il.load_model(
            str(folder), device=device, tokenizer=PreTrainedTokenizerFast.from_pretrained(folder)
        )
        for device in ("cpu", "cuda" if kind == "real" else "cpu")
    )
    with on_a_pretended_gpu(theirs) if kind == "pretended" else nullcontext():
        yield *(Case(model, sweep.PROMPTS, sweep.OTHERS) for model in (ours, theirs)), kind


@pytest.mark.parametrize("pair", [*PRETENDED, *ALL_REAL], indirect=True, ids="-".join)
def test_what_a_gpu_refuses_is_refused(pair: Any) -> None:
    """Otherwise the test below would say nothing."""
    there, here = pair[1].targets, pair[0].targets
    assert there.device.type == "cuda"
    assert here.device.type == "cpu"
    assert (there + 1).cpu().device.type == "cpu"
    assert torch.zeros(3, device=there.device).device.type == "cuda"
    for mixed in (
        lambda: here + there,
        lambda: here[there.clamp(max=3)],
        lambda: torch.where(there > 0, here, here),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


@pytest.mark.parametrize(("pair", "name"), list(in_turn()), indirect=["pair"])
def test_every_function_gives_the_same(pair: Any, name: str) -> None:
    cpu, gpu, _ = pair
    ours, theirs = (list(sweep.numbers(CALLS[name].function(case))) for case in (cpu, gpu))
    assert ours
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        infinite = ~x.isfinite()
        assert torch.equal(~y.isfinite().cpu(), infinite)
        assert_close(
            y.cpu().masked_fill(infinite, 0).float(), x.masked_fill(infinite, 0).float(), scale=10
        )
