"""Bounded stages and the deadlines of an episode. Deadlines stand still while the policy is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from ..config import Pool, Stages

T = TypeVar("T")


class StageTimeout(Exception):
    """An episode was longer in a stage than its deadline allows; `stage` is the stage's name."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"deadline of stage {stage} exceeded")
        self.stage = stage


class Budget:
    """Seconds that may still pass, not counting those in which the policy was away, within a parent's budget."""

    __slots__ = ("_away", "_away_before", "_limit", "_parent")

    def __init__(self, seconds: float, away: Callable[[], float], parent: Budget | None = None) -> None:
        self._away = away
        self._away_before = away()
        self._limit = time.monotonic() + seconds
        self._parent = parent

    def left(self) -> float:
        """Seconds left; 0 or less when none are."""
        own = self._limit - time.monotonic() + self._away() - self._away_before
        return own if self._parent is None else min(own, self._parent.left())

    async def wait(self, future: asyncio.Future[T], stage: str) -> T:
        """The future's result; cancels it and raises StageTimeout when the budget ends first."""
        try:
            while not future.done():
                left = self.left()
                if left <= 0:
                    raise StageTimeout(stage)
                await asyncio.wait((future,), timeout=left)
            return future.result()
        finally:
            future.cancel()


class Stage:
    """One bounded stage: counts who is inside and the seconds spent there."""

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self.deadline = pool.seconds
        self.active = 0
        self.seconds = 0.0
        self._slots = asyncio.Semaphore(pool.slots)

    @asynccontextmanager
    async def inside(self, waiting: Budget, seconds: dict[str, float]) -> AsyncIterator[None]:
        """Hold a slot, which must be had within the budget `waiting` (else StageTimeout); adds to `seconds`."""
        await self.enter(waiting)
        async with self.entered(seconds):
            yield

    @asynccontextmanager
    async def entered(self, seconds: dict[str, float]) -> AsyncIterator[None]:
        """Hold the slot that `enter` took, and release it at the end."""
        began = time.monotonic()
        self.active += 1
        try:
            yield
        finally:
            spent = time.monotonic() - began
            self.seconds += spent
            seconds[self.name] = seconds.get(self.name, 0.0) + spent
            self.active -= 1
            self._slots.release()

    async def enter(self, waiting: Budget) -> None:
        """Take a slot within the budget, else raise StageTimeout; the caller goes on into `entered`."""
        if not self._slots.locked():
            await self._slots.acquire()
            return
        while (left := waiting.left()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._slots.acquire()
            except TimeoutError:
                continue
            return
        raise StageTimeout(self.name)


class Pipeline:
    """INIT → READY → RUN → POST → SCORE."""

    def __init__(self, settings: Stages) -> None:
        self.init = Stage("init", settings.init)
        self.ready = Stage("ready", settings.ready)
        self.run = Stage("run", settings.run)
        self.post = Stage("post", settings.post)
        self.score = Stage("score", settings.score)

    def all(self) -> tuple[Stage, ...]:
        """The stages in order."""
        return (self.init, self.ready, self.run, self.post, self.score)
