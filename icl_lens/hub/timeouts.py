"""One time limit for a Hub that accepts connections and never answers."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class HubTimeout(Exception):
    """Nothing has come back for longer than the limit."""


def timeout_seconds() -> float:
    """Seconds to wait for a sign of life: HF_HUB_ETAG_TIMEOUT, else 10."""
    try:
        return max(1.0, float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "")))
    except ValueError:
        return 10.0


def run_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, or Silent after `seconds`: looking up a name knows no time limit of its own."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True, name="icl_lens-hub")
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome:
        raise HubTimeout(f"no answer within {seconds:g} seconds")
    return outcome["value"]


@contextmanager
def request_timeout(seconds: float) -> Iterator[None]:
    """Inside, no request of huggingface_hub waits longer than `seconds`, nor is one tried again after such silence.

    Left alone, its client waits 10 seconds, then six times a minute, for each file.
    """
    from huggingface_hub.utils import get_session

    client: Any = get_session()
    before = client.event_hooks
    waiting_since: dict[int, float] = {}

    def asked(request: Any) -> None:
        thread = threading.get_ident()
        if time.monotonic() - waiting_since.get(thread, float("inf")) >= seconds:
            raise HubTimeout(f"no answer within {seconds:g} seconds")
        waiting_since.setdefault(thread, time.monotonic())
        own = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            what: min(own.get(what) or seconds, seconds) for what in ("connect", "read", "write", "pool")
        }

    def answered(response: Any) -> None:
        waiting_since.pop(threading.get_ident(), None)

    client.event_hooks = {
        "request": [*before.get("request", ()), asked],
        "response": [*before.get("response", ()), answered],
    }
    try:
        yield
    finally:
        client.event_hooks = before
