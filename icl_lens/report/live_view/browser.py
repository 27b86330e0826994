"""Show the live view in a browser, without a notebook: marimo hosts the widget, uvicorn serves it.

The model is loaded once. Each browser tab has a widget of its own, made by `new_view`, so that what
is edited in one tab does not show in another.
"""

import secrets
import socket
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from icl_lens.errors import InputError

if TYPE_CHECKING:
    from icl_lens.report.live_view.widget import LiveView

HOST = "127.0.0.1"
"""The loopback address: other machines cannot connect."""
PAGE = Path(__file__).with_name("marimo_page.py")
REMEDY = "install it with pip install anywidget marimo"
SECONDS_TO_CLOSE = 1
"""How long open tabs may delay the end after Ctrl-C."""
SECONDS_WITHOUT_TAB = 10
"""How long the widget of a closed tab is kept, for a page that is reloaded."""

_make_view: "Callable[[], LiveView] | None" = None


@dataclass(frozen=True)
class Address:
    """Where the page is: only who has the token sees it."""

    port: int
    token: str

    def __str__(self) -> str:
        return f"http://{HOST}:{self.port}/?{urlencode({'access_token': self.token})}"


def new_view() -> "LiveView":
    """Return a widget for one more tab of the page that is served. Raise InputError if none is."""
    if _make_view is None:
        raise InputError("no live view is served by this process; run icl-lens live")
    return _make_view()


def check_installed() -> None:
    """Raise InputError if a package that serves the page is missing."""
    for name in ("anywidget", "marimo", "uvicorn"):
        if find_spec(name) is None:
            raise InputError(f"the page requires {name}; {REMEDY}")


def serve(
    make_view: "Callable[[], LiveView]",
    *,
    port: int | None = None,
    open_browser: bool = True,
    announce: Callable[[Address], None],
) -> None:
    """Serve a page with one view per tab until Ctrl-C.

    `announce` gets the address once connections are accepted. `port=None` takes a free port. Raise
    InputError if marimo is missing or the port is taken.
    """
    global _make_view
    check_installed()
    import marimo  # pyright: ignore[reportMissingImports]
    import uvicorn  # pyright: ignore[reportMissingImports]

    # Two tabs that open together would import it in two threads, which Python may end as a deadlock.
    import icl_lens.report.live_view.widget  # noqa: F401

    listening = _listen(port)
    address = Address(listening.getsockname()[1], secrets.token_urlsafe(24))
    builder = marimo.create_asgi_app(
        quiet=True, token=address.token, session_ttl=SECONDS_WITHOUT_TAB
    )
    page = builder.with_app(path="/", root=str(PAGE)).build()

    class Server(uvicorn.Server):
        """A server that says when it accepts connections."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            announce(address)
            if open_browser:
                webbrowser.open(str(address))

    settings: Any = {"log_level": "error", "timeout_graceful_shutdown": SECONDS_TO_CLOSE}
    _make_view = make_view
    try:
        Server(uvicorn.Config(page, **settings)).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn raises the signal again after closing
        pass
    finally:
        _make_view = None
        listening.close()


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback address."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port or 0))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(
            f"port {port} cannot be used ({error}); leave --port out to take a free one"
        ) from None
    return listening
