"""A file on the Hub that is read with range requests."""

import io
from typing import Any

from icl_lens.hub.repository import Repository
from icl_lens.hub.timeouts import request_timeout, timeout_seconds


class RangeRequestsUnsupported(Exception):
    """The server does not support range requests."""


class RemoteFile(io.RawIOBase):
    """A read-only, seekable file; each read downloads only its bytes. `fetched` counts them."""

    def __init__(self, repository: Repository, file: str) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        self._url = hf_hub_url(repository.name, file, repo_type=repository.kind, revision=repository.commit)
        self._headers: dict[str, str] = build_hf_headers()
        with request_timeout(timeout_seconds()):
            found = get_hf_file_metadata(self._url, timeout=timeout_seconds())
        if found.size is None:
            raise RangeRequestsUnsupported(file)
        self._size, self._at, self.fetched = int(found.size), 0, 0
        self._ahead, self._ahead_at = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read_ahead(self, start: int, stop: int) -> None:
        """Download bytes `start` to `stop` in one request, for later reads."""
        self._ahead, self._ahead_at = self._range(start, min(stop, self._size)), start

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        if stop <= self._at:
            return 0
        if self._ahead_at <= self._at and stop <= self._ahead_at + len(self._ahead):
            data = self._ahead[self._at - self._ahead_at : stop - self._ahead_at]
        else:
            data = self._range(self._at, stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _range(self, start: int, stop: int) -> bytes:
        from huggingface_hub.utils import get_session, hf_raise_for_status

        headers = {**self._headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        client: Any = get_session()
        with (
            request_timeout(timeout_seconds()),
            client.stream("GET", self._url, headers=headers, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise RangeRequestsUnsupported(self._url)
            data = response.read()
        self.fetched += len(data)
        return data
