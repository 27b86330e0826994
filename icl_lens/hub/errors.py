"""Error messages for Hub failures, each with its cause and a fix."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal
from urllib.parse import urlsplit

Kind = Literal["model", "dataset"]

# Errors of creating a file in the cache.
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
"""Names to suggest for a mistyped one."""


@dataclass(frozen=True)
class _HubRequest:
    """A request to the Hub: repository, revision, existing revisions, and whether a token was sent."""

    name: str
    kind: Kind
    revision: str | None
    revisions: tuple[str, ...]
    known: tuple[str, ...]
    token: bool


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error, else its type; without request IDs."""
    for line in str(error).splitlines():
        line = re.sub(r"\s*\(Request ID: [^)]*\)", "", line).strip().rstrip(".:;")
        if line:
            return line if len(line) <= 160 else f"{line[:159]}…"
    return type(error).__name__


def size(count: float | int) -> str:
    """Format a number of bytes, such as 1.2 GB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def close_matches(name: str, names: Sequence[str]) -> list[str]:
    """Return at most two of `names` that resemble `name`, with or without the owner."""
    by_key: dict[str, str] = {}
    for known in names:
        by_key.setdefault(known.lower(), known)
        by_key.setdefault(known.lower().rpartition("/")[2], known)
    found = get_close_matches(name.lower(), by_key, n=3, cutoff=0.75)
    if not found:
        found = get_close_matches(name.lower().rpartition("/")[2], by_key, n=3, cutoff=0.8)
    return list(dict.fromkeys(by_key[key] for key in found if by_key[key] != name))[:2]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, outermost first."""
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
    """Return one sentence, without a full stop, with the cause of `error` and a fix.

    `revisions` are those of the repository, `token` is whether a token was sent, `limit` is the timeout in seconds.
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
            f"{kind} must be a Hugging Face Hub name like 'gpt2-large' or 'EleutherAI/gpt-j-6b', got {name!r}"
            f"{did_you_mean(name, known)}"
        )
    return f"could not query the Hugging Face Hub for {kind} {name!r}: {first_line(error)}; retry"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a suggestion of names similar to `name`; empty if there are none."""
    found = close_matches(name, known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _page(name: str, kind: Kind) -> str:
    return f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"


def _response_error(error: BaseException, response: Any, request: _HubRequest) -> str:
    """Return the message for an error response."""
    hub_message = response.headers.get("X-Error-Message") or ""
    return _denied(error, response, hub_message, request) or _refused(error, response, hub_message, request)


def _denied(error: BaseException, response: Any, hub_message: str, request: _HubRequest) -> str | None:
    """Return the message for a missing or access-restricted repository, else None."""
    name, kind = request.name, request.kind
    code = response.headers.get("X-Error-Code") or ""
    types = {type_.__name__ for type_ in type(error).__mro__}
    if code == "GatedRepo" or "GatedRepoError" in types:
        if request.token:
            return (
                f"{kind} {name!r} is gated, and your token's account has no access; accept the license at "
                f"{_page(name, kind)} with that account and wait for approval"
            )
        return (
            f"{kind} {name!r} is gated; accept its license at {_page(name, kind)}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    if code == "RevisionNotFound" or "RevisionNotFoundError" in types:
        existing = f" (it has {', '.join(map(repr, request.revisions))})" if request.revisions else ""
        return (
            f"{kind} {name!r} has no revision {request.revision or 'main'!r}{existing}; pass a branch, tag or commit "
            "with --revision (revision= in Python)"
        )
    if response.status_code == 401 and "invalid credentials" in hub_message.lower():
        return (
            f"the Hugging Face Hub rejected your token ({hub_message}), which is expired or mistyped; create one at "
            "https://huggingface.co/settings/tokens for HF_TOKEN or `hf auth login`, or use none (unset HF_TOKEN, "
            "`hf auth logout`)"
        )
    if code == "RepoNotFound" or "RepositoryNotFoundError" in types or response.status_code == 401:
        if request.token:
            return (
                f"the Hugging Face Hub has no {kind} {name!r} that your token can read"
                f"{did_you_mean(name, request.known)}; check the spelling, or, if it is private, use a token of an "
                "account with access"
            )
        return (
            f"the Hugging Face Hub has no public {kind} {name!r}{did_you_mean(name, request.known)}; check the "
            "spelling, or, if it is private, log in with `hf auth login` or set HF_TOKEN"
        )
    return None


def _refused(error: BaseException, response: Any, hub_message: str, request: _HubRequest) -> str:
    """Return the message for a response that refuses an existing repository."""
    name, kind, status = request.name, request.kind, response.status_code
    if "disabled" in hub_message.lower():
        return f"the Hugging Face Hub disabled {kind} {name!r} ({hub_message.rstrip('.')}); choose another"
    if status == 403:
        return (
            f"the Hugging Face Hub denies access to {kind} {name!r} (403 Forbidden"
            f"{f': {hub_message}' if hub_message else ''}); use a token with access, and check for a proxy or firewall"
        )
    if status == 404:
        return f"{kind} {name!r} lacks a required file ({first_line(error)}); choose another revision"
    if status == 429:
        wait = response.headers.get("Retry-After")
        return (
            f"the Hugging Face Hub returned 429 Too Many Requests for {kind} {name!r}; retry after "
            f"{f'{wait} seconds' if wait else 'a few minutes'}, or log in with `hf auth login` for a higher limit"
        )
    if status >= 500:
        return (
            f"the Hugging Face Hub is unavailable ({status} {getattr(response, 'reason_phrase', '')}".rstrip()
            + f") for {kind} {name!r}; retry later"
        )
    return f"the Hugging Face Hub returned {status} for {kind} {name!r} ({hub_message or first_line(error)}); retry"


def _connection_error(error: BaseException, limit: float) -> str | None:
    """Return the message for a failure without a valid response; None if this error does not show the cause."""
    types = {kind.__name__ for kind in type(error).__mro__}
    text = first_line(error)
    lower = f"{text} {error}".lower()
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    if "JSONDecodeError" in types or "FileMetadataError" in types:  # its text mentions certificates, too
        return (
            f"the response from {host} is not from the Hugging Face Hub ({text}); check for a login page of your "
            "network, HTTPS_PROXY and HF_ENDPOINT"
        )
    if "certificate" in lower:
        return (
            f"the certificate of {host} is not trusted ({text}); if your network's proxy re-signs connections, set "
            "SSL_CERT_FILE to its certificate file"
        )
    if "[ssl" in lower or "SSLError" in types:
        return f"cannot connect securely to {host} ({text}); check HTTPS_PROXY and HF_ENDPOINT"
    if "ProxyError" in types:
        return f"the proxy refused the connection to {host} ({text}); check or unset HTTPS_PROXY and HTTP_PROXY"
    if "HubTimeout" in types or "TimeoutException" in types or "TimeoutError" in types or "timed out" in lower:
        return (
            f"{host} did not respond within {limit:g} seconds; retry later, or raise the timeout with "
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
        if proxy is not None and (proxy_host := urlsplit(proxy if "//" in proxy else f"//{proxy}").hostname):
            return (
                f"cannot resolve {host} or the proxy {proxy_host} from HTTPS_PROXY ({text}); fix or unset HTTPS_PROXY, "
                "or check the network connection"
            )
        return f"cannot resolve {host} ({text}); check the network connection and DNS"
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "no space left" in lower or "not enough free disk" in lower:
        return f"the disk is full ({text}); free space, or set HF_HOME to a folder on another disk"
    certificates = os.environ.get("SSL_CERT_FILE", "")
    if number == errno.ENOENT and certificates and not os.path.exists(certificates):
        return f"SSL_CERT_FILE must be an existing file, got {certificates!r}; set it to a certificate file or unset it"
    if number in _NOT_OURS or (number in _NO_FOLDER and getattr(error, "filename", None)):
        return f"cannot write to the cache ({text}); set HF_HOME to a writable folder"
    if "ConnectError" in types or "ConnectionRefusedError" in types or "NetworkError" in types:
        return f"cannot reach {host} ({text}); check the network, HTTPS_PROXY and HF_ENDPOINT"
    if "RemoteProtocolError" in types or "consistency check failed" in lower:
        return f"the connection to {host} was interrupted ({text}); retry"
    if "UnsupportedProtocol" in types or "InvalidURL" in types:
        return f"HF_ENDPOINT must be a URL like https://huggingface.co ({text}); fix or unset it"
    return None
