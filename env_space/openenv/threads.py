"""Daemon threads for environments that do not run on the event loop; one that hangs costs no slot for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NotStarted(Exception):
    """No thread was free before the deadline; the method was not called."""


class _Job(Generic[T]):
    __slots__ = ("abandoned", "call", "future", "loop", "started")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.started = self.abandoned = False

    def settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class Threads:
    """At most `count` threads that are not hung, started on use. `hung` counts those that outlived a deadline.

    For every hung thread another may be started, `count` at most, so that hanging environments neither stop the
    others nor use up the machine; beyond that calls wait. Being daemons they do not hold up the end of the process.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive = self._idle = 0
        self.hung = 0

    async def run(self, call: Callable[[], T], seconds: float) -> T:
        """`call()` in a thread. Raises TimeoutError after `seconds` (the call may still be running), or NotStarted when
        it never began, and whatever `call` raises."""
        job = _Job(call)
        self._queue.put(job)
        with self._lock:
            self._start_one()
        try:
            async with asyncio.timeout(seconds):
                return await job.future
        except (TimeoutError, asyncio.CancelledError) as error:
            with self._lock:
                job.abandoned = True
                if job.started:
                    self.hung += 1
                    self._start_one()
                elif isinstance(error, TimeoutError):
                    raise NotStarted from None
            raise

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            for _ in range(self._alive):
                self._queue.put(None)

    def _start_one(self) -> None:
        """Start a thread when work waits, none is idle and the limit allows one. Called with the lock."""
        allowed = self._count + min(self.hung, self._count)
        if self._queue.qsize() > self._idle and self._alive < allowed:
            self._alive += 1
            self._idle += 1
            threading.Thread(target=self._work, name="openenv environment", daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.abandoned:
                    continue
                job.started = True
                self._idle -= 1
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job.call()
            except BaseException as error:  # noqa: BLE001 - handed to the waiter
                failure = error
                if isinstance(error, StopIteration) or not isinstance(error, Exception):
                    failure = RuntimeError(f"{type(error).__name__}: {error}")  # a future or the loop would not bear it
            if self._finish(job, result, failure):
                return
        with self._lock:
            self._alive -= 1
            self._idle -= 1

    def _finish(self, job: _Job[Any], result: Any, failure: BaseException | None) -> bool:
        """Hand over the outcome; True when this thread is one too many now."""
        with self._lock:
            if job.abandoned:
                self.hung -= 1
            else:
                with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                    job.loop.call_soon_threadsafe(job.settle, result, failure)
            if self._alive > self._count + min(self.hung, self._count):
                self._alive -= 1
                return True
            self._idle += 1
            return False
