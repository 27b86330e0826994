"""A Hub repository at one commit: its files, its cached copy, and downloads."""

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from icl_lens.errors import InputError
from icl_lens.hub.errors import KNOWN_MODELS, Kind, chain, did_you_mean, explain_hub_error, first_line, size
from icl_lens.hub.timeouts import request_timeout, run_with_timeout, timeout_seconds

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or any(
        os.environ.get(switch, "").lower() in ("1", "true", "yes", "on") for switch in _SWITCHES
    )


@dataclass(frozen=True)
class Repository:
    """A model or dataset on the Hub at one commit. `files` lists its files, or the cached ones if `from_cache`."""

    name: str
    kind: Kind
    revision: str | None
    commit: str
    files: tuple[str, ...]
    from_cache: bool

    @property
    def folder(self) -> Path:
        """The snapshot folder in the cache of huggingface_hub."""
        return _folder(self.name, self.kind) / "snapshots" / self.commit

    def fetch(self, files: Sequence[str]) -> Path:
        """Return the folder after downloading those of `files` that it lacks.

        Raises InputError for any failure, with the number of downloaded files.
        """
        from huggingface_hub import hf_hub_download

        for file in files:
            if (self.folder / file).exists():
                continue
            if self.from_cache:
                raise InputError(_incomplete_message(self, [one for one in files if not (self.folder / one).exists()]))
            try:
                with request_timeout(timeout_seconds()):
                    hf_hub_download(self.name, file, repo_type=self.kind, revision=self.commit)
            except Exception as error:  # many types, from the network, its libraries or the disk
                raise InputError(f"{self.explain_error(error)}{self._kept(files, file)}") from error
        return self.folder

    def record_revision(self) -> None:
        """Record the commit of the revision in the cache, so that it resolves offline."""
        if self.from_cache or self.commit == self.revision:
            return
        ref = _folder(self.name, self.kind) / "refs" / (self.revision or "main")
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            handle, temp_path = tempfile.mkstemp(dir=ref.parent, prefix=".icl_lens.")
            with os.fdopen(handle, "w") as stream:
                stream.write(self.commit)
            os.replace(temp_path, ref)
        except OSError as error:  # a read-only cache: the files are usable anyway
            logging.getLogger("icl_lens").info("cannot record the revision in the cache: %s", error)

    def explain_error(self, error: BaseException) -> str:
        """Return the cause of `error` for this repository, and a fix."""
        return _why(error, self.name, self.kind, self.revision)

    def _kept(self, files: Sequence[str], file: str) -> str:
        downloaded = [self.folder / one for one in files if (self.folder / one).exists()]
        if not downloaded:
            return ""
        total = size(sum(one.stat().st_size for one in downloaded))
        return f" ({len(downloaded)} of {len(files)} files downloaded, {total}; rerun to resume at {file})"


def open_repository(
    name: str,
    *,
    kind: Kind,
    revision: str | None = None,
    whole: Callable[[Repository], bool],
    known: Sequence[str] = KNOWN_MODELS,
) -> Repository:
    """Return the repository `name` at `revision`, a branch, tag or commit.

    Only the cache is used offline, and for a commit that is complete in it, as `whole` decides. Otherwise the Hub is
    queried for the commit of the revision, with a timeout; if that fails and the last known commit is complete in the
    cache, that commit is used and a warning is logged. Raises InputError, with the cause and a fix, if the repository
    is unavailable.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(explain_hub_error(_no_name(), name, kind, known=known))
    if revision is not None and not revision.strip():
        raise InputError(
            f"revision of {name!r} must be a branch, tag or commit, got {revision!r}; leave it out for the default"
        )
    cached = _in_cache(name, kind, revision)
    is_complete = cached is not None and whole(cached)
    if cached is not None and is_complete and (offline() or cached.commit == revision):
        return cached
    if offline():
        switch = next((s for s in _SWITCHES if os.environ.get(s)), _SWITCHES[0])
        at = f" at revision {revision!r}" if revision else ""
        what = "is incomplete in the cache" if cached is not None else f"is not in the cache{did_you_mean(name, known)}"
        raise InputError(f"{kind} {name!r}{at} {what}, and {switch} is set; unset {switch} once to download it")
    try:
        return _query_hub(name, kind, revision, patient=not is_complete)
    except Exception as error:
        why = _why(error, name, kind, revision, known)
        if cached is not None and is_complete:
            logging.getLogger("icl_lens").warning(
                "using the cached %s %r (commit %s), unchecked for updates: %s", kind, name, cached.commit[:7], why
            )
            return cached
        raise InputError(why) from error


def _query_hub(name: str, kind: Kind, revision: str | None, *, patient: bool) -> Repository:
    """Return the Hub's current state of a repository; if `patient`, try a busy or unavailable Hub three times."""
    from huggingface_hub import HfApi

    seconds = timeout_seconds()

    def ask() -> Repository:
        hub = HfApi()
        about = hub.model_info if kind == "model" else hub.dataset_info
        info = about(name, revision=revision, timeout=seconds)
        files = tuple(sibling.rfilename for sibling in info.siblings or ())
        return Repository(name, kind, revision, str(info.sha), files, from_cache=False)

    for wait in (1, 2, None):
        try:
            return run_with_timeout(seconds + 1, ask)
        except Exception as error:
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", 0)
            if wait is None or not patient or not (status == 429 or status >= 500):
                raise
            retry_after = response.headers.get("Retry-After", "") if response is not None else ""
            if retry_after and (not retry_after.isdigit() or int(retry_after) > seconds):
                raise
            time.sleep(max(wait, int(retry_after or 0)))
    raise AssertionError


def _why(error: BaseException, name: str, kind: Kind, revision: str | None, known: Sequence[str] = KNOWN_MODELS) -> str:
    from huggingface_hub import get_token

    revisions: list[str] = []
    if any(type(one).__name__ == "RevisionNotFoundError" for one in chain(error)):
        revisions = _revisions(name, kind)
    return explain_hub_error(
        error,
        name,
        kind,
        revision=revision,
        revisions=revisions,
        known=known,
        token=get_token() is not None,
        limit=timeout_seconds(),
    )


def _revisions(name: str, kind: Kind) -> list[str]:
    """Return the first branches and tags of a repository; empty if the Hub does not list them."""
    from huggingface_hub import HfApi

    try:
        refs = run_with_timeout(timeout_seconds(), lambda: HfApi().list_repo_refs(name, repo_type=kind))
    except Exception as error:
        logging.getLogger("icl_lens").debug("no list of revisions: %s", first_line(error))
        return []
    return [ref.name for ref in (*refs.branches, *refs.tags)][:6]


def _in_cache(name: str, kind: Kind, revision: str | None) -> Repository | None:
    folder = _folder(name, kind)
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        ref = folder / "refs" / commit
        if not ref.is_file():
            return None
        commit = ref.read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        return None
    files = tuple(path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*")) if path.is_file())
    return Repository(name, kind, revision, commit, files, from_cache=True)


def _folder(name: str, kind: Kind) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{kind}s--{name.replace('/', '--')}"


def _incomplete_message(repository: Repository, missing: Sequence[str]) -> str:
    return (
        f"the cached {repository.kind} {repository.name!r} lacks {', '.join(missing[:3])}"
        f"{' and more' if len(missing) > 3 else ''}; download it with network access and without HF_HUB_OFFLINE"
    )


def _no_name() -> Exception:
    return type("HFValidationError", (ValueError,), {})()
