"""Progress bars of long computations: when they appear, that there is one at a time, and how to
switch them off.
"""

import inspect
import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial

import pytest

import icl_lens as il
from icl_lens.runs import progress
from icl_lens.runs.progress import progress_callback, progress_switch, steps


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def is_impatient(monkeypatch):
    """Bars appear after half a second."""
    monkeypatch.setattr(progress, "PATIENCE", 0.5)


def test_a_long_step_shows_its_bar_before_it_ends_and_a_short_one_shows_none():
    with redirect_stderr(Terminal()) as terminal:
        with steps("scoring", 10) as advance:
            advance(1)
        assert "scoring" not in terminal.getvalue()
        with steps("scoring", 10):
            time.sleep(1)
            assert "scoring" in terminal.getvalue()


@pytest.mark.slow
def test_there_is_no_bar_without_a_terminal_and_none_if_it_is_switched_off():
    with redirect_stderr(Terminal()) as terminal:
        for block in (progress_callback(False), progress_switch(False)):
            with block, steps("scoring", 10):
                time.sleep(0.8)
        with progress_callback(False) as report:
            report("explaining", 1, 10)
    with redirect_stderr(io.StringIO()) as file, steps("scoring", 10):
        time.sleep(0.8)
    assert terminal.getvalue() + file.getvalue() == ""


def test_loops_below_a_function_with_progress_show_no_bar_of_their_own():
    stages = []
    with (
        redirect_stderr(Terminal()) as terminal,
        progress_callback(lambda *stage: stages.append(stage)) as report,
    ):
        report("explaining", 0, 5)
        with steps("scoring", 10):
            time.sleep(0.8)
    assert (stages, terminal.getvalue()) == ([("explaining", 0, 5)], "")


def test_explain_and_scores_say_how_far_they_are(gpt2, gpt2_batch, monkeypatch):
    """All steps of an explanation are counted, and all scores of sets in every way that they
    run.
    """
    stages = []
    options = {"k": 2, "n_ablated": 1, "n_random": 1, "prepend_bos": False}
    prompt = il.Prompt.parse("love : bar eight : foo one :", answer="foo")
    il.explain(gpt2, prompt, progress=lambda *stage: stages.append(stage), **options)
    assert stages == [("explaining", done, 5) for done in range(6)]
    counted = []
    monkeypatch.setattr("icl_lens.edits.score.steps", counting := Counting(counted))
    sets = [[il.Ablate(["L0H1"], positions=where)] for where in ("last", "all")] + [
        [il.RemovePosition(["L0H1"])]
    ]
    il.score(gpt2, gpt2_batch, sets)
    assert sum(counted) == counting.total == 3 * len(gpt2_batch)


# Functions of a model that run no pass, or one over the batch that they are given.
ONE_PASS = {"ablate_heads", "capture", "edited", "head_copying", "head_overlap", "live", "tokenize"}
ONE_PASS |= {"label_similarity", "patch_heads", "query_key_metric", "random_head_sets"}


@pytest.mark.slow
def test_every_function_of_several_passes_says_how_far_it_is():
    """They take `progress` or, over many prompts, `run`, which has it."""
    silent = set()
    for name in dir(il):
        function = getattr(il, name)
        if inspect.isfunction(function):
            names = list(inspect.signature(function).parameters)
            takes_model = names[:1] == ["model"] or name == "compare_models"
            if takes_model and not {"progress", "run"} & {*names}:
                silent.add(name)
    assert silent == ONE_PASS


SHOWING = {
    "generate": lambda m, b, **o: il.generate(m, b, max_new_tokens=2, **o),
    "head_to_head_effects": partial(il.head_to_head_effects, readers=["L2H0"], part="q"),
    "head_to_head_effects, gradient": lambda m, b, **o: il.head_to_head_effects(
        m, b, ["L2H0"], part="q", method="gradient", **o
    ),
    "attention_saliency": il.attention_saliency,
    "saliency_flow": il.saliency_flow,
    "indirect_effects": lambda m, b, **o: il.indirect_effects(m, b, b, **o),
    "vector_gains": lambda m, b, **o: il.vector_gains(m, il.task_vectors(m, b, **o), b, **o),
    "task_vectors": il.task_vectors,
    "function_vector": lambda m, b, **o: il.function_vector(m, b, ["L1H0"], **o),
    "whole_label_log_probs": il.whole_label_log_probs,
    "calibrated_scores": lambda m, b, **o: il.calibrated_scores(m, b, inputs=["one"], **o),
    "head_effects, gradient": lambda m, b, **o: il.head_effects(m, b, method="gradient", **o),
    "explain": lambda m, b, **o: il.explain(m, b.prompts[0], k=1, n_random=1, **o),
    "locate": lambda m, b, progress=None: il.locate(
        m, b, by="contrast", other_scores=False, run=il.Run(progress=progress)
    ),
    "repeated_token_scores": lambda m, b, **o: il.repeated_token_scores(m, n=1, n_tokens=4, **o),
}


class TimerThatIsUp:
    """A timer that does not wait: a bar that is closed before its timer is up is not shown."""

    def __init__(self, seconds: float, refresh: Callable[[], object]) -> None:
        self.start, self.daemon = refresh, False

    def cancel(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("name", SHOWING)
def test_a_long_call_shows_a_bar_unless_switched_off(name, gpt2, gpt2_batch, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 1e-9)
    monkeypatch.setattr(progress, "Timer", TimerThatIsUp)
    with redirect_stderr(Terminal()) as terminal:
        SHOWING[name](gpt2, gpt2_batch, progress=False)
    assert terminal.getvalue() == ""
    with redirect_stderr(Terminal()) as terminal:
        SHOWING[name](gpt2, gpt2_batch)
    assert any(unit in terminal.getvalue() for unit in ("it/s", "rows", "steps", "prompts"))


class Counting:
    """`steps` that keeps what it is advanced by."""

    def __init__(self, counted: list[int]) -> None:
        self.counted, self.total = counted, 0

    def __call__(self, what: str, total: int) -> "Counting":
        self.total = total
        return self

    def __enter__(self):
        return self.counted.append

    def __exit__(self, *error: object) -> None:
        """Leave the block."""
