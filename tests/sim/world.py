"""One seed decides everything: real threads of which one runs at a time, virtual time, kills and restarts.

A running task hands the baton on at every store call and every sleep (`World.pause`); the seeded scheduler picks who
goes on. Nothing here reads a wall clock, sleeps or draws unseeded randomness, so a seed names one schedule exactly.
"""

from __future__ import annotations

import hashlib
import heapq
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any, NoReturn

from support.faults import Stopped

from sync.clock import Clock

STALL = 60.0
"""Real seconds after which a task that does not hand the baton back is a deadlock in the code under test."""
TAIL = 60


class Broken(AssertionError):
    """A promise does not hold; `promise` is its name."""

    def __init__(self, promise: str, message: str) -> None:
        super().__init__(f"{promise}: {message}")
        self.promise = promise


class Process:
    """What lives and dies together: the tasks of one trainer or one follower. Its folder survives a kill.

    `skew` is how far its wall clock is from the store's, `pace` how slow its calls are.
    """

    def __init__(self, world: World, name: str, *, skew: float = 0.0) -> None:
        self.world, self.name, self.skew = world, name, skew
        self.pace = 1.0
        self.generation = 0
        self.kill_rate = 0.0
        self.dead = False
        self.clock = Clock(self._now, self._monotonic, self._sleep, world.token_hex)

    def kill(self) -> None:
        """End every task of this process at its next step; it is dead until it is started again."""
        self.dead = True
        self.generation += 1
        self.world.count["kill"] += 1
        self.world.note(f"{self.name} is killed")

    def _now(self) -> float:
        return self.world.now + self.skew

    def _monotonic(self) -> float:
        return self.world.now - 12_345.0 + self.skew

    def _sleep(self, seconds: float) -> None:
        self.world.pause("sleep", seconds)


class Task:
    """One thread of a process. `wake`: the time before which it does not run; `until`: what it waits for."""

    def __init__(self, world: World, process: Process, name: str, work: Callable[[], None]) -> None:
        self.world, self.process, self.name, self.work = world, process, name, work
        self.generation = process.generation
        self.wake, self.deadline = world.now, world.now
        self.until: Callable[[], bool] | None = None
        self.done = False
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def doomed(self) -> bool:
        """True when the process was killed, or the world ends."""
        return self.world.ending or self.generation != self.process.generation

    def ready(self, now: float) -> bool:
        """True when it can run at `now`."""
        if self.doomed or (self.until is not None and self.until()):
            return True
        return (self.deadline if self.until is not None else self.wake) <= now

    def _main(self) -> None:
        self.gate.acquire()
        try:
            if not self.doomed:
                self.work()
        except Stopped:
            if not self.doomed:
                self.world.failed(RuntimeError(f"{self.name} stopped although nobody killed it"))
        except BaseException as error:  # noqa: BLE001 - whatever went wrong ends the world and is raised by run()
            self.world.failed(error)
        self.done = True
        self.world.hand_on()


class World:
    """The scheduler. `spawn` tasks, then `run`; see the module."""

    def __init__(self, seed: int, *, max_steps: int = 20_000) -> None:
        self.seed, self.max_steps = seed, max_steps
        self.rng = Random(seed)
        self.now = 1_000_000.0
        self.steps = 0
        self.count: Counter[str] = Counter()
        self.quiet = False
        self.ending = False
        self.trace: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = 0
        self._error: BaseException | None = None
        self._main_gate = threading.Lock()
        self._main_gate.acquire()

    # --- what tasks and their tools call

    def spawn(self, process: Process, name: str, work: Callable[[], None]) -> Task:
        """Add a task; it runs when the scheduler picks it."""
        task = Task(self, process, name, work)
        self._tasks.append(task)
        task.thread.start()
        return task

    def pause(self, label: str, seconds: float = 0.0, until: Callable[[], bool] | None = None) -> bool:
        """Hand the baton on and come back after `seconds`, or earlier when `until()` holds; returns what it says then.

        Raises Stopped when the process was killed meanwhile.
        """
        task = self._current
        if task is None or task.thread is not threading.current_thread():
            raise RuntimeError(f"{threading.current_thread().name} runs without the baton")
        if task.doomed:
            raise Stopped
        self.steps += 1
        self.note(label)
        if self.steps > self.max_steps:
            self.broken("bounded", f"no end after {self.steps} steps")
        if not (self.quiet or task.process.dead) and self.rng.random() < task.process.kill_rate:
            task.process.kill()
            raise Stopped
        task.wake = task.deadline = self.now + seconds
        task.until = until
        chosen = self._pick()
        if chosen is None:
            self.broken("bounded", f"nobody can go on: {[t.name for t in self._tasks if not t.done]}")
        if chosen is not task:
            self._give(chosen)
            task.gate.acquire()
        self._current = task
        task.until = None
        if task.doomed:
            raise Stopped
        return until() if until is not None else True

    def reborn(self) -> None:
        """The running task survives the kill of its process: it is what starts the process again."""
        task = self.current
        task.generation = task.process.generation
        if self.ending:
            raise Stopped

    def others(self, task: Task) -> bool:
        """True while other tasks of a task's process have not ended."""
        return any(t.process is task.process and not t.done and t is not task for t in self._tasks)

    @property
    def current(self) -> Task:
        """The task that runs."""
        assert self._current is not None
        return self._current

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Run `work`, which must not pause, when that much time has passed."""
        self._timer_ids += 1
        heapq.heappush(self._timers, (self.now + seconds, self._timer_ids, work))

    def token_hex(self, n: int) -> str:
        """Seeded random bytes."""
        return self.rng.randbytes(n).hex()

    def note(self, line: str) -> None:
        """Append to the trace."""
        name = self._current.name if self._current else "-"
        full = f"{self.steps:5} {self.now - 1_000_000:9.2f} {name:<18} {line}"
        self.trace.append(full)
        self._hash.update(full.encode())

    def broken(self, promise: str, message: str) -> NoReturn:
        """A promise does not hold: the world ends here, past every handler of an Exception on the way."""
        self.failed(Broken(promise, message))
        raise Stopped

    def failed(self, error: BaseException) -> None:
        """Note the first error; the world ends."""
        if self._error is None and not (self.ending and isinstance(error, Stopped)):
            self._error = error
            self.note(f"FAILED {type(error).__name__}: {error}")
        self.ending = True

    # --- running

    def run(self) -> None:
        """Run until every task has ended; raises the first error of any of them."""
        try:
            self._go()
        finally:
            self.ending = True
            for task in self._tasks:  # each ends at its own gate, one after the other
                while not task.done:
                    self._go(task)
                task.thread.join(STALL)
        if self._error is not None:
            raise self._error

    def digest(self) -> str:
        """A hash of the trace: equal for equal seeds."""
        return self._hash.hexdigest()

    def tail(self) -> str:
        """The end of the trace."""
        return "\n".join(self.trace[-TAIL:])

    def hand_on(self) -> None:
        """A task has ended: pick the next, or wake run()."""
        self._current = None
        if self.ending or all(t.done for t in self._tasks):
            self._main_gate.release()
            return
        chosen = self._pick()
        if chosen is None:
            self.failed(Broken("bounded", f"nobody can go on: {[t.name for t in self._tasks if not t.done]}"))
            self._main_gate.release()
        else:
            self._give(chosen)

    def _go(self, task: Task | None = None) -> None:
        if task is None and all(t.done for t in self._tasks):
            return
        chosen = task or self._pick()
        if chosen is None:
            return
        self._give(chosen)
        if not self._main_gate.acquire(timeout=STALL):
            frames = sys._current_frames()
            held = self._current
            where = "".join(traceback.format_stack(frames[held.thread.ident])) if held and held.thread.ident else ""
            raise Broken("bounded", f"{held.name if held else '?'} does not hand the baton back:\n{where}")

    def _give(self, task: Task) -> None:
        self._current = task
        task.gate.release()

    def _pick(self) -> Task | None:
        self._tasks = [t for t in self._tasks if not t.done] if len(self._tasks) > 64 else self._tasks
        while True:
            while self._timers and self._timers[0][0] <= self.now:
                try:
                    heapq.heappop(self._timers)[2]()
                except Stopped:  # what it did broke a promise
                    return None
            alive = [t for t in self._tasks if not t.done]
            ready = [t for t in alive if t.ready(self.now)]
            if ready:
                return ready[0] if len(ready) == 1 else self.rng.choice(ready)
            times = [t.deadline if t.until is not None else t.wake for t in alive]
            times += [self._timers[0][0]] if self._timers else []
            times = [t for t in times if t < float("inf")]
            if not times:
                return None
            self.now = max(self.now, min(times))


class SimFuture(Future[Any]):
    """What SimExecutor.submit returns; waiting hands the baton on."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; what the work raised, or None."""
        seconds = float("inf") if timeout is None else timeout
        if not self.done() and not self._world.pause("wait for work", seconds, self.done):
            raise TimeoutError
        return super().exception(0)

    def result(self, timeout: float | None = None) -> Any:
        """Wait; what the work returned."""
        self.exception(timeout)
        return super().result(0)


class SimExecutor:
    """One worker of a process: work runs in the order of submission, each piece as a task of the world."""

    def __init__(self, world: World, process: Process, name: str) -> None:
        self._world, self._process, self._name = world, process, name
        self._last: SimFuture | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run fn(*args) behind what was submitted before."""
        future, before = SimFuture(self._world), self._last

        def work() -> None:
            if before is not None and not before.done():
                self._world.pause("queued", float("inf"), before.done)
            try:
                future.set_result(fn(*args))
            except Exception as error:  # noqa: BLE001 - a future carries what its work raised
                future.set_exception(error)

        self._last = future
        self._world.spawn(self._process, f"{self._process.name}/{self._name}", work)
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Wait for what was submitted."""
        if wait and self._last is not None:
            self._last.exception()
