"""A small imitation of the Hugging Face Hub: requests of huggingface_hub in this process are
answered from memory.
"""

import hashlib
import re
import sys
from typing import Any

from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory, hf_request_event_hook

http: Any = sys.modules[type(default_client_factory()).__module__.partition(".")[0]]
"""The HTTP library of huggingface_hub: httpx, or httpx2 in later versions."""


class Hub:
    """`content[name][revision][file]` are bytes; `asked` are the paths of all requests so far.

    `fault` is (what happens, pattern) for requests of paths that match the pattern: an HTTP status,
    an error's name in the HTTP library, or "cut" for a connection lost in the middle of a file. The
    token hf_good may read all files.
    """

    def __init__(
        self, content: dict[str, dict[str, dict[str, bytes]]], *, private: str, gated: str
    ):
        self.content, self.private, self.gated = content, private, gated
        self.fault: tuple[int | str, str] | None = None
        self.asked: list[str] = []

    def __enter__(self) -> "Hub":
        hooks: Any = {"request": [hf_request_event_hook]}
        set_client_factory(
            lambda: http.Client(transport=http.MockTransport(self.answer), event_hooks=hooks)
        )
        return self

    def __exit__(self, *_: object) -> None:
        set_client_factory(default_client_factory)

    def commit(self, name: str, revision: str) -> str:
        return hashlib.sha1(f"{name} {revision}".encode()).hexdigest()

    def fault_of(self, path: str) -> str | int:
        """The fault with which a path is answered; empty for none."""
        if self.fault is None:
            return ""
        fault, pattern = self.fault
        return fault if re.search(pattern, path) else ""

    def revision_of(self, name: str, wanted: str) -> str | None:
        """The revision that is wanted by its name or by its commit; None if there is none."""
        for revision in self.content[name]:
            if wanted in (revision, self.commit(name, revision)):
                return revision
        return None

    def answer(self, request: Any) -> Any:
        path = request.url.path
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.asked.append(path)
        fault = self.fault_of(path)
        if isinstance(fault, int):
            return http.Response(fault, content=b"out of order")
        if fault and fault != "cut":
            raise getattr(http, fault)("the cause", request=request)
        if token not in ("", "hf_good"):
            return refused(401, "", "Invalid credentials in Authorization header")
        parts = re.fullmatch(
            r"/(api/)?(?:models/|datasets/)?(.+?)(?:/(?:revision|resolve)/([^/]+)(?:/(.+))?)?", path
        )
        assert parts is not None
        api, name, wanted, file = parts.groups()
        if name not in self.content or (name == self.private and not token):
            if token:
                return refused(404, "RepoNotFound", "")
            return refused(401, "", "Invalid username or password.")
        revision = self.revision_of(name, wanted or "main")
        if revision is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {wanted}")
        if api:
            return self.list_of_files(name, revision)
        if name == self.gated and not token:
            return refused(401, "GatedRepo", f"Access to model {name} is restricted.")
        with_body = request.method != "HEAD"
        return self.file(name, revision, file, with_body=with_body, is_cut=bool(fault))

    def list_of_files(self, name: str, revision: str) -> Any:
        """Answer which files a revision has."""
        siblings = [{"rfilename": file} for file in self.content[name][revision]]
        commit = self.commit(name, revision)
        return http.Response(200, json={"id": name, "sha": commit, "siblings": siblings})

    def file(self, name: str, revision: str, file: str, *, with_body: bool, is_cut: bool) -> Any:
        """Answer with a file, whose body may be left out or end early."""
        commit, files = self.commit(name, revision), self.content[name][revision]
        if file not in files:
            return refused(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(files[file]).hexdigest()}"'}
        headers["Content-Length"] = str(len(files[file]))
        if not with_body:
            return http.Response(200, headers=headers)
        body = Cut() if is_cut else http.ByteStream(files[file])
        return http.Response(200, headers=headers, stream=body)


class Cut(http.SyncByteStream):
    """A body whose connection ends early."""

    def __iter__(self) -> Any:
        yield b"begin"
        raise http.RemoteProtocolError("the cause")


def refused(status: int, code: str, message: str, more: dict[str, str] | None = None) -> Any:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | (more or {})
    return http.Response(status, headers=headers, json={"error": message})
