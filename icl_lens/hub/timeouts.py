"""Timeouts for a Hub that accepts connections and does not answer."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class HubTimeout(Exception):
    """No response within the timeout."""


def timeout_seconds() -> float:
    """Return the seconds to wait for a response: HF_HUB_ETAG_TIMEOUT, else 10."""
    try:
        return max(1.0, float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "")))
    except ValueError:
        return 10.0


def run_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Run `call`, or raise HubTimeout after `seconds`; name lookups have no timeout of their own."""
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
    """Limit each request of huggingface_hub inside the block to `seconds`, and prevent retries after a timeout.

    By default its client waits 10 seconds and then six times for a minute, for each file.
    """
    from huggingface_hub.utils import get_session

    client: Any = get_session()
    before = client.event_hooks
    waiting_since: dict[int, float] = {}

    def on_request(request: Any) -> None:
        thread = threading.get_ident()
        if time.monotonic() - waiting_since.get(thread, float("inf")) >= seconds:
            raise HubTimeout(f"no answer within {seconds:g} seconds")
        waiting_since.setdefault(thread, time.monotonic())
        own = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            what: min(own.get(what) or seconds, seconds) for what in ("connect", "read", "write", "pool")
        }

    def on_response(response: Any) -> None:
        waiting_since.pop(threading.get_ident(), None)

    client.event_hooks = {
        "request": [*before.get("request", ()), on_request],
        "response": [*before.get("response", ()), on_response],
    }
    try:
        yield
    finally:
        client.event_hooks = before
