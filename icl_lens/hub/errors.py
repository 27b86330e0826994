"""Why something cannot be had from the Hub: each fault told apart, with its remedy, in one sentence."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal
from urllib.parse import urlsplit

Kind = Literal["model", "dataset"]

# What making a file in the cache fails with.
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)

KNOWN_MODELS = (
    "gpt2 gpt2-medium gpt2-large gpt2-xl distilgpt2 openai-community/gpt2 openai-community/gpt2-medium "
    "openai-community/gpt2-large openai-community/gpt2-xl EleutherAI/gpt-j-6b EleutherAI/gpt-neo-125m "
    "EleutherAI/gpt-neo-1.3B EleutherAI/gpt-neo-2.7B EleutherAI/gpt-neox-20b EleutherAI/pythia-70m "
    "EleutherAI/pythia-160m EleutherAI/pythia-410m EleutherAI/pythia-1b EleutherAI/pythia-1.4b EleutherAI/pythia-2.8b "
    "EleutherAI/pythia-6.9b EleutherAI/pythia-12b huggyllama/llama-7b huggyllama/llama-13b "
    "meta-llama/Llama-2-7b-hf meta-llama/Llama-2-13b-hf meta-llama/Meta-Llama-3-8B meta-llama/Llama-3.1-8B "
    "meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B openlm-research/open_llama_3b openlm-research/open_llama_7b "
    "mistralai/Mistral-7B-v0.1 Qwen/Qwen2-0.5B Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-7B Qwen/Qwen3-0.6B "
    "Qwen/Qwen3-1.7B google/gemma-2b google/gemma-2-2b google/gemma-3-1b-pt microsoft/phi-1_5 microsoft/phi-2 "
    "facebook/opt-125m facebook/opt-1.3b facebook/opt-6.7b bigscience/bloom-560m bigscience/bloom-7b1 "
    "tiiuae/falcon-7b allenai/OLMo-1B-hf allenai/OLMo-2-0425-1B TinyLlama/TinyLlama_v1.1 stabilityai/stablelm-3b-4e1t"
).split()
"""Names that a mistyped one may have meant. Nothing else depends on them."""


@dataclass(frozen=True)
class _HubRequest:
    """What was asked of the Hub: a repository, its revision, and those it has; whether a token was sent."""

    name: str
    kind: Kind
    revision: str | None
    revisions: tuple[str, ...]
    known: tuple[str, ...]
    token: bool


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, else its type; without request identifiers."""
    for line in str(error).splitlines():
        line = re.sub(r"\s*\(Request ID: [^)]*\)", "", line).strip().rstrip(".:;")
        if line:
            return line if len(line) <= 160 else f"{line[:159]}…"
    return type(error).__name__


def size(count: float | int) -> str:
    """Bytes as people write them: 1.2 GB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def close_matches(name: str, names: Sequence[str]) -> list[str]:
    """At most two of `names` that look like `name`, also where its owner is left out."""
    by_key: dict[str, str] = {}
    for known in names:
        by_key.setdefault(known.lower(), known)
        by_key.setdefault(known.lower().rpartition("/")[2], known)
    found = get_close_matches(name.lower(), by_key, n=3, cutoff=0.75)
    if not found:
        found = get_close_matches(name.lower().rpartition("/")[2], by_key, n=3, cutoff=0.8)
    return list(dict.fromkeys(by_key[key] for key in found if by_key[key] != name))[:2]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it came from, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def explain_hub_error(
    error: BaseException,
    name: str,
    kind: Kind,
    *,
    revision: str | None = None,
    revisions: Sequence[str] = (),
    known: Sequence[str] = KNOWN_MODELS,
    token: bool = False,
    limit: float = 10.0,
) -> str:
    """One sentence without its full stop: what is wrong, and what to do about it.

    `revisions` are those the repository has; `token` says whether one was sent; `limit` how long was waited.
    """
    for one in chain(error):
        response = getattr(one, "response", None)
        if response is not None and isinstance(getattr(response, "status_code", None), int):
            return _response_error(
                one, response, _HubRequest(name, kind, revision, tuple(revisions), tuple(known), token)
            )
    for one in reversed(list(chain(error))):
        if sentence := _connection_error(one, limit):
            return sentence
    if any(type(one).__name__ == "HFValidationError" for one in chain(error)):
        return (
            f"{name!r} is no name of a {kind}: names on the Hugging Face Hub look like 'gpt2-large' or "
            f"'EleutherAI/gpt-j-6b'{did_you_mean(name, known)}"
        )
    return f"the Hugging Face Hub could not be asked about {kind} {name!r}: {first_line(error)}; try again"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A remark about names close to `name`; empty where there are none."""
    found = close_matches(name, known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _page(name: str, kind: Kind) -> str:
    return f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"


def _response_error(error: BaseException, response: Any, asked: _HubRequest) -> str:
    """The Hub answered, and what."""
    hub_message = response.headers.get("X-Error-Message") or ""
    return _denied(error, response, hub_message, asked) or _refused(error, response, hub_message, asked)


def _denied(error: BaseException, response: Any, hub_message: str, asked: _HubRequest) -> str | None:
    """There is no such thing, or not for this reader; None where that is not what the Hub says."""
    name, kind = asked.name, asked.kind
    code = response.headers.get("X-Error-Code") or ""
    types = {type_.__name__ for type_ in type(error).__mro__}
    if code == "GatedRepo" or "GatedRepoError" in types:
        if asked.token:
            return (
                f"{kind} {name!r} is gated, and the account of your token is not among its readers: accept the "
                f"license at {_page(name, kind)} with that account and wait for the answer"
            )
        return (
            f"{kind} {name!r} is gated: accept its license at {_page(name, kind)}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    if code == "RevisionNotFound" or "RevisionNotFoundError" in types:
        there = f"; it has {', '.join(map(repr, asked.revisions))}" if asked.revisions else ""
        return (
            f"{kind} {name!r} has no revision {asked.revision or 'main'!r}{there}: give a branch, tag or commit of its "
            "page with --revision (revision= in Python)"
        )
    if response.status_code == 401 and "invalid credentials" in hub_message.lower():
        return (
            f"the Hugging Face Hub refuses your token ({hub_message}): it has expired or is mistyped; make a new one at "
            "https://huggingface.co/settings/tokens for HF_TOKEN or `hf auth login`, or go without one (unset "
            "HF_TOKEN, `hf auth logout`)"
        )
    if code == "RepoNotFound" or "RepositoryNotFoundError" in types or response.status_code == 401:
        if asked.token:
            return (
                f"the Hugging Face Hub has no {kind} {name!r} that your token may read{did_you_mean(name, asked.known)}; "
                "check the spelling, or, if it is private, use a token of an account that may read it"
            )
        return (
            f"the Hugging Face Hub has no public {kind} {name!r}{did_you_mean(name, asked.known)}; check the spelling, or, if "
            "it is private, log in with `hf auth login` or set HF_TOKEN"
        )
    return None


def _refused(error: BaseException, response: Any, hub_message: str, asked: _HubRequest) -> str:
    """It may be there, but the Hub, or what stands between, does not give it."""
    name, kind, status = asked.name, asked.kind, response.status_code
    if "disabled" in hub_message.lower():
        return f"the Hugging Face Hub has disabled {kind} {name!r} ({hub_message.rstrip('.')}); choose another"
    if status == 403:
        return (
            f"the Hugging Face Hub forbids {kind} {name!r} (403 Forbidden{f': {hub_message}' if hub_message else ''}); use a token "
            "that may read it, and ask whether a proxy or firewall of your network stands between"
        )
    if status == 404:
        return f"{kind} {name!r} lacks a file it should have ({first_line(error)}); choose another revision"
    if status == 429:
        wait = response.headers.get("Retry-After")
        return (
            f"the Hugging Face Hub answers 429 Too Many Requests for {kind} {name!r}; wait "
            f"{f'{wait} seconds' if wait else 'some minutes'} and try again, or log in with `hf auth login`, which "
            "allows more"
        )
    if status >= 500:
        return (
            f"the Hugging Face Hub is out of order ({status} {getattr(response, 'reason_phrase', '')}".rstrip()
            + f") and did not give {kind} {name!r}; try again in some minutes"
        )
    return f"the Hugging Face Hub answers {status} for {kind} {name!r} ({hub_message or first_line(error)}); try again"


def _connection_error(error: BaseException, limit: float) -> str | None:
    """Nothing came back, or nothing the Hub would say; None where this error does not tell why."""
    types = {kind.__name__ for kind in type(error).__mro__}
    text = first_line(error)
    lower = f"{text} {error}".lower()
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    if "JSONDecodeError" in types or "FileMetadataError" in types:  # whose own text speaks of certificates, too
        return (
            f"what answers at {host} is not the Hugging Face Hub ({text}); check for a login page of your network, "
            "HTTPS_PROXY and HF_ENDPOINT"
        )
    if "certificate" in lower:
        return (
            f"the certificate shown for {host} is not trusted ({text}); where a proxy of your network signs anew, set "
            "SSL_CERT_FILE to the file of its certificate"
        )
    if "[ssl" in lower or "SSLError" in types:
        return f"no secure connection to {host} could be made ({text}); check HTTPS_PROXY and HF_ENDPOINT"
    if "ProxyError" in types:
        return f"the proxy refuses the way to {host} ({text}); check HTTPS_PROXY and HTTP_PROXY, or unset them"
    if "Silent" in types or "TimeoutException" in types or "TimeoutError" in types or "timed out" in lower:
        return (
            f"{host} did not answer within {limit:g} seconds; try again later, or give it longer with "
            "HF_HUB_ETAG_TIMEOUT=60"
        )
    if "gaierror" in types or any(
        sign in lower
        for sign in (
            "name or service not known",
            "name resolution",
            "nodename nor servname",
            "getaddrinfo",
            "no address",
        )
    ):
        proxy = next((os.environ[name] for name in ("HTTPS_PROXY", "https_proxy") if os.environ.get(name)), None)
        if proxy is not None and (named := urlsplit(proxy if "//" in proxy else f"//{proxy}").hostname):
            return (
                f"neither {host} nor the proxy {named} that HTTPS_PROXY names could be looked up ({text}); mend or "
                "unset HTTPS_PROXY, or connect to a network first"
            )
        return f"the name {host} cannot be looked up ({text}): there is no network or no name server; connect first"
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "no space left" in lower or "not enough free disk" in lower:
        return f"the disk is full ({text}); make room, or set HF_HOME to a folder on another disk"
    certificates = os.environ.get("SSL_CERT_FILE", "")
    if number == errno.ENOENT and certificates and not os.path.exists(certificates):
        return f"SSL_CERT_FILE names {certificates!r}, which is not there; name a file of certificates, or unset it"
    if number in _NOT_OURS or (number in _NO_FOLDER and getattr(error, "filename", None)):
        return f"the cache cannot be written ({text}); set HF_HOME to a folder you may write to"
    if "ConnectError" in types or "ConnectionRefusedError" in types or "NetworkError" in types:
        return f"{host} cannot be reached ({text}); check the network, HTTPS_PROXY and HF_ENDPOINT"
    if "RemoteProtocolError" in types or "consistency check failed" in lower:
        return f"the connection to {host} broke off ({text}); try again"
    if "UnsupportedProtocol" in types or "InvalidURL" in types:
        return f"HF_ENDPOINT is no address of a Hub ({text}); write it like https://huggingface.co, or unset it"
    return None
