"""One request to one replica: what was asked, what is sent back, and what the replica is blamed for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import httpx
from pydantic import ValidationError

from sync.asgi import Send, error_json
from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.calls import ErrorBody, ErrorResponse

from .replicas import Pool, Replica
from .upstream import Headers, UpstreamError, UpstreamFullError, passed_back

_MAX_REFUSAL = 64 * 1024


class Asked(NamedTuple):
    """One request of a client, read whole. `target` is path and query as the replica gets them, `headers` too; `key`
    stands in for the token where a session's key came."""

    method: str
    target: str
    headers: Headers
    body: bytes
    key: bytes = b""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    async def send(self, send: Send) -> None:
        """Send it."""
        dropped = (b"content-length",)
        headers = [h for h in self.headers if h[0] not in dropped] + [(b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class TurnedAwayError(PeerUnavailable):
    """A replica answered that it takes no calls now; `reply` is what it said."""

    def __init__(self, message: str, reply: Reply) -> None:
        super().__init__(message)
        self.reply = reply


class CutError(Exception):
    """An answer broke off after its head was passed on; nothing but ending the connection is left."""


class Passing:
    """Passes requests on to the replicas of a pool. `seconds`: deadline for the head of an answer; `max_answer`: most
    bytes of an answer that is read whole."""

    def __init__(self, pool: Pool, *, seconds: float, max_answer: int) -> None:
        self.pool = pool
        self._seconds = seconds
        self._max_answer = max_answer

    async def whole(self, replica: Replica, asked: Asked) -> Reply:
        """Ask and read the answer whole, whatever its status but 429 and 503, which are TurnedAwayError.

        Raises UpstreamError, UpstreamFullError or UpstreamLateError where there is no answer.
        """
        headers = [h for h in asked.headers if h[0] != b"accept-encoding"] + [(b"accept-encoding", b"identity")]
        async with replica.client.send(asked.method, asked.target, headers, asked.body, key=asked.key) as answer:
            await self.unless_turned_away(replica, answer)
            return Reply(answer.status_code, passed_back(answer), await replica.client.read(answer, self._max_answer))

    async def unless_turned_away(self, replica: Replica, answer: httpx.Response) -> None:
        """Raise TurnedAwayError where the replica takes no calls, UpstreamError where it does not know our token."""
        if answer.status_code == 401:
            raise UpstreamError(f"{replica.url} refuses the token; give DELTAWIRE_TOKEN the same value there")
        if answer.status_code in (429, 503):
            body = await replica.client.read(answer, _MAX_REFUSAL)
            reply = Reply(answer.status_code, passed_back(answer), body)
            raise TurnedAwayError(f"{replica.url}: {error_of(reply).message}", reply)

    async def relay(self, replica: Replica, answer: httpx.Response, send: Send) -> None:
        """Pass the answer on as it comes; raises CutError where it breaks off."""
        headers = passed_back(answer)
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        try:
            async for part in replica.client.parts(answer):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except PeerUnavailable as error:
            replica.failed += 1
            raise CutError(str(error)) from None
        replica.answered += 1
        await send({"type": "http.response.body", "body": b""})

    def blame(self, replica: Replica, error: PeerUnavailable) -> None:
        """Note what an attempt at this replica met."""
        if isinstance(error, TurnedAwayError):
            if error.reply.status == 503:
                self.pool.turned_away(replica, str(error))
        elif not isinstance(error, UpstreamFullError):
            self.pool.lost(replica, str(error), refused=isinstance(error, UpstreamError) and error.refused)

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[asyncio.Timeout]:
        """Inside, `seconds` may pass until the head of an answer is there; then InvalidRequest (504)."""
        try:
            async with asyncio.timeout(self._seconds) as limit:
                yield limit
        except TimeoutError:
            text = f"no answer within {self._seconds:g} s (setting request_seconds of the router); ask for less at once"
            raise InvalidRequest(text, status=504, code="deadline") from None


@contextmanager
def there(replica: Replica) -> Iterator[None]:
    """Inside, one call is in flight at the replica."""
    replica.in_flight += 1
    try:
        yield
    finally:
        leave(replica, 1)


def leave(replica: Replica, calls: int) -> None:
    """As many calls are no longer in flight there."""
    replica.in_flight -= calls


def json_reply(status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> Reply:
    """An answer of the router's own."""
    return Reply(status, [(b"content-type", b"application/json"), *headers], body)


def error_of(reply: Reply) -> ErrorBody:
    """The error that an answer holds, whatever it holds."""
    try:
        return ErrorResponse.model_validate_json(reply.body).error
    except ValidationError:
        return ErrorBody(code="internal", message=f"answered {reply.status} without an error of a Space's form")


def failure(error: Exception) -> Reply:
    """What the client gets for an error of ours."""
    again = (b"retry-after", b"1")
    if isinstance(error, TurnedAwayError):
        kept = [h for h in error.reply.headers if h[0] != again[0]]
        return error.reply if len(kept) < len(error.reply.headers) else error.reply._replace(headers=[*kept, again])
    if isinstance(error, InvalidRequest):
        return json_reply(error.status, error_json(error.code, str(error)))
    return json_reply(503, error_json("not_ready", str(error)), [again])
