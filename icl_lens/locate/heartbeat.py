"""Which of several processes are alive: the others end soon after one dies, with one line that says which.

Every process holds a connection to the first. The operating system closes it when a process dies, at once; a machine
that is gone is noticed by its silence. Neither depends on how long a batch takes.
"""

import atexit
import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NoReturn

# A sign of life goes out this often; a process that is silent for so long is taken for dead. Seconds.
BEAT = 3.0
LIMIT = 30.0
# So long a process outlives the notice of a death: its launcher then names the dead one and not this one as the cause.
GRACE = 1.5


class Heartbeat:
    """Signs of life between the first process and all others; ends this process when one of them is lost."""

    def __init__(self, rank: int, size: int, first_here: int):
        self.rank, self.size = rank, size
        self._first_here = first_here  # the lowest rank on this machine
        self._names = {rank: f"pid {os.getpid()} on {socket.gethostname()}"}
        self._others: dict[int, Connection] = {}
        self._ended: dict[int, bytes] = {}
        self._listener: Listener | None = None
        self._said = False
        self._telling = threading.Lock()

    def listen(self, host: str) -> tuple[int, bytes] | None:
        """Port and key for the others; None in the others themselves."""
        if self.rank:
            return None
        key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), "AF_INET", backlog=self.size, authkey=key)
        return int(self._listener.address[1]), key

    def begin(self, host: str, port: int, key: bytes) -> None:
        """Connects to the first process, or the first one to all others. Raises OSError if it cannot be reached."""
        if self._listener is None:
            self._others[0] = Client((host, port), "AF_INET", authkey=key)
            self._others[0].send_bytes(f"{self.rank} {self._names[self.rank]}".encode())
            self._names[0] = self._others[0].recv_bytes().decode()
        while self._listener is not None and len(self._others) < self.size - 1:
            try:
                connection = self._listener.accept()
                rank, name = connection.recv_bytes().decode().split(" ", 1)
                connection.send_bytes(self._names[0].encode())
            except (AuthenticationError, EOFError, ValueError):
                continue  # none of ours
            self._others[int(rank)] = connection
            self._names[int(rank)] = name
        atexit.register(self._end)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminated)
        threading.Thread(target=self._listening, daemon=True, name="icl-lens watch").start()

    def explained(self) -> None:
        """This process ends because of an error that it tells itself: the others end without a word."""
        self._said = True

    def main_failed(self, within: float) -> bool:
        """Whether the first process ends, too, with an error that it tells itself."""
        until = time.monotonic() + within
        while time.monotonic() < until and 0 not in self._ended:
            time.sleep(0.05)
        return self._ended.get(0) == b"said"

    def exit_if_peer_lost(self) -> None:
        """Ends this process after an exchange broke off; returns only if every process is alive nevertheless."""
        until = time.monotonic() + LIMIT + 2 * BEAT
        while time.monotonic() < until:
            if b"said" in self._ended.values():
                raise SystemExit(2)
            for rank in list(self._ended):
                self._exit_on_lost_peer(rank, "ended early")
            time.sleep(0.05)

    def _listening(self) -> None:
        heard = dict.fromkeys(self._others, time.monotonic())
        said = time.monotonic()
        while self._others:
            ready = wait(list(self._others.values()), timeout=BEAT)
            for rank, connection in list(self._others.items()):
                if connection not in ready:
                    if time.monotonic() - heard[rank] > LIMIT:
                        self._exit_on_lost_peer(rank, f"has given no sign of life for {LIMIT:.0f} s")
                    continue
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    if rank not in self._ended:
                        self._exit_on_lost_peer(rank, "died")
                    del self._others[rank]
                    continue
                heard[rank] = time.monotonic()
                if message in (b"end", b"said"):
                    self._ended[rank] = message
                elif message.startswith(b"lost "):
                    _, lost, about = message.decode().split(" ", 2)
                    self._exit_on_lost_peer(int(lost), about)
            if time.monotonic() - said >= BEAT:
                said = time.monotonic()
                self._tell(b"alive")

    def _tell(self, message: bytes) -> None:
        for connection in list(self._others.values()):
            with suppress(OSError):  # it is gone: the next look at it says so
                connection.send_bytes(message)

    def _exit_on_lost_peer(self, rank: int, what: str) -> NoReturn:
        """Says that a process is lost, to the others and once a machine to the user, and ends this one."""
        with self._telling:
            about = f"({self._names[rank]}) {what}" if rank in self._names else what
            if not self.rank:
                self._tell(f"lost {rank} {about}".encode())
            if self.rank == self._first_here + (rank == self._first_here):
                print(
                    f"icl-lens: process {rank} of {self.size} {about}; the others have stopped. Start it again with "
                    "the same settings and any number of processes: with --out it goes on from the chunks there",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(GRACE)
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # a progress bar has hidden the cursor
            os._exit(1)

    def _terminated(self, *_: Any) -> NoReturn:
        """SIGTERM: a launcher that ends what is left after a death gives the notice of that death time to appear."""
        time.sleep(2 * GRACE)
        raise SystemExit(128 + signal.SIGTERM)

    def _end(self) -> None:
        self._tell(b"said" if self._said else b"end")
