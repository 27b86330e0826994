"""A real browser without a network, and the servers of notebooks that it opens."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 300_000
"""Milliseconds after which a page counts as hanging: long, since the machine may be busy with other
tests.
"""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield Chromium; skip the test where it or Playwright is missing."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing (apt-get install chromium): pages are not drawn")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: pages are not drawn"
    )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def opened(browser: Any, **options: Any) -> Any:
    """Return a new context of the browser, with patience."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)
    return context


def program(name: str) -> str | None:
    """Return the path of a command of this Python, or of the system; None if there is none."""
    return shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )


@contextmanager
def served(command: list[str], folder: Path, home: Path, **environment: str) -> Iterator[str]:
    """Yield the address of a server that runs in a folder with a home of its own; "{port}" in
    `command` is its port.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (home / "log").open("wb")
    started = [part.format(port=port) for part in command]
    environment = os.environ | {"HOME": str(home)} | environment
    server = subprocess.Popen(started, cwd=folder, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(PATIENCE // 500):
            try:
                urllib.request.urlopen(address, timeout=PATIENCE / 1000).read()
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(f"{started[0]} did not start:\n{(home / 'log').read_text()}")
        yield address
    finally:
        server.kill()
        server.wait(30)
        log.close()


def jupyter_home(home: Path) -> dict[str, str]:
    """Return the environment of a dark Jupyter that asks no questions, with its settings in
    `home`.
    """
    settings = home / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text('{"theme": "JupyterLab Dark"}')
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    names = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
    }
    return {name: str(home / folder) for name, folder in names.items()}


def jupyter(name: str) -> list[str]:
    """Return the command that starts jupyter-lab or jupyter-notebook; skip the test where it is
    missing.
    """
    path = program(name)
    if path is None:
        pytest.skip(f"{name} is missing: no live notebook is drawn")
    return [
        path,
        "--no-browser",
        "--allow-root",
        "--port={port}",
        "--port-retries=0",
        "--IdentityProvider.token=",
    ]
