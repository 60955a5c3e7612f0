"""Connections of a Space within bounds: how many, how long a request may take to arrive, how large its head may be.

uvicorn bounds none of them: whoever opens connections and says nothing, or sends headers for ever, would be held in
memory until the system refuses. Loaded with uvicorn, on use.
"""

from __future__ import annotations

import asyncio
from typing import Any

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
except ImportError:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # type: ignore[assignment]

MAX_HEAD = 64 * 1024


def bounded(max_connections: int, read_seconds: float) -> type[asyncio.Protocol]:
    """The HTTP protocol of uvicorn with bounds.

    Beyond `max_connections` one that waits for a request is closed for the new one, else the new one is. A connection
    is cut off when its first request, or a later one that began, has not arrived whole after `read_seconds`, and when
    the head of one exceeds 64 KiB.
    """
    return type("BoundedProtocol", (_Bounded,), {"most": max_connections, "seconds": read_seconds})


class _Bounded(Protocol):
    most: int
    seconds: float
    _timer: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.seconds, transport.abort)
        if len(self.connections) > self.most:
            waiting = (c for c in self.connections if c is not self and isinstance(c, _Bounded) and c.waiting)
            next(waiting, self).transport.abort()

    @property
    def waiting(self) -> bool:
        """True between two requests, and until the head of one is complete."""
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete and not cycle.more_body)

    def on_message_complete(self) -> None:
        """A whole request is there (httptools)."""
        super().on_message_complete()  # notes nothing where the answer came before the end of the body
        if self.cycle is not None:
            self.cycle.more_body = False

    def data_received(self, data: bytes) -> None:
        self._head = self._head + len(data) if self.waiting else 0
        super().data_received(data)
        if not self.waiting:
            self._head = 0
        elif self._head > MAX_HEAD:
            self.transport.abort()
        whole = not self.waiting and not self.cycle.more_body
        if whole or self not in self.connections:  # it became a WebSocket, which is another protocol's
            self._cancel()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
