"""The WebSockets of OpenEnv: /ws with an episode per session, /mcp with JSON-RPC. Plain ASGI, one frame at a time."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from pydantic_core import from_json, to_json

from sync.asgi import Receive, Scope, Send
from sync.errors import InvalidRequest

from ..environments import Environment
from .mcp import Mcp
from .sessions import Session, Sessions
from .wire import encoded, error_frame

TOO_BIG, TRY_AGAIN, NORMAL, GOING = 1009, 1013, 1000, 1001
GOODBYE_SECONDS = 2.0


class _Closed(Exception):
    """The socket is to be closed with `code`."""

    def __init__(self, code: int = NORMAL) -> None:
        super().__init__(code)
        self.code = code


class FrameSocket(ABC):
    """One accepted socket: reads a frame, answers it, reads the next.

    Its session is opened with the first frame that needs one, and waited for in turn; `?session_id=` takes over one
    that is held. `last` and `busy` are for the sweep of idle sockets.
    """

    def __init__(self, cls: type[Environment], sessions: Sessions, scope: Scope, receive: Receive, send: Send) -> None:
        self._cls, self._sessions, self._receive, self._send = cls, sessions, receive, send
        self._limit = sessions.limits.max_frame_bytes
        wanted = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id", [])
        self._wanted = wanted[-1] if wanted else None
        self.session: Session | None = None
        self.last = time.monotonic()
        self.busy = False
        self._reason: str | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ahead: asyncio.Future[Any] | None = None

    async def serve(self) -> None:
        """Accept and answer until either side ends it; never raises for what the peer does."""
        self._task = asyncio.current_task()
        self._sessions.sockets.add(self)
        code = NORMAL
        try:
            await self._receive()  # websocket.connect
            await self._send({"type": "websocket.accept"})
            await self._answer_all()
        except _Closed as closed:
            code = closed.code
        except OSError:  # the peer went away while we answered
            return
        except asyncio.CancelledError:
            if self._reason is None or self._task is None:
                return  # the server ends all that is left; it would log a traceback for what we raise
            self._task.uncancel()
            code = GOING
        finally:
            self._sessions.sockets.discard(self)
            if self._ahead is not None:
                self._ahead.cancel()
            if self.session is not None:
                self._sessions.detach(self.session, self)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                if self._reason is not None:
                    await self._send_text(self._failure(InvalidRequest(self._reason, code="SESSION_ERROR")))
                await self._send({"type": "websocket.close", "code": code, "reason": (self._reason or "")[:120]})

    def cut(self, reason: str) -> None:
        """End this socket, at once where it only waits for a frame, else after the frame that it answers."""
        self._reason = reason
        if not self.busy and self._task is not None:
            self._task.cancel()

    async def _answer_all(self) -> None:
        if self._wanted is not None:
            self._resume(self._wanted)
        while self._reason is None:
            ahead, self._ahead = self._ahead, None
            event = await (self._receive() if ahead is None else ahead)
            if event["type"] != "websocket.receive":
                raise OSError("the peer closed")
            self.last = time.monotonic()
            text = event.get("text")
            if text is None:
                text = event.get("bytes") or b""
            self.busy = True
            try:
                reply = await self._reply(text)
            finally:
                self.busy = False
            if reply is not None:
                await self._send({"type": "websocket.send", "text": reply})
        raise _Closed(GOING)

    async def _reply(self, text: str | bytes) -> str | None:
        if len(text) > self._limit:
            self._sessions.counters["frames_too_large"] += 1
            found = f"a frame of {len(text)} characters; at most {self._limit} (setting openenv.max_frame_bytes)"
            await self._send_text(self._failure(InvalidRequest(found, code="VALIDATION_ERROR")))
            raise _Closed(TOO_BIG)
        return await self._frame(text)

    @abstractmethod
    async def _frame(self, text: str | bytes) -> str | None:
        """The answer to one frame, or None where there is none; raises _Closed to end the socket."""

    @abstractmethod
    def _failure(self, error: InvalidRequest) -> str:
        """An error that answers no frame of the peer, in the protocol's shape."""

    async def _send_text(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    def _resume(self, wanted: str) -> None:
        try:
            session = self._sessions.get(wanted, self._cls)
        except InvalidRequest as error:
            self._sessions.errors[error.code] += 1
            self._reason = str(error)
            return
        if session.socket is not None:
            session.socket.cut("another socket took this session over with ?session_id=")
        session.socket, self.session = self, session
        self._sessions.counters["resumed"] += 1

    async def _session(self) -> Session:
        """This socket's session; opened on first use. A peer that leaves while it waits leaves the queue."""
        if self.session is None:
            opening = asyncio.ensure_future(self._sessions.open(self._cls))
            self._ahead = asyncio.ensure_future(self._receive())
            try:
                await asyncio.wait((opening, self._ahead), return_when=asyncio.FIRST_COMPLETED)
                if self._ahead.done() and self._ahead.result()["type"] == "websocket.disconnect":
                    raise OSError("the peer closed while it waited for a session")
                self.session = await opening
                self.session.socket = self
            except BaseException:
                opening.cancel()
                opening.add_done_callback(self._late)
                raise
        return self.session

    def _late(self, opening: asyncio.Future[Session]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._sessions.close(opening.result())


class EpisodeSocket(FrameSocket):
    """/ws: reset, step, state, mcp and close, as OpenEnv's clients send them."""

    def __init__(self, cls: type[Environment], sessions: Sessions, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(cls, sessions, scope, receive, send)
        self._mcp = Mcp(cls, sessions, socket=True)

    async def _frame(self, text: str | bytes) -> str | None:
        try:
            kind, data = _opened(text)
            if kind == "step":
                session = self.session or await self._session()
                answer = await session.episode.step(data)
                return self._observation(session, answer)
            return await self._other(kind, data)
        except InvalidRequest as error:
            if error.code == "CAPACITY_REACHED" and self.session is None:
                await self._send_text(self._failure(error))
                raise _Closed(TRY_AGAIN) from None
            return self._failure(error)

    async def _other(self, kind: str, data: dict[str, Any]) -> str | None:
        match kind:
            case "reset":
                session = await self._session()
                return self._observation(session, await session.episode.reset(data))
            case "state":
                return encoded({"type": "state", "data": (await self._session()).episode.state()}, self._limit)
            case "mcp":
                session = await self._session()
                answer = await self._mcp.answer(self._mcp.read(data), self._session, own=session, resets=True)
                return f'{{"type":"mcp","data":{answer or "{}"}}}'
            case "close":
                raise _Closed
        raise InvalidRequest(f"Unknown message type: {kind[:64]!r}", code="UNKNOWN_TYPE")

    def _observation(self, session: Session, data: dict[str, Any]) -> str:
        try:
            return encoded({"type": "observation", "data": data}, self._limit)
        except InvalidRequest as error:
            raise session.episode.over(str(error)) from None

    def _failure(self, error: InvalidRequest) -> str:
        self._sessions.errors[error.code] += 1
        facts: dict[str, Any] = {}
        if error.code == "CAPACITY_REACHED":
            status = self._sessions.status()["sessions"]
            facts = {"active_sessions": status["active"], "max_sessions": status["most"]}
        return error_frame(error, **facts)


class McpSocket(FrameSocket):
    """/mcp: JSON-RPC, with a session of its own per socket."""

    def __init__(self, cls: type[Environment], sessions: Sessions, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(cls, sessions, scope, receive, send)
        self._mcp = Mcp(cls, sessions, socket=True)

    async def _frame(self, text: str | bytes) -> str | None:
        return await self._mcp.answer(self._mcp.read(text), self._session, own=self.session)

    def _failure(self, error: InvalidRequest) -> str:
        self._sessions.errors[error.code] += 1
        body = {"code": -32000, "message": str(error), "data": {"code": error.code}}
        return to_json({"jsonrpc": "2.0", "id": None, "error": body}).decode()


def _opened(text: str | bytes) -> tuple[str, dict[str, Any]]:
    """Type and data of a frame; raises InvalidRequest."""
    try:
        frame = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"Invalid JSON: {error}", code="INVALID_JSON") from None
    if not isinstance(frame, dict):
        raise InvalidRequest(f"a frame is an object, found {type(frame).__name__}", code="VALIDATION_ERROR")
    kind, data = frame.get("type", ""), frame.get("data", {})
    if not isinstance(kind, str) or not isinstance(data, dict) or len(frame) > 1 + ("data" in frame):
        wrong = sorted(str(key)[:64] for key in frame.keys() - {"type", "data"})
        found = f"unknown keys {', '.join(wrong[:8])}" if wrong else "a 'type' or 'data' of another kind"
        raise InvalidRequest(f"a frame is {{'type': text, 'data': object}}; found {found}", code="VALIDATION_ERROR")
    return kind, data
