"""What the gateway sends: answers that note their delivery, and refusals in the shape of a dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from sync.errors import DeltawireError, InvalidRequest

from ..answers import error_of
from .fields import short
from .sessions import Entry
from .turns import Answer, Asked

MODEL = "policy"


class DialectModule(Protocol):
    """What `chat`, `responses` and `messages` have in common; see there."""

    PING: bytes

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> Asked:
        """What a body asks; raises InvalidRequest."""
        ...

    def opening(self, asked: Asked, record: str) -> bytes:
        """What a stream can say before the answer is there."""
        ...

    def answer(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The body of an answer."""
        ...

    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        """An answer as a stream, behind its opening."""
        ...

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """The body of a refusal."""
        ...

    def error_event(self, status: int, code: str, message: str, record: str = "") -> bytes:
        """A failure inside a stream that has begun; ends it."""
        ...


class Told(JSONResponse):
    """An answer that notes in the session's record that it was sent."""

    def __init__(self, content: dict[str, Any], request: Request, entry: Entry | None) -> None:
        super().__init__(content)
        self._request, self._entry = request, entry

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Note whether somebody is there to read it (after the last byte nobody is), then send."""
        await delivered(self._request, self._entry)
        await super().__call__(scope, receive, send)


async def delivered(request: Request, entry: Entry | None) -> None:
    """Note that an answer was sent, if somebody is there still."""
    if entry is not None and not await request.is_disconnected():
        entry.delivered = True


def refusal(module: DialectModule, error: DeltawireError) -> Response:
    """An error as an answer of the dialect; one that may pass says when to come again."""
    status, code, message = error_of(error)
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONResponse(module.error(status, code, message), status, headers)


def unknown_model(name: str) -> InvalidRequest:
    """No such model here."""
    return InvalidRequest(f"model: {short(name)} is not served here; use {MODEL}", status=404, code="model_not_found")


def json_object(data: bytes) -> dict[str, Any]:
    """The body as an object. Raises InvalidRequest."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body: is not JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"body: must be a JSON object, is {type(body).__name__}")
    return body
