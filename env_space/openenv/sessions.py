"""Sessions over OpenEnv: bounded in number, waited for in turn, ended when idle, resumed by id alone."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from typing import Any, Protocol

from sync.errors import InvalidRequest

from ..config import OpenEnvLimits
from ..environments import Environment
from .episode import Episode
from .threads import Threads
from .wire import session_error


class Socket(Protocol):
    """An open socket, as the sweep sees it."""

    last: float
    busy: bool

    def cut(self, reason: str) -> None:
        """End it soon, telling the peer why."""


class Session:
    """One episode at a time under an id. A session that was asked for by name (`named`) outlives its socket, until its
    lease ends; any other ends with its socket."""

    __slots__ = ("closing", "episode", "id", "last", "named", "socket")

    def __init__(self, name: str, episode: Episode, *, named: bool) -> None:
        self.id, self.episode, self.named = name, episode, named
        self.last = time.monotonic()
        self.socket: Socket | None = None
        self.closing = False


class Sessions:
    """The sessions of one process. `counters` counts what happened since the start."""

    def __init__(self, limits: OpenEnvLimits, threads: int) -> None:
        self.limits = limits
        self.threads = Threads(threads)
        self.counters: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.sockets: set[Socket] = set()
        self._sessions: dict[str, Session] = {}
        self._taken = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._sweep: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to end what is idle."""
        self._sweep = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        """End every session; whoever waits is refused."""
        if self._sweep is not None:
            self._sweep.cancel()
            await asyncio.gather(self._sweep, return_exceptions=True)
        for waiting in self._queue:
            if not waiting.done():
                waiting.set_exception(session_error("the environment Space is shutting down; connect again", 503))
        self._sessions.clear()
        self.threads.close()

    async def open(self, cls: type[Environment], *, named: bool = False) -> Session:
        """A new session, after waiting for a free place. Raises InvalidRequest CAPACITY_REACHED when none comes."""
        await self._place()
        name = secrets.token_hex(16)
        session = Session(name, Episode(cls, self.limits, self.threads, self.counters, name), named=named)
        self._sessions[name] = session
        self.counters["opened"] += 1
        return session

    def get(self, name: str, cls: type[Environment]) -> Session:
        """The session of that id, used just now; raises InvalidRequest where it is not, or no longer, held."""
        session = self._sessions.get(name)
        if session is None or session.episode.cls is not cls or session.closing:
            raise session_error(
                f"Unknown session_id: {name[:64]!r} is no session of {cls.name} here. It was closed, its lease of "
                f"{self.limits.lease_seconds:g} s ended, or this process started anew: its episode is lost",
                404,
            )
        session.last = time.monotonic()
        if session.socket is not None:
            session.socket.last = session.last
        return session

    def close(self, session: Session, why: str = "closed") -> None:
        """End a session and give its place to who waits longest. A second call does nothing."""
        if self._sessions.pop(session.id, None) is None:
            return
        self.counters[why] += 1
        self._pass_on()

    def detach(self, session: Session, socket: Socket) -> None:
        """The session's socket is gone."""
        if session.socket is not socket:
            return  # another took it over
        session.socket, session.last = None, time.monotonic()
        if not session.named or session.closing:
            self.close(session)

    def status(self) -> dict[str, Any]:
        """What GET /openenv/status shows."""
        count = self.counters
        names = ("opened", "closed", "reaped", "refused", "resumed", "resets", "steps", "tool_calls", "raised",
                 "deadlines", "frames_too_large", "sockets_cut")  # fmt: skip
        return {
            "sessions": {
                "active": len(self._sessions), "attached": sum(s.socket is not None for s in self._sessions.values()),
                "waiting": sum(not w.done() for w in self._queue), "most": self.limits.sessions,
            },
            "sockets": len(self.sockets),
            "hung_threads": self.threads.hung,
            "counters": {name: count[name] for name in names},
            "errors": dict(sorted(self.errors.items())),
        }  # fmt: skip

    async def _place(self) -> None:
        if self._taken < self.limits.sessions:
            self._taken += 1
            return
        if len(self._queue) >= self.limits.waiting:  # those that gave up leave the queue at once, so all of it waits
            raise self._refused(f"and {len(self._queue)} wait (settings openenv.sessions, openenv.waiting)")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(mine)
        try:
            async with asyncio.timeout(self.limits.wait_seconds):
                await asyncio.shield(mine)
        except TimeoutError:
            if not mine.done():
                seconds = self.limits.wait_seconds
                raise self._refused(f"none ended within {seconds:g} s (setting openenv.wait_seconds)") from None
        except asyncio.CancelledError:
            if mine.done() and mine.exception() is None:
                self._pass_on()
            raise
        finally:
            if not mine.done():
                self._queue.remove(mine)

    def _pass_on(self) -> None:
        """Give a place to who waits longest."""
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
        self._taken -= 1

    def _refused(self, why: str) -> InvalidRequest:
        self.counters["refused"] += 1
        text = f"all {self.limits.sessions} sessions are taken, {why}; close some, or try again later"
        return InvalidRequest(text, status=503, code="CAPACITY_REACHED")

    async def _sweep_for_ever(self) -> None:
        lease = self.limits.lease_seconds
        while True:
            await asyncio.sleep(min(max(lease / 4, 0.05), 30.0))
            oldest = time.monotonic() - lease
            for socket in [s for s in self.sockets if not s.busy and s.last < oldest]:
                self.counters["sockets_cut"] += 1
                socket.cut(f"nothing was heard for {lease:g} s (setting openenv.lease_seconds)")
            for session in [s for s in self._sessions.values() if s.socket is None and s.last < oldest]:
                self.close(session, "reaped")
