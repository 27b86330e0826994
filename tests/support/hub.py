"""A small imitation of the Hugging Face Hub, answering on 127.0.0.1 only: what it serves lies in memory.

with Hub({"model": {"gpt2": {"main": {"config.json": b"{}"}}}}) as hub:
    hub.url  # for HF_ENDPOINT
    hub.faults["status"] = (503, "config.json", 2)  # for the next two requests of such a path
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = {"hf_good": "granted", "hf_nogrant": "known"}
"""Any other token is expired. `known`: logged in, but not among the readers of gated and private repositories."""


@dataclass
class Asked:
    """One request, noted when it comes in. `sent` are the bytes of the answer's body, however many are read."""

    path: str
    sent: int = 0


class Hub:
    """`content[kind][name][revision][file]` are bytes. `private` and `gated` are names; `log` is what was asked.

    A fault is (value, pattern of the path, how many times): "status" answers so, "cut" ends the connection after so
    many bytes of the body, "drop" does not answer, "delay" waits so many seconds first.
    """

    def __init__(self, content, *, private=(), gated=()):
        self.content, self.private, self.gated = content, set(private), set(gated)
        self.faults: dict[str, tuple[Any, str, float]] = {}
        self.log: list[Asked] = []
        self.lock = threading.Lock()

    def __enter__(self):
        handler = type("Bound", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def clear(self):
        """No faults and an empty log; requests that still wait belong to the log of before, and get no answer."""
        with self.lock:
            self.faults, self.log = {}, []

    def fault(self, name, path):
        with self.lock:
            value, pattern, times = self.faults.get(name, (None, "", 0))
            if times <= 0 or not re.search(pattern, path):
                return None
            self.faults[name] = (value, pattern, times - 1)
            return value

    def commit(self, kind, name, revision):
        return hashlib.sha1(f"{kind} {name} {revision}".encode()).hexdigest()

    def revision(self, kind, name, asked):
        for revision in self.content[kind][name]:
            if asked in (revision, self.commit(kind, name, revision)):
                return revision
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.answered()

    def do_GET(self):
        self.answered()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answered()

    def answered(self):
        self.asked = Asked(self.path)
        with self.hub.lock:
            log = self.hub.log
            log.append(self.asked)
        try:
            self.route(unquote(urlsplit(self.path).path), log)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def route(self, path, log):
        if (seconds := self.hub.fault("delay", path)) is not None:
            threading.Event().wait(seconds)
            if log is not self.hub.log:
                self.close_connection = True
                return self.connection.close()
        if self.hub.fault("drop", path) is not None:
            self.close_connection = True
            return self.connection.close()
        if (status := self.hub.fault("status", path)) is not None:
            return self.answer(status, b"out of order")
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            return self.refuse(401, None, "Invalid credentials in Authorization header")
        may = TOKENS.get(token)
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[1:] if parts[0] in ("datasets", "models") else parts
        name = next((n for n in ("/".join(parts[:2]), parts[0]) if n in self.hub.content.get(kind, {})), None)
        if name is None or (name in self.hub.private and may != "granted"):
            return self.refuse(404 if may else 401, "RepoNotFound" if may else None, "Invalid username or password.")
        rest = parts[name.count("/") + 1 :]
        asked = (rest[1:2] or ["main"])[0]
        revision = self.hub.revision(kind, name, asked)
        if revision is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {asked}")
        commit = self.hub.commit(kind, name, revision)
        files = self.hub.content[kind][name][revision]
        if api:
            siblings = [{"rfilename": file} for file in files]
            return self.answer(200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})
        if name in self.hub.gated and may != "granted":
            return self.refuse(403 if may else 401, "GatedRepo", f"Access to model {name} is restricted.")
        file = "/".join(rest[2:])
        if file not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        return self.send_file(path, files[file], commit)

    def send_file(self, path, data, commit):
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        status, body = 200, data
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            status, body = 206, data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(data)}"
        if self.command == "GET" and (cut := self.hub.fault("cut", path)) is not None:
            self.answer(status, body[:cut], headers, length=len(body))
            self.close_connection = True
            return self.connection.shutdown(2)
        return self.answer(status, body, headers)

    def refuse(self, status, code, message, headers=None):
        errors = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        return self.answer(status, {"error": message}, errors | (headers or {}))

    def answer(self, status, body, headers=None, length=None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if self.command != "HEAD":
            self.asked.sent = len(body)
        self.send_response(status)
        for name, value in {"Content-Length": str(length or len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
