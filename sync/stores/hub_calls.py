"""Calls to the Hub that end in time, and say in one line what went wrong.

The clients retry for minutes and wait without a limit. Here every call runs in a thread of its own, and its caller gets
an answer or StoreUnavailable at the deadline. A call that was given up must not write later: a late repetition of an
old head would hide the newer one. So a hook in the shared HTTP client bounds each request by what is left of its
thread's time, and refuses those after it. Requests of other threads are not touched.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import hf_xet
import httpx2
from huggingface_hub import get_session, set_client_factory
from huggingface_hub.errors import (
    BucketNotFoundError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented, but not marked as exported
    are_progress_bars_disabled,
    disable_progress_bars,
    parse_ratelimit_headers,
)

from ..errors import ConfigError, DeltawireError, StoreUnavailable

T = TypeVar("T")

XET_VARIABLES = {
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "3",  # the default of 5 with 3 s between them takes 4 minutes to give up
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "500ms",
    "HF_XET_CLIENT_RETRY_MAX_DURATION": "40s",
    "HF_XET_CLIENT_CONNECT_TIMEOUT": "10s",
    "HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "1",  # one request per block instead of three
    "HF_XET_DEDUPLICATION_GLOBAL_DEDUP_QUERY_ENABLED": "0",  # a request per file that finds nothing in new weights
    "HF_XET_TELEMETRY_ENABLED": "0",
}
"""What uploads run with, unless the environment says otherwise. hf_xet reads it when its first session begins."""

RETRIED = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""

_THREAD = threading.local()
_INSTALL = threading.Lock()
_secrets: set[str] = set()


class GivenUp(Exception):
    """The time of this call is over; the text says what kept it from success."""


class DiskError(Exception):
    """The local disk refused a write; `error` is its OSError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _Call:
    """One call: when it must have ended, and the last HTTP error that it met."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.last = ""

    def left(self) -> float:
        return self.deadline - time.monotonic()


def _this_call() -> _Call | None:
    call: _Call | None = getattr(_THREAD, "call", None)
    return call


class Calls:
    """Runs blocking calls, at most `most` at a time, each with a deadline. Thread-safe."""

    def __init__(self, url: str, most: int = 64) -> None:
        self._url = url
        self._most = most
        self._slots = threading.BoundedSemaphore(most)

    def run(self, what: str, seconds: float, work: Callable[[], T]) -> T:
        """Return what `work` returns. Whatever it raises becomes a DeltawireError that starts with the store's URL, and
        so does not ending within `seconds`; DiskError passes."""
        if not self._slots.acquire(blocking=False):
            raise StoreUnavailable(
                f"{self._url}: cannot {what}: {self._most} calls are in flight or have not ended yet; try again later"
            )
        call = _Call(seconds)
        future: Future[T] = Future()

        def target() -> None:
            _THREAD.call = call
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who may be gone
                future.set_exception(error)
            finally:
                self._slots.release()

        # A daemon: a transfer that hangs must not keep the process from ending.
        threading.Thread(target=target, name=f"hub-{what}", daemon=True).start()
        try:
            error = future.exception(timeout=seconds + 0.2)  # the thread itself knows better what it waited for
        except TimeoutError:
            error = GivenUp(f"no success within {seconds:.0f} s{call.last}")
        if error is None:
            return future.result()
        if isinstance(error, _KNOWN):
            error = explain(error, self._url, what)
        try:
            raise error from None
        finally:
            del error  # a reference to itself by way of its traceback


def time_left() -> float:
    """Seconds left of the call that this thread runs; raises GivenUp when there are none."""
    call = _this_call()
    assert call is not None
    left = call.left()
    if left <= 0:
        raise GivenUp(f"no success in the time given{call.last}")
    return left


def patiently(work: Callable[[], T]) -> T:
    """Repeat `work` after failures that may pass, for as long as this thread's call has time."""
    pause = 0.5
    while True:
        try:
            return work()
        except (httpx2.TransportError, HfHubHTTPError) as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in RETRIED:
                raise
            asked = _asked_pause(error.response) if isinstance(error, HfHubHTTPError) else None
            wait, call = max(pause, asked or 0.0), _this_call()
            if call is None or wait >= call.left():
                raise
        time.sleep(wait)
        pause = min(2 * pause, 8.0)


def install(secret: str | None = None) -> None:
    """Prepare the client libraries of this process, once: deadlines, settings of uploads, no progress bars, and no
    query strings (which can be signatures) in the HTTP client's log lines. `secret` is kept out of every text."""
    import huggingface_hub.utils._http as http  # the factory in force has no public name

    for name, value in XET_VARIABLES.items():
        os.environ.setdefault(name, value)
    with _INSTALL:
        if secret:
            _secrets.add(secret)
        if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None and not are_progress_bars_disabled():
            disable_progress_bars()
        for logger in _LOGGERS:
            logger.addFilter(_log_filter)  # adding twice is adding once
        if _bound_request not in get_session().event_hooks["request"]:
            inner = http._GLOBAL_CLIENT_FACTORY
            set_client_factory(lambda: _with_hooks(inner()))


def _with_hooks(client: httpx2.Client) -> httpx2.Client:
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _bound_request],
        "response": [*hooks["response"], _refuse_long_pause],
    }
    return client


def _bound_request(request: httpx2.Request) -> None:
    if _this_call() is None:
        return
    left = time_left()
    request.extensions["timeout"] = {"connect": min(left, 10.0), "read": left, "write": left, "pool": left}


def _refuse_long_pause(response: httpx2.Response) -> None:
    """The client would sleep as long as the Hub asks; end the call when that is longer than it may last."""
    call = _this_call()
    if call is None or response.status_code not in RETRIED:
        return
    call.last = f"; the last answer was HTTP {response.status_code}"
    asked = _asked_pause(response)
    if asked is not None and asked + 1 >= call.left():
        raise GivenUp(f"HTTP {response.status_code}, and the Hub asks to wait {asked:.0f} s")


def _asked_pause(response: httpx2.Response) -> float | None:
    info = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    if info is not None and info.remaining == 0:
        return float(info.reset_in_seconds)
    text = response.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


# --- words

_KNOWN = (
    OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, httpx2.HTTPError, httpx2.InvalidURL,
    GivenUp,
)  # fmt: skip
"""What the clients raise: transport and HTTP errors, hf_xet's, and those of an answer that is not what it should be."""

_QUERY = re.compile(r"(https?://[^\s?#'\"<>]*)[?#][^\s'\"<>)]*", re.IGNORECASE)
_TOKEN = re.compile(
    r"\bhf_\w+|\b(?:bearer|basic)\s+[^\s'\"]+|(?<=x-xet-access-token', b')[^']+",
    re.IGNORECASE,
)


def scrub(text: str, length: int = 300) -> str:
    """`text` in one line without tokens and without the query strings of URLs, which can be signatures."""
    text = _TOKEN.sub("***", _QUERY.sub(r"\1", text))
    for secret in (*_secrets, os.environ.get("HF_TOKEN", ""), os.environ.get("HUGGING_FACE_HUB_TOKEN", "")):
        if secret.strip():
            text = text.replace(secret.strip(), "***")
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length] + "…"


def explain(error: BaseException, url: str, what: str) -> DeltawireError:
    """The error of the tree that tells the caller what to do about `error`; its text holds no secret."""
    begin = f"{url}: cannot {what}"
    if isinstance(error, OfflineModeIsEnabled):
        return ConfigError(f"{begin}: HF_HUB_OFFLINE is set; unset it")
    if isinstance(error, BucketNotFoundError | RepositoryNotFoundError):
        return no_bucket(url)
    if (from_xet := _explain_xet(error, url, what)) is not None:
        return from_xet
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return _no_permission(url, what, f"HTTP {status}: {_said(error)}")
    if status == 429:
        return StoreUnavailable(f"{begin}: HTTP 429, too many requests; try again later, or poll less often")
    if status is not None:
        return StoreUnavailable(f"{begin}: HTTP {status} ({_said(error)}); try again")
    if isinstance(error, httpx2.TransportError | ConnectionError):
        return StoreUnavailable(f"{begin}: the Hub does not answer ({_said(error)}); check the network and HF_ENDPOINT")
    return StoreUnavailable(f"{begin}: {_said(error)}; try again")


_WRITES = ("write", "delete", "create", "open for writing")
_XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})\b.*?(https?://[^\s)]*)")


def xet_status(error: BaseException) -> int | None:
    """The HTTP status behind an error of hf_xet, which puts it into a text; None when there is none."""
    if isinstance(error, hf_xet.XetAuthenticationError):
        return 401
    match = _XET_STATUS.search(str(error)) if isinstance(error, ConnectionError | RuntimeError) else None
    return int(match[1]) if match else None


def _explain_xet(error: BaseException, url: str, what: str) -> DeltawireError | None:
    """What `explain` says of an error of hf_xet; None for any other."""
    status = xet_status(error)
    if status is None:
        return None
    match = _XET_STATUS.search(str(error))
    at = match[2] if match else ""
    if "/api/buckets/" in at and status in (401, 403):
        return _no_permission(url, what, f"HTTP {status}")
    if "/api/buckets/" in at and status == 404:
        return no_bucket(url)
    if status == 400 and "/shards" in at:
        return StoreUnavailable(
            f"{url}: cannot {what}: HTTP 400 for an upload; if this stays, this machine remembers uploads that the Hub "
            "has lost: stop, delete the folder that HF_XET_CACHE names (else xet in HF_HOME), and start again"
        )
    return StoreUnavailable(f"{url}: cannot {what}: HTTP {status} from the storage ({_said(error)}); try again")


def _no_permission(url: str, what: str, found: str) -> ConfigError:
    return ConfigError(
        f"{url}: cannot {what}: no permission ({found}); set HF_TOKEN, or log in with `hf auth login`, to a token that "
        f"may {'write' if what in _WRITES else 'read'} it"
    )


def no_bucket(url: str) -> ConfigError:
    """The error for a bucket that is not there, or not for this token: the Hub shows no difference."""
    bucket = "/".join(url.removeprefix("hf://buckets/").split("/")[:2])
    return ConfigError(
        f"{url}: no such bucket, or the token may not see it; create it with `hf buckets create {bucket} --private`, "
        "or set HF_TOKEN to a token that may read it"
    )


def _said(error: BaseException) -> str:
    text = getattr(error, "server_message", None) or str(error) or "no text"
    return scrub(text if isinstance(error, HfHubHTTPError | GivenUp) else f"{type(error).__name__}: {text}")


def _log_filter(record: logging.LogRecord) -> bool:
    record.msg, record.args = scrub(record.getMessage(), 2000), ()
    return True


_LOGGERS = [
    logging.getLogger(name)
    for name in ("httpx2", "httpcore2.connection", "httpcore2.http11", "httpcore2.http2", "httpcore2.proxy")
]
