"""Threads take turns on a model, first come, first served: each waits for at most a pass of every
thread before it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from threading import Event, Thread, get_ident

import pytest
import torch
import waits

import icl_lens as il
from icl_lens.models.active_edits import active_edits
from icl_lens.models.passes import locking
from icl_lens.models.view import ModelView

HEADS = [il.Head(1, 2), il.Head(2, 0)]
PROMPT = "love : bar one : foo two :"
DEADLINE = 30


class Model:
    """Something that can be locked."""


def n_waiting(model):
    return len(locking._lock_of(model).queue)


def wait_until(condition):
    """Wait for another thread; fail instead of hanging."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def start(function):
    thread = Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(*threads):
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


@contextmanager
def thread_at_first_pass(model, function):
    """Start `function` in a thread when the first pass of the block begins, and go on once it waits
    for its turn.
    """
    threads = []

    def begin(module, args):
        if not threads:
            threads.append(start(function))
            wait_until(lambda: n_waiting(model) > 0)

    handle = model.original_model.register_forward_pre_hook(begin)
    begin.__module__ = "icl_lens"  # a hook of a user would change how passes are run
    try:
        yield
    finally:
        handle.remove()
    join(*threads)


def test_passes_run_in_the_order_in_which_threads_ask():
    model, order = Model(), []

    def run(name):
        with locking.model_lock(model):
            order.append(name)

    with locking.model_lock(model):
        threads = []
        for name in "abc":
            threads.append(start(lambda name=name: run(name)))
            wait_until(lambda: n_waiting(model) == len(threads))
        with locking.model_lock(model):  # re-entrant
            order.append("nested")
    run("again")
    join(*threads)
    assert order == ["nested", "a", "b", "c", "again"]


def test_a_thread_that_loops_passes_a_waiting_thread_at_most_once():
    model, is_done = Model(), Event()
    log = []

    def loop():
        while not is_done.is_set():
            with locking.model_lock(model):
                time.sleep(0.0002)
                log.append("before us" if n_waiting(model) else "alone")

    thread = start(loop)
    for _ in range(100):
        with locking.model_lock(model):
            log.append("us")
    is_done.set()
    join(thread)
    assert ("before us", "before us") not in pairwise(log)
    assert "before us" in log


def test_a_short_function_ends_before_a_long_one_that_began_earlier(gpt2, gpt2_batch):
    ended = []

    def score():
        il.score(gpt2, gpt2_batch)
        ended.append("score")

    with thread_at_first_pass(gpt2, score):
        il.explain(gpt2, PROMPT, k=2, n_random=2)
        ended.append("explain")
    assert ended == ["score", "explain"]


def test_a_block_waits_for_a_function_whose_passes_go_on(gpt2):
    alone = il.explain(gpt2, PROMPT, k=2, n_random=2).to_dict()
    running = []

    def edit():
        with il.ablate_heads(gpt2, HEADS):
            running.append(dict(locking._lock_of(gpt2).functions))

    with thread_at_first_pass(gpt2, edit):  # the block would change the passes that are left
        explained = il.explain(gpt2, PROMPT, k=2, n_random=2).to_dict()
    assert running == [{}]
    assert explained == alone


def test_a_pass_behind_a_block_that_waits_for_a_function_stops_nobody():
    """The block waits for the function, the pass for the block, and the function's own pass goes
    first.
    """
    model, order = Model(), []

    def block():
        with locking.model_lock(model, block=True):
            order.append("block")

    def one_pass():
        with locking.model_lock(model):
            order.append("pass")

    with locking.model_reserved(model):
        threads = [start(block)]
        wait_until(lambda: n_waiting(model) == 1)
        threads.append(start(one_pass))
        wait_until(lambda: n_waiting(model) == 2)
        with locking.model_lock(model):
            order.append("function")
    join(*threads)
    assert order == ["function", "block", "pass"]


def test_a_new_function_waits_behind_a_block_and_is_refused_while_it_is_open():
    model, outcome = Model(), []

    def use():
        try:
            with locking.model_reserved(model):
                outcome.append("used")
        except il.InputError as error:
            outcome.append(str(error))

    is_open, may_close = Event(), Event()

    def block():
        with locking.model_lock(model, block=True):
            is_open.set()
            may_close.wait(DEADLINE)

    with locking.model_lock(model):
        threads = [start(block)]
        wait_until(lambda: n_waiting(model) == 1)
        threads.append(start(use))
        time.sleep(0.05)
        assert not outcome
    is_open.wait(DEADLINE)
    join(threads[1])
    may_close.set()
    join(threads[0])
    assert len(outcome) == 1
    assert "another thread" in outcome[0]
    use()
    assert outcome[1] == "used"


def test_functions_with_edits_of_their_own_do_not_wait_for_each_other_for_ever(gpt2, gpt2_batch):
    def texts(_):
        return il.generate(
            gpt2, gpt2_batch[:2], [[il.Ablate(HEADS)]], max_new_tokens=2, temperature=1.0
        ).texts

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(texts, range(8)))) == 1


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue():
    model = Model()
    lock = locking._lock_of(model)

    def interrupted():
        lock.changed.wait = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        try:
            with pytest.raises(KeyboardInterrupt), locking.model_lock(model):
                pass
        finally:
            del lock.changed.wait

    with locking.model_lock(model):
        join(start(interrupted))
        assert not lock.queue
    with locking.model_lock(model):
        assert lock.thread == get_ident()


def test_hooks_of_another_threads_pass_are_not_taken_for_edits(gpt2, gpt2_batch):
    edits_and_hooks = []
    view = ModelView.of(gpt2)

    def look():
        edits_and_hooks.append((active_edits(view), view.has_hooks))

    with thread_at_first_pass(gpt2, look):
        il.capture(gpt2, gpt2_batch)
    assert edits_and_hooks == [((), False)]


@pytest.mark.slow
def test_threads_give_the_numbers_of_one_thread_bit_for_bit(gpt2, gpt2_batch):
    sets = [[], [il.Ablate(HEADS)], [il.Ablate(HEADS, positions="all")]]
    functions = [
        lambda: il.score(gpt2, gpt2_batch, sets),
        lambda: il.head_effects(gpt2, gpt2_batch).log_prob,
        lambda: il.head_effects(gpt2, gpt2_batch, positions="all").log_prob,
        lambda: il.head_log_prob_increase(il.capture(gpt2, gpt2_batch), gpt2_batch.answer_tokens),
        lambda: il.demonstration_effects(gpt2, gpt2_batch).log_prob,
    ]
    alone = [function() for function in functions]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda function: function(), functions * 8))
    for number, values in enumerate(together):
        torch.testing.assert_close(
            values, alone[number % len(functions)], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.slow
def test_no_thread_gets_the_model_twice_while_another_waits(icl_mini):
    """Four functions and a live view run at the same time, and all get on."""
    turns, finished, seconds = waits.measure(icl_mini, n_edits=2)
    table = waits.table(turns, finished, seconds).set_index("thread")
    assert {*table.index} == {"explain", "head_effects", "locate", "trace", waits.VIEW}
    assert (table["calls"] > 0).all()
    assert table["turns of one other thread meanwhile"].max() == 1
