"""A repository of the Hub at one commit: what it holds, what of that is here, and fetching the rest."""

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
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or any(
        os.environ.get(switch, "").lower() in ("1", "true", "yes", "on") for switch in _SWITCHES
    )


@dataclass(frozen=True)
class Repository:
    """A model or dataset of the Hub at one commit. `files` are those it has; of a copy in the cache, those here."""

    name: str
    kind: Kind
    revision: str | None
    commit: str
    files: tuple[str, ...]
    from_cache: bool

    @property
    def folder(self) -> Path:
        """Where its files lie once they are fetched: a snapshot in the cache of huggingface_hub."""
        return _folder(self.name, self.kind) / "snapshots" / self.commit

    def fetch(self, files: Sequence[str]) -> Path:
        """The folder, with these files in it; those already there are not asked for again.

        Raises InputError, saying what is kept, for whatever goes wrong on the way.
        """
        from huggingface_hub import hf_hub_download

        for file in files:
            if (self.folder / file).exists():
                continue
            if self.from_cache:
                raise InputError(_not_whole(self, [one for one in files if not (self.folder / one).exists()]))
            try:
                with request_timeout(timeout_seconds()):
                    hf_hub_download(self.name, file, repo_type=self.kind, revision=self.commit)
            except Exception as error:  # from the network, its libraries or the disk: there is no closed list
                raise InputError(f"{self.explain_error(error)}{self._kept(files, file)}") from error
        return self.folder

    def record_revision(self) -> None:
        """Notes in the cache which commit the revision was, so that it is found without a network."""
        if self.from_cache or self.commit == self.revision:
            return
        ref = _folder(self.name, self.kind) / "refs" / (self.revision or "main")
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(dir=ref.parent, prefix=".icl_lens.")
            with os.fdopen(handle, "w") as stream:
                stream.write(self.commit)
            os.replace(beside, ref)
        except OSError as error:  # a cache one may read and not write: the files are there all the same
            logging.getLogger("icl_lens").info("the cache could not note the revision: %s", error)

    def explain_error(self, error: BaseException) -> str:
        """What `error` means for this repository, and what to do about it."""
        return _why(error, self.name, self.kind, self.revision)

    def _kept(self, files: Sequence[str], file: str) -> str:
        here = [self.folder / one for one in files if (self.folder / one).exists()]
        if not here:
            return ""
        total = size(sum(one.stat().st_size for one in here))
        return f" ({len(here)} of {len(files)} files, {total}, are kept; the same again goes on with {file})"


def open_repository(
    name: str,
    *,
    kind: Kind,
    revision: str | None = None,
    whole: Callable[[Repository], bool],
    known: Sequence[str] = KNOWN_MODELS,
) -> Repository:
    """The repository `name` at `revision`, a branch, tag or commit.

    The cache alone is asked offline, and for a commit of which it has all: `whole` says whether it has. Else the
    Hub is asked which commit the revision is, within one time limit; where it does not say, and the cache has all
    of the last one, that one is taken, with one line about it in the log.
    Raises InputError, one sentence with cause and remedy, if it cannot be had.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(explain_hub_error(_no_name(), name, kind, known=known))
    if revision is not None and not revision.strip():
        raise InputError(
            f"the revision asked of {name!r} is empty: give a branch, tag or commit of its page, or leave it out"
        )
    here = _in_cache(name, kind, revision)
    kept = here is not None and whole(here)
    if here is not None and kept and (offline() or here.commit == revision):
        return here
    if offline():
        switch = next((s for s in _SWITCHES if os.environ.get(s)), _SWITCHES[0])
        at = f" at revision {revision!r}" if revision else ""
        what = "is not whole in the cache" if here is not None else f"is not in the cache{did_you_mean(name, known)}"
        raise InputError(
            f"{kind} {name!r}{at} {what}, and {switch} forbids the network: unset {switch} once to fetch it"
        )
    try:
        return _query_hub(name, kind, revision, patient=not kept)
    except Exception as error:
        why = _why(error, name, kind, revision, known)
        if here is not None and kept:
            logging.getLogger("icl_lens").warning(
                "%s %r is taken from the cache (commit %s), unchecked: %s", kind, name, here.commit[:7], why
            )
            return here
        raise InputError(why) from error


def _query_hub(name: str, kind: Kind, revision: str | None, *, patient: bool) -> Repository:
    """What the Hub says now; a Hub that is busy or out of order is asked three times where we are `patient`."""
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
            asked = response.headers.get("Retry-After", "") if response is not None else ""
            if asked and (not asked.isdigit() or int(asked) > seconds):
                raise
            time.sleep(max(wait, int(asked or 0)))
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
    """The first branches and tags of a repository; none where the Hub does not say."""
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


def _not_whole(repository: Repository, missing: Sequence[str]) -> str:
    return (
        f"the copy of {repository.kind} {repository.name!r} in the cache lacks {', '.join(missing[:3])}"
        f"{' and more' if len(missing) > 3 else ''}; fetch it with a network and without HF_HUB_OFFLINE"
    )


def _no_name() -> Exception:
    return type("HFValidationError", (ValueError,), {})()
