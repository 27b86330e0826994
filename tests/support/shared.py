"""Shared fixtures: tiny models of every family, loaded through the package's own loader."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browsers
import families
import faults
import jaxtyping
import pytest
import torch
from annotations import begin_test, lighter
from tolerance import Float64
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

jaxtyping.jaxtyped = lighter(jaxtyping.jaxtyped)  # before the package is imported

from planted import Kind, Planted, build  # noqa: E402
from small_tokenizers import tokenizer_of  # noqa: E402

import icl_lens as il  # noqa: E402
from icl_lens.models.checkpoints.gguf_header import cached_parser  # noqa: E402
from icl_lens.models.checkpoints.installed import SMOLLM2  # noqa: E402

PROMPTS = [
    il.Prompt.parse(families.PROMPT, answer="foo"),
    il.Prompt.parse("happy : bar sad : bar three : foo nine :", answer="foo"),
    il.Prompt.parse("cat : foo the red : bar a blue :", answer="bar"),
]
"""Ragged: 14, 11 and 10 tokens; four, three and two demonstrations."""
SEVERAL = torch.tensor([[7, -1, 12, 40], [-1, 4, -1, -1], [96, 3, -1, 0]])
"""Tokens to compare each prompt's answer with: three, one and three, with gaps (-1)."""
IOI = "When Mary and John went to the store, John gave a drink to"
CATEGORIES = {
    "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
    "number": ["eight", "two", "one", "nine", "three"],
}
"""Words that the tiny models know: those of the task sentiment-number in the file `words`."""

QUICK_FAMILIES = {"gpt2", "gptj", "llama_gqa", "gemma2", "qwen3", "bloom"}
FEW_FAMILIES = {"test_processed_weights": {"gpt2", "llama_gqa", "gemma2"}}
ON_ALL_FAMILIES = {"test_families", "test_sweep_half", "test_sweep_numbers"}

os.environ["OMP_NUM_THREADS"] = "1"  # in the programs that tests start
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow if none of their families is quick.

    Quick are `QUICK_FAMILIES` or those of `FEW_FAMILIES`; in the files `ON_ALL_FAMILIES`, all but
    `families.SLOW`.
    """
    for item in items:
        values = getattr(item, "callspec", None)
        if values is None:
            continue
        used = {
            value for value in values.params.values() if isinstance(value, str)
        } & families.CONFIGS.keys()
        quick = FEW_FAMILIES.get(item.path.stem, QUICK_FAMILIES)
        quick = (
            families.CONFIGS.keys() - families.SLOW if item.path.stem in ON_ALL_FAMILIES else quick
        )
        if used and not used & quick:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Omit packages and tests from every later search for garbage: there are more than a million
    objects.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    begin_test()


def pair_prompts(pairs: str) -> list[il.Prompt]:
    """Return three prompts of two of three pairs, whose query is the third."""
    demonstrations = [il.Demonstration(*pair.split()) for pair in pairs.split(",")]
    labels = [pair.label for pair in demonstrations]
    return [
        il.Prompt(
            [*demonstrations[:place], *demonstrations[place + 1 :]],
            pair.text,
            pair.label,
            labels=labels,
        )
        for place, pair in enumerate(demonstrations)
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a real browser; skip the test where there is none."""
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture(autouse=True)
def empty_checks_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let commands find no checks of other tests or of the user's."""
    folder = tmp_path_factory.mktemp("checks")
    monkeypatch.setattr("icl_lens.cli.stored_checks.checks_folder", lambda: folder)


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """Switch off the annotation checks that run under pytest, to see the error a user would see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make libraries compute in float64 what they otherwise compute in float32, for tests of models
    in float64.

    Also where a backward pass runs blocks again, in which the mode around it is not active.
    """
    again = partial(checkpoint, context_fn=lambda: (nullcontext(), Float64()))
    monkeypatch.setattr("icl_lens.edits.gradients.checkpoint", again)
    with Float64():
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[Any, str, str]]:
    """Return a function that runs `icl-lens` in this process; it returns exit code, standard
    output, standard error.
    """
    return partial(faults.call, monkeypatch, capsys)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """SmolLM2-135M-Instruct with 4-bit weights, a real model, converted into a cache of the module's
    tests, which is deleted again: it takes half a gigabyte. Skip the test where it is not installed.
    """
    require_smollm2()
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        loaded = il.load_model("smollm2-135m", device="cpu")
    yield loaded
    shutil.rmtree(cache)


@pytest.fixture(scope="module")
def smollm2_hf() -> SimpleNamespace:
    """The same file, loaded by transformers alone: its model and tokenizer."""
    require_smollm2()
    where = {"gguf_file": SMOLLM2.path.name}
    with cached_parser("the file"):  # the same numbers in a third of the time
        loaded = AutoModelForCausalLM.from_pretrained(
            SMOLLM2.path.parent, dtype=torch.float32, **where
        )
        tokenizer = AutoTokenizer.from_pretrained(SMOLLM2.path.parent, **where)
    loaded.set_attn_implementation("eager")
    return SimpleNamespace(model=loaded.eval(), tokenizer=tokenizer)


def require_smollm2() -> None:
    """Skip the test unless SmolLM2 is installed."""
    if SMOLLM2.status != "installed":
        pytest.skip(f"{SMOLLM2.name} is not installed: {SMOLLM2.command}")


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a word list with `CATEGORIES`."""
    path = tmp_path_factory.mktemp("words") / "words.json"
    path.write_text(json.dumps({"categories": CATEGORIES}))
    return path


@pytest.fixture
def gguf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder, used by this test only, that converted GGUF files are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "icl_lens" / "gguf"


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to the Hugging Face folder of its tiny model, saved once per
    session.
    """
    root = tmp_path_factory.mktemp("families")

    @cache
    def folder(name: str) -> Path:
        families.save(name, root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def tiny(family_folder: Callable[[str], Path]) -> Path:
    """The folder of the tiny GPT-2."""
    return family_folder("gpt2")


@pytest.fixture(scope="session")
def load_tiny(family_folder: Callable[[str], Path]) -> Callable[..., Any]:
    """Return a function that loads a family's tiny model as users do; the same arguments give the
    same object.
    """

    @cache
    def load(name: str, **kwargs: Any) -> Any:
        # The model is shared with tests outside the block.
        assert not Float64.is_active or kwargs.get("dtype") == torch.float64
        folder = family_folder(name)
        # Passed explicitly: transformers would rebuild some families' tokenizers from their own
        # classes.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        with Float64() if kwargs.get("dtype") == torch.float64 else nullcontext():
            return il.load_model(str(folder), device="cpu", tokenizer=tokenizer, **kwargs)

    return load


@pytest.fixture(scope="session")
def family_run(
    load_tiny: Callable[..., Any], family_folder: Callable[[str], Path]
) -> Callable[[str], SimpleNamespace]:
    """Return a function from a family to its model, batch of `PROMPTS`, activations and float64
    Hugging Face model.
    """

    @cache
    def run(name: str) -> SimpleNamespace:
        model = load_tiny(name)
        batch = il.tokenize(model, PROMPTS, prepend_bos=False)
        hf = AutoModelForCausalLM.from_pretrained(family_folder(name), **families.EAGER)
        return SimpleNamespace(
            model=model, batch=batch, acts=il.capture(model, batch), hf=hf.double().eval()
        )

    return run


@pytest.fixture(scope="session")
def gpt2(load_tiny: Callable[..., Any]) -> Any:
    return load_tiny("gpt2")


@pytest.fixture(scope="session")
def gpt2_batch(gpt2: Any) -> il.PromptBatch:
    return il.tokenize(gpt2, PROMPTS)


@pytest.fixture(scope="session")
def gpt2_acts(gpt2: Any, gpt2_batch: il.PromptBatch) -> il.Activations:
    return il.capture(gpt2, gpt2_batch)


@pytest.fixture(scope="session")
def icl_mini() -> Any:
    return il.load_model("icl-mini", device="cpu")


def ragged(model: Any) -> il.PromptBatch:
    """Return `PROMPTS` as tokens of a model."""
    return il.tokenize(model, PROMPTS, prepend_bos=False)


def hf_twin(family_folder: Callable[[str], Path], name: str) -> Any:
    """Return a family's tiny model as transformers loads it, in float64."""
    folder = family_folder(name)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, **families.EAGER
    ).eval()


@pytest.fixture(scope="module", params=["gpt2", "llama_gqa"])
def ioi_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """(TransformerLens model, Hugging Face twin) with a tokenizer that knows the words of `IOI`."""
    tokenizer = tokenizer_of(
        "byte" if request.param == "gpt2" else "metaspace", IOI.replace(",", "")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "VOCAB_SIZE", len(tokenizer))
        folder = tmp_path_factory.mktemp(request.param)
        families.build(request.param).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = il.load_model(
        str(folder), device="cpu", tokenizer=PreTrainedTokenizerFast.from_pretrained(folder)
    )
    return model, AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).double().eval()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Planted, Any]]:
    """Return a function from a kind and a seed to (truth, planted model), each built once."""
    root = tmp_path_factory.mktemp("planted")

    @cache
    def get(kind: Kind, seed: int = 0) -> tuple[Planted, Any]:
        truth = build(kind, root / f"{kind}-{seed}", seed=seed)
        return truth, il.load_model(str(truth.folder), device="cpu")

    return get
