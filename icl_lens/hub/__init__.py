"""Hugging Face Hub: downloads, caching, and error messages."""

from icl_lens.hub.errors import Kind, explain_hub_error, first_line, size
from icl_lens.hub.progress import download_bars
from icl_lens.hub.remote_file import RangeRequestsUnsupported, RemoteFile
from icl_lens.hub.repository import Repository, offline, open_repository

__all__ = [
    "Kind",
    "RangeRequestsUnsupported",
    "RemoteFile",
    "Repository",
    "download_bars",
    "explain_hub_error",
    "first_line",
    "offline",
    "open_repository",
    "size",
]
