"""One replica over HTTP: requests out, answers back, and how sure we are that a failed request never arrived."""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

import httpx

from sync.errors import PeerUnavailable

Headers = list[tuple[bytes, bytes]]
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
_OURS = frozenset(
    {b"authorization", b"x-api-key", b"x-deltawire-key", b"cookie", b"host", b"content-length", b"expect"}
)
_KNOWN_STATUS = frozenset(int(s) for s in HTTPStatus if s >= 200 and not 300 <= s < 400)
_IDLE_SECONDS = 30.0
"""Connections that rest longer are closed here, well before uvicorn's 75 s: none is closed as we write to it."""


@functools.cache
def _trust() -> ssl.SSLContext:
    """Read once: the certificates of all authorities take longer to load than all else here."""
    return httpx.create_ssl_context()


class UpstreamError(PeerUnavailable):
    """No answer from a replica. `refused`: the request never arrived; else it may have."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class UpstreamFullError(PeerUnavailable):
    """Every connection to the replica is in use by other calls; nothing was sent."""


class UpstreamLateError(PeerUnavailable):
    """The replica took the request and gave no answer before the deadline."""


class Client:
    """HTTP to one replica with pooled connections. Belongs to one event loop; close it."""

    def __init__(self, url: str, token: str, *, connections: int, connect: float, seconds: float) -> None:
        self.url = url
        self._token = token.encode()
        self._timeout = httpx.Timeout(seconds, connect=connect, pool=connect).as_dict()
        limits = httpx.Limits(max_connections=connections, keepalive_expiry=_IDLE_SECONDS)
        few = httpx.Limits(max_connections=4, keepalive_expiry=_IDLE_SECONDS)
        self._http = httpx.AsyncClient(limits=limits, trust_env=False, verify=_trust())
        self._asking = httpx.AsyncClient(limits=few, trust_env=False, verify=_trust())

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._asking.aclose()

    @asynccontextmanager
    async def send(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b"",
        *, key: bytes = b"", asking: bool = False,
    ) -> AsyncIterator[httpx.Response]:  # fmt: skip
        """Send a request with the token, or with `key` in its place; yields the answer once its head is there.

        Leaving the block early ends the connection, which cancels the request at the replica. Raises UpstreamError, or
        UpstreamLateError when the head is not there in time.
        """
        sent = [*headers, (b"x-deltawire-key", key or self._token)]
        try:
            request = httpx.Request(
                method, self.url + target, headers=sent, content=body, extensions={"timeout": self._timeout}
            )
            answer = await (self._asking if asking else self._http).send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UpstreamError(self._said(error), refused=True) from None
        except httpx.PoolTimeout:
            raise UpstreamFullError(f"all connections to {self.url} are in use (setting replica_connections)") from None
        except httpx.TimeoutException as error:
            raise UpstreamLateError(self._said(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UpstreamError(self._said(error)) from None
        try:
            if answer.status_code not in _KNOWN_STATUS:
                raise UpstreamError(f"{self.url} answered {answer.status_code}, which no replica answers")
            yield answer
        finally:
            await answer.aclose()

    async def read(self, answer: httpx.Response, most: int) -> bytes:
        """The body of an answer as it was sent; raises UpstreamError where it breaks off or exceeds `most` bytes."""
        parts, size = [], 0
        async for part in self.parts(answer):
            size += len(part)
            if size > most:
                raise UpstreamError(f"{self.url} answered more than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    async def parts(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it comes, unbuffered; errors as `send`."""
        try:
            async for part in answer.aiter_raw():
                yield part
        except httpx.TimeoutException as error:
            raise UpstreamLateError(self._said(error)) from None
        except httpx.HTTPError as error:
            raise UpstreamError(self._said(error)) from None

    async def get(self, target: str, most: int) -> tuple[int, bytes]:
        """Status and body of a question about the replica's state, over connections that calls cannot use up."""
        async with self.send("GET", target, [(b"accept-encoding", b"identity")], asking=True) as answer:
            return answer.status_code, await self.read(answer, most)

    def _said(self, error: Exception) -> str:
        return f"{self.url} does not answer: {type(error).__name__} {error}".rstrip()


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A client's headers as the replica gets them: without keys, cookies and what concerns one connection only."""
    kept = _end_to_end(headers, _OURS)
    if not any(name == b"accept-encoding" for name, _ in kept):
        kept.append((b"accept-encoding", b"identity"))
    return kept


def passed_back(answer: httpx.Response) -> Headers:
    """An answer's headers as the client gets them."""
    return _end_to_end(answer.headers.raw, frozenset({b"set-cookie", b"server", b"date"}))


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    found = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in found if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in found if name not in dropped | named | _HOP_BY_HOP]
