"""What a bucket on the real Hub may do to a client, on demand: waits, refusals, lost replies, half batches, the past.

A fault is one `Fault` rule. On the command line: `KIND=VALUE;key=value;…`, e.g. `error_after=503;path=/batch$;count=1`.

| kind | value | effect |
|---|---|---|
| latency | seconds | wait before the request is handled, plus up to `jitter` seconds |
| rate_limit | seconds until reset | answer 429 with RateLimit and Retry-After |
| error_before, error_after | status | answer this status; `after` the request was applied |
| drop | before or after | close the connection without an answer; `after` the request was applied |
| fail_op | part of a path | this operation of a batch is answered as failed and not applied |
| slow_batch | seconds | apply a batch one operation at a time, each visible at once, waiting in between |
| stale_list, stale_info | seconds | show listings, or paths-info and resolve, as they were then |
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.responses import Response

from ..asgi import App, Receive, Scope, Send
from ..errors import ConfigError
from .responses import HubError, error_response

Kind = Literal[
    "latency", "rate_limit", "error_before", "error_after", "drop", "fail_op", "slow_batch", "stale_list", "stale_info"
]
ABORT = "deltawire.abort"
MAX_SECONDS = 3600.0


class Fault(BaseModel):
    """One rule. `method` and `path` are regular expressions for the request: the method whole, the path anywhere.

    `probability`: drawn per request from a generator seeded with `seed`. `count`: how often it may hit; None: always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    kind: Kind
    value: str = ""
    jitter: float = Field(0.0, ge=0, le=MAX_SECONDS)
    method: str = ".*"
    path: str = ""
    probability: float = Field(1.0, ge=0, le=1)
    count: int | None = Field(None, ge=0)
    seed: int = 0

    @field_validator("method", "path")
    @classmethod
    def _is_regex(cls, text: str) -> str:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return text

    @model_validator(mode="after")
    def _value_fits(self) -> Fault:
        if self.kind == "drop":
            if self.value not in ("before", "after"):
                raise ValueError("drop needs the value before or after")
        elif self.kind.startswith("error_"):
            if not re.fullmatch(r"[45]\d\d", self.value):
                raise ValueError(f"{self.kind} needs a status from 400 to 599")
        elif self.kind != "fail_op" and not (_is_number(self.value) and 0 <= float(self.value) <= MAX_SECONDS):
            raise ValueError(f"{self.kind} needs seconds from 0 to {MAX_SECONDS:.0f}")
        return self

    @property
    def seconds(self) -> float:
        """The value as seconds."""
        return float(self.value)


def parse_fault(text: str) -> Fault:
    """Read a command-line fault; raises ConfigError that shows the form."""
    parts = [part.partition("=") for part in text.split(";") if part.strip()]
    kind, _, value = parts[0] if parts else ("", "", "")
    return check_fault({"kind": kind.strip(), "value": value, **{k.strip(): v for k, _, v in parts[1:]}}, text)


def check_fault(values: Mapping[str, Any], text: str) -> Fault:
    """Build a fault from plain values; raises ConfigError that names the first wrong one."""
    try:
        return Fault.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "value"
        raise ConfigError(
            f"fault {text!r}: {where}: {first['msg']}; expected KIND=VALUE;key=value with a kind such as "
            "'latency=0.05' or 'error_after=503;path=/batch$;count=1'"
        ) from None


class Faults:
    """The faults in force, their counts, and the middleware that applies those of whole requests. Thread-safe."""

    def __init__(self, faults: list[Fault] | None = None) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._active: dict[int, _Active] = {}
        for fault in faults or []:
            self.add(fault)

    def add(self, fault: Fault) -> int:
        """Put a fault in force; returns its number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._active[number] = _Active(fault)
            return number

    def remove(self, number: int | None = None) -> None:
        """Lift one fault, or all. Raises HubError 404 for a number that is not in force."""
        with self._lock:
            if number is None:
                self._active.clear()
            elif self._active.pop(number, None) is None:
                raise HubError(404, f"no fault {number} is in force")

    def shown(self) -> list[dict[str, Any]]:
        """All faults in force with their numbers and how often each was hit."""
        with self._lock:
            return [{"id": n, "hits": a.hits, **a.fault.model_dump()} for n, a in self._active.items()]

    def hit(self, kinds: tuple[Kind, ...], method: str, path: str, *, operation: str | None = None) -> list[Fault]:
        """The faults of `kinds` that strike this request (or this operation of it) now, counted, in their order."""
        with self._lock:
            active = [a for a in self._active.values() if a.fault.kind in kinds]
            return [a.fault for a in active if a.strikes(method, path, operation)]

    def seconds(self, kind: Kind, method: str, path: str) -> float | None:
        """The seconds of the first fault of `kind` that strikes, or None."""
        found = self.hit((kind,), method, path)
        return found[0].seconds if found else None

    def middleware(self, app: App) -> App:
        """ASGI middleware around the Hub."""
        return _Middleware(app, self)


class _Active:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.hits = 0
        self._random = random.Random(fault.seed)
        self._method = re.compile(fault.method, re.IGNORECASE)
        self._path = re.compile(fault.path)

    def strikes(self, method: str, path: str, operation: str | None) -> bool:
        fault = self.fault
        if fault.count is not None and self.hits >= fault.count:
            return False
        if not self._method.fullmatch(method) or not self._path.search(path):
            return False
        if operation is not None and fault.value not in operation:
            return False
        if fault.probability < 1 and self._random.random() >= fault.probability:
            return False
        self.hits += 1
        return True


class _Middleware:
    def __init__(self, app: App, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(("/_faults", "/_log")):
            await self._app(scope, receive, send)
            return
        faults, method, path = self._faults, scope["method"], scope["path"]
        for fault in faults.hit(("latency",), method, path):
            await asyncio.sleep(fault.seconds + random.uniform(0, fault.jitter))
        struck = faults.hit(("rate_limit", "error_before", "error_after", "drop"), method, path)
        if not struck:
            await self._app(scope, receive, send)
            return
        fault = struck[0]
        if fault.kind == "error_after" or (fault.kind == "drop" and fault.value == "after"):
            await _apply(self._app, scope, receive)
        if fault.kind == "drop":
            await _drop(scope, receive)
            return
        answer = _rate_limited(fault) if fault.kind == "rate_limit" else _refusal(fault)
        await answer(scope, receive, send)


async def _apply(app: App, scope: Scope, receive: Receive) -> None:
    """Let the app handle the request up to the point where it would answer; the client never sees that answer."""
    answered = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answered.set()

    handling = asyncio.ensure_future(app(scope, receive, send))
    waiting = asyncio.ensure_future(answered.wait())
    try:
        await asyncio.wait({handling, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        handling.cancel()
        waiting.cancel()
    for result in await asyncio.gather(handling, waiting, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _refusal(fault: Fault) -> Response:
    return error_response(HubError(int(fault.value), f"injected fault: {fault.kind}"))


def _rate_limited(fault: Fault) -> Response:
    reset = max(0, round(fault.seconds))
    answer = error_response(HubError(429, f"We had to rate limit you, try again in {reset} seconds (injected fault)"))
    answer.headers["RateLimit"] = f'"api";r=0;t={reset}'
    answer.headers["RateLimit-Policy"] = '"fixed window";"api";q=1000;w=300'
    answer.headers["Retry-After"] = str(reset)
    return answer


async def _drop(scope: Scope, receive: Receive) -> None:
    """Close the connection and return once the server has noticed."""
    scope["extensions"][ABORT]()
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
