"""Render conversations with a tokenizer's chat template, within limits of time and size.

A chat template is a program that comes with a model. transformers runs it in a sandbox, which keeps
it from reading or writing anything but does not end it: nested loops run for ever, and one
operation such as 10 ** 10 ** 9 cannot be interrupted from within its process.

1. A new Python process, which holds nothing but transformers' own renderer, renders the
   conversations.
2. It ends itself after `SECONDS`, by a timer that needs no cooperation of the template; on Linux,
   its memory is limited, too.
3. A text longer than `CHARACTERS` is not passed on.
"""

import json
import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

from icl_lens.errors import InputError

SECONDS = 5
CHARACTERS = 1_000_000
_START_SECONDS = 120
"""Limit for starting the process on a machine that is busy."""
_TIMED_OUT = 1
"""The exit status of faulthandler's timer."""

_RENDERER = """
import faulthandler, importlib.util, json, os, sys, types

# Packages without their contents, since importing all of transformers takes three times as long.
folders = importlib.util.find_spec("transformers").submodule_search_locations
try:
    for name, inside in (("transformers", ""), ("transformers.utils", "utils")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [os.path.join(folder, inside) for folder in folders]
    from transformers.utils.chat_template_utils import render_jinja_template
except Exception:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    from transformers.utils.chat_template_utils import render_jinja_template

request = json.load(sys.stdin)
try:
    import resource

    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + request["bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
except (ImportError, ValueError, OSError):
    pass  # a system other than Linux
faulthandler.dump_traceback_later(request["seconds"], exit=True, file=open(os.devnull, "w"))
try:
    texts = []
    for conversation in request["conversations"]:
        options = {**conversation["options"], **request["options"]}
        (text,), _ = render_jinja_template([conversation["messages"]], **options)
        texts.append(text)
    reply = {"texts": texts}
    longest = max(map(len, texts))
    if longest > request["characters"]:
        reply = {"longest": longest}
except BaseException as error:
    reply = {"error": (str(error).strip() or type(error).__name__).splitlines()[0][:300]}
faulthandler.cancel_dump_traceback_later()
json.dump(reply, sys.stdout)
"""
_BYTES = 1024**3
"""Limit of the memory that a template uses, on Linux."""


def render_conversations(
    tokenizer: Any, conversations: list[tuple[list[dict[str, str]], bool]]
) -> list[str]:
    """Return the texts of conversations, each with whether the model's turn is begun at its end.

    They are those of the tokenizer's `apply_chat_template`. Raise InputError if the template
    refuses the messages, or exceeds `SECONDS` or `CHARACTERS`.
    """
    request = {
        "conversations": [
            {"messages": messages, "options": {"add_generation_prompt": begins_turn}}
            for messages, begins_turn in conversations
        ],
        "options": {"chat_template": tokenizer.get_chat_template(), **tokenizer.special_tokens_map},
        "seconds": SECONDS,
        "characters": CHARACTERS,
        "bytes": _BYTES,
    }
    return list(_render(json.dumps(request, default=str)))


@lru_cache(maxsize=64)
def _render(request: str) -> tuple[str, ...]:
    """Return the texts of a request; equal requests start one process."""
    # The process finds the packages of this one, and nothing in the current folder.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONIOENCODING": "utf-8",
    }
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", _RENDERER],
            input=request,
            capture_output=True,
            encoding="utf-8",
            env=environment,
            timeout=_START_SECONDS + SECONDS,
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"the chat template must be rendered by a new Python process, but {sys.executable!r} "
            f"cannot be started ({error}); write the turns as an il.Template of your own"
        ) from error
    except subprocess.TimeoutExpired:
        raise _limit_error(f"no text within {_START_SECONDS + SECONDS} seconds") from None
    if process.returncode == _TIMED_OUT and not process.stdout and not process.stderr:
        raise _limit_error(f"no text within {SECONDS} seconds")
    if process.returncode != 0:
        last_line = (process.stderr.strip().splitlines() or [""])[-1][:200]
        raise _limit_error(
            f"a process that ended with status {process.returncode} {last_line}".rstrip()
        )
    reply = json.loads(process.stdout)
    if "longest" in reply:
        raise _limit_error(f"{reply['longest']:,} characters")
    if "error" in reply:
        raise InputError(
            f"the chat template must accept these messages, got the error {reply['error']}"
        )
    return tuple(reply["texts"])


def _limit_error(reason: str) -> InputError:
    return InputError(
        f"the chat template must write a text of at most {CHARACTERS:,} characters within "
        f"{SECONDS} seconds, got {reason}; write the turns as an il.Template of your own"
    )
