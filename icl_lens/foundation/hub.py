"""Files of the Hugging Face Hub, downloaded once at one commit.

1. `open_repository` asks the Hub for the commit of a revision and its files, or finds both in the
   cache.
2. `Repository.fetch` downloads the files missing at this commit; huggingface_hub resumes, retries
   and times out.
3. `Repository.record_revision` stores the commit of the revision in the cache, so that later loads
   also work offline.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from icl_lens.errors import InputError, first_line

RepositoryKind = Literal["model", "dataset"]

_MESSAGES = {
    "OfflineModeIsEnabled": "{what} is not in the cache, or only partly; unset HF_HUB_OFFLINE and "
    "TRANSFORMERS_OFFLINE once to download it",
    "HFValidationError": "{kind} must be a Hugging Face Hub name like 'gpt2-large' or "
    "'EleutherAI/gpt-j-6b', got {name!r}",
    "GatedRepoError": "{what} is gated; accept its license on its page at https://huggingface.co, "
    "then log in with `hf auth login` or set HF_TOKEN",
    "RevisionNotFoundError": "{what} does not exist; pass a branch, tag or commit with --revision "
    "(revision= in Python)",
    "RepositoryNotFoundError": "the Hugging Face Hub has no {what} that you can read; check the "
    "spelling, or, if it is private, log in with `hf auth login` or set HF_TOKEN",
}
"""Messages for errors of huggingface_hub, by class name."""


@dataclass(frozen=True)
class Repository:
    """A model or dataset at the commit of the requested `revision` (None: main).

    `files` lists the files on the Hub, or only those in the cache if `from_cache`.
    """

    name: str
    kind: RepositoryKind
    revision: str | None
    commit: str
    files: tuple[str, ...]
    from_cache: bool = False

    @property
    def folder(self) -> Path:
        """The folder of this commit in the cache of huggingface_hub."""
        return _cache_folder(self.name, self.kind) / "snapshots" / self.commit

    def fetch(self, files: Sequence[str]) -> Path:
        """Return the folder after downloading those of `files` that it lacks; raise InputError if
        this fails.
        """
        from huggingface_hub import hf_hub_download

        for file in files:
            try:
                hf_hub_download(self.name, file, repo_type=self.kind, revision=self.commit)
            except Exception as error:  # many types, from the network, its libraries or the disk
                message = explain_hub_error(error, self.name, self.kind, self.revision)
                raise InputError(f"{message} (at {file}; complete files are kept)") from error
        return self.folder

    def record_revision(self) -> None:
        """Record the commit of the revision in the cache, so that it resolves offline."""
        if self.from_cache or self.commit == self.revision:
            return
        reference = _cache_folder(self.name, self.kind) / "refs" / (self.revision or "main")
        try:
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self.commit)
        except OSError as error:  # a read-only cache: the files are usable anyway
            logging.getLogger("icl_lens").info("cannot record the revision in the cache: %s", error)


def open_repository(
    name: str,
    *,
    kind: RepositoryKind,
    revision: str | None = None,
    is_complete: Callable[[Repository], bool],
) -> Repository:
    """Return the repository `name` at the commit of `revision`, a branch, tag or commit (default:
    main).

    A cached copy that `is_complete` accepts is used in offline mode (HF_HUB_OFFLINE), if `revision`
    is a commit, and, with a warning, if the request to the Hub fails for any reason. Raise
    InputError, with the cause and a remedy, if the repository is unavailable.
    """
    from huggingface_hub import HfApi, constants

    if revision is not None and not revision.strip():
        raise InputError(
            f"revision of {name!r} must be a branch, tag or commit, got {revision!r}; leave it out for the default"
        )
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    if (occupied := blocking_file(cache)) is not None:
        raise InputError(
            f"the cache of huggingface_hub must be a folder, but {str(occupied)!r} is a file; "
            "remove it, or set HF_HOME to a folder"
        )
    cached = _in_cache(name, kind, revision)
    if cached is not None and not is_complete(cached):
        cached = None
    if cached is not None and (constants.HF_HUB_OFFLINE or cached.commit == revision):
        return cached
    hub = HfApi()
    query = hub.model_info if kind == "model" else hub.dataset_info
    try:
        info = query(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # many types, from the network and its libraries
        message = explain_hub_error(error, name, kind, revision)
        if cached is None:
            raise InputError(message) from error
        logging.getLogger("icl_lens").warning(
            "using the cached %s %r (commit %s), unchecked for updates: %s",
            kind,
            name,
            cached.commit[:7],
            message,
        )
        return cached
    return Repository(
        name, kind, revision, str(info.sha), tuple(file.rfilename for file in info.siblings or ())
    )


def explain_hub_error(
    error: BaseException, name: str, kind: RepositoryKind, revision: str | None = None
) -> str:
    """Return one sentence, without a full stop, with the cause of a failed request or download and
    a remedy.
    """
    what = f"{kind} {name!r}" + (f" at revision {revision!r}" if revision else "")
    while type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ is not None:
        error = error.__cause__  # the failed request
    if message := _MESSAGES.get(type(error).__name__):
        return message.format(what=what, kind=kind, name=name)
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"cannot use the cache for {what} ({first_line(error)}); free space or set HF_HOME to "
            "a writable folder, and check that SSL_CERT_FILE, if set, exists"
        )
    return (
        f"cannot get {what} from the Hugging Face Hub ({type(error).__name__}: "
        f"{first_line(error)}); retry later, or check the network connection, HTTPS_PROXY, "
        "HF_ENDPOINT, SSL_CERT_FILE and your token (`hf auth login` or HF_TOKEN)"
    )


def blocking_file(folder: Path) -> Path | None:
    """Return what stands in the place of a folder, or of a folder above it, without being one; None
    if nothing does.
    """
    for path in (folder, *folder.parents):
        if path.is_dir():
            return None
        if path.exists():
            return path
    return None


def show_download_bars(visible: bool) -> None:
    """Show or hide the progress bars of downloads, unless the environment variable
    HF_HUB_DISABLE_PROGRESS_BARS is set.

    Even when shown, bars appear only in a terminal.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars() if visible else disable_progress_bars()


def _in_cache(name: str, kind: RepositoryKind, revision: str | None) -> Repository | None:
    """Return the repository at the cached commit of a revision, with its cached files; None if it
    is not cached.
    """
    folder = _cache_folder(name, kind)
    reference = folder / "refs" / (revision or "main")
    commit = (
        reference.read_text(encoding="utf-8").strip()
        if reference.is_file()
        else (revision or "main")
    )
    snapshot = folder / "snapshots" / commit
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or not snapshot.is_dir():
        return None
    files = tuple(
        path.relative_to(snapshot).as_posix()
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    )
    return Repository(name, kind, revision, commit, files, from_cache=True)


def _cache_folder(name: str, kind: RepositoryKind) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{kind}s--{name.replace('/', '--')}"
