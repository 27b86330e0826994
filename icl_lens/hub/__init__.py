"""The Hugging Face Hub: what is fetched from it, what of it is kept, and why something cannot be fetched."""

from icl_lens.hub.errors import Kind, reason_of, size, text_of
from icl_lens.hub.progress import download_bars
from icl_lens.hub.remote_file import RangesNotServed, RemoteFile
from icl_lens.hub.repository import Repository, offline, open_repository

__all__ = [
    "Kind",
    "RangesNotServed",
    "RemoteFile",
    "Repository",
    "download_bars",
    "offline",
    "open_repository",
    "reason_of",
    "size",
    "text_of",
]
