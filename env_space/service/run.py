"""One run: draws tasks, keeps groups in flight, closes them, and hands READY groups out."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

from sync.errors import DeltawireError, PeerUnavailable, StoreUnavailable
from sync.events import Emit
from sync.schema.artifacts import Curriculum
from sync.schema.base import Identity
from sync.schema.rollouts import HarnessVersions, Rollout, RunInfo, RunRequest

from ..config import EnvConfig
from ..environments import REMOTE, environment
from .episode import Roller
from .ledger import Ledger
from .policy import Policy, Totals
from .sampler import cumulative_weights, draw_task, fixed_task
from .stages import Budget, Pipeline
from .store import Draw, RolloutStore, StoredRun

T = TypeVar("T")


class Home(NamedTuple):
    """What the runs of one process share."""

    config: EnvConfig
    store: RolloutStore
    pipeline: Pipeline
    threads: Executor
    token: str
    boot_id: str
    totals: Totals
    emit: Emit


class _Pinned(NamedTuple):
    identity: Identity
    cumulative: list[float]


class Run:
    """A run of this process. `start` begins (or goes on) rolling; everything happens on the event loop.

    `failed` is True when rolling ended by an error that is not an episode's; `last_error` says which.
    """

    def __init__(self, home: Home, stored: StoredRun) -> None:
        self.request: RunRequest = stored.request
        self.stopped = stored.stopped
        self.failed = False
        self.last_error = self._curriculum_error = ""
        self.ledger = Ledger(time.monotonic)
        self._home = home
        self._cursor = stored.cursor
        self._counters: Counter[str] = Counter(stored.counters)
        self._environment = environment(stored.request.environment)
        remote = stored.request.environment.startswith(REMOTE)  # asked when the run is rolled: it may be away now
        self._tasks = () if remote else self._environment.tasks()
        self._newest: tuple[Identity, Curriculum] | None = None
        self._policy: Policy | None = None
        self._redo: list[Draw] = []
        self._active = 0
        self._drops = 0
        self._pinned: _Pinned | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._pulse = asyncio.Event()

    @property
    def name(self) -> str:
        """The run's name."""
        return self.request.name

    @property
    def finished(self) -> bool:
        """True when no group is in flight and none will be started."""
        if self._active:
            return False
        tasks = self.request.tasks
        return self.stopped or (tasks is not None and self._evaluation and self._cursor >= tasks and not self._redo)

    @property
    def _evaluation(self) -> bool:
        return self.request.purpose == "evaluation"

    @property
    def backpressure(self) -> bool:
        """True while so much waits for the trainer that nothing new is started."""
        full = self.ledger.ready >= self.request.ready_groups or self.ledger.leased >= self._home.config.max_leased
        return full and not self.finished

    def start(self) -> None:
        """Roll until stopped, or until an evaluation is complete."""
        self.stopped = self.failed = False
        self._redo = self._home.store.started(self.name)
        if self._policy is None:
            self._policy = Policy(
                self.request.policy_url, self._home.token, self._home.config.policy, self._home.totals
            )
        self._loop_task = asyncio.get_running_loop().create_task(self._loop(self._policy), name=f"run {self.name}")
        self._loop_task.add_done_callback(self._loop_ended)

    async def stop(self) -> None:
        """Give up groups in flight and start nothing more; READY groups stay for the trainer."""
        self.stopped = True
        await self.close()
        self._notify()

    async def close(self) -> None:
        """End the tasks and connections of this run; what is on disk goes on after a restart."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            self._loop_task = None
        if self._policy is not None:
            await self._end_policy(self._policy)
        self._active = 0

    async def _end_policy(self, policy: Policy) -> None:
        self._counters["failures"] += policy.failures
        self._policy = None
        await policy.close()

    def curriculum(self, identity: Identity, document: Curriculum) -> None:
        """Draw by this curriculum from the next group on; a document that does not fit keeps the last good one."""
        self._newest = identity, document
        if not self._tasks:
            return
        try:
            self._pinned = _Pinned(identity, cumulative_weights(document, self.request.environment, self._tasks))
        except DeltawireError as error:
            self.curriculum_error(f"curriculum {identity} not used: {error}")
        else:
            self._curriculum_error = ""

    def curriculum_error(self, text: str) -> None:
        """Show as `last_error` why the curriculum is not followed, or nothing more with an empty text."""
        self._curriculum_error = text

    def info(self) -> RunInfo:
        """The run's counters."""
        count = self._counters
        policy = self._policy
        return RunInfo(
            name=self.name,
            environment=self.request.environment,
            purpose=self.request.purpose,
            complete=self._evaluation and self.finished,
            groups_started=count["started"],
            groups_active=self._active,
            groups_ready=self.ledger.ready,
            groups_leased=self.ledger.leased,
            groups_acked=count["acked"],
            groups_dropped=count["dropped"],
            rollouts_done=count["rollouts"],
            infrastructure_failures=count["failures"] + (policy.failures if policy else 0),
            redelivered=count["redelivered"],
            curriculum=str(self._pinned.identity) if self._pinned else None,
            last_error=(policy.last_error if policy else "") or self._curriculum_error or self.last_error,
        )

    async def lease(self, limit: int, wait: float) -> list[str]:
        """Lease up to `limit` READY groups; waits up to `wait` seconds for the first. Empty also when finished."""
        ends = time.monotonic() + wait
        while not (self.ledger.ready or self.finished or self.failed):
            left = ends - time.monotonic()
            if left <= 0:
                return []
            lapse = self.ledger.next_lapse()
            try:
                async with asyncio.timeout(left if lapse is None else min(left, lapse)):
                    await self._pulse.wait()
            except TimeoutError:
                continue
        groups, again = self.ledger.lease(limit, self._home.config.lease_seconds)
        self._counters["redelivered"] += again
        self._changed.set()
        return groups

    def release(self, groups: list[str]) -> None:
        """End leases at once: the groups are READY again."""
        self.ledger.release(groups)
        self._notify()

    def ack(self, groups: list[str]) -> tuple[list[str], dict[str, int]]:
        """Which of the groups can be acked now, and the counters to store with that; then call `acked`."""
        found = self.ledger.held(groups)
        return found, {**self._counters, "acked": self._counters["acked"] + len(found)}

    def acked(self, groups: list[str]) -> None:
        """Groups that `ack` found are stored as acked: take them out of the ledger."""
        self.ledger.ack(groups)
        self._counters["acked"] += len(groups)
        self._changed.set()

    async def _loop(self, policy: Policy) -> None:
        await self._learn_tasks()
        roller = Roller(self.request, self._environment, policy, self._home.pipeline, self._home.threads)
        async with asyncio.TaskGroup() as groups:
            while True:
                self._changed.clear()
                for draw in await self._stored(self._next_draws):
                    self._active += 1
                    groups.create_task(self._group(roller, draw))
                if self.finished:
                    break
                await self._changed.wait()
        await self._end_policy(policy)
        self._notify()

    async def _learn_tasks(self) -> None:
        """Ask a server behind the environment for its tasks until it answers."""
        trouble = ""
        while not self._tasks:
            try:
                self._tasks = await asyncio.to_thread(self._environment.tasks)
            except PeerUnavailable as error:
                trouble = self.last_error = str(error)
                self._counters["failures"] += 1
                await asyncio.sleep(self._home.config.policy.backoff_seconds)
        if trouble and self.last_error == trouble:
            self.last_error = ""
        if self._newest is not None and self._pinned is None:
            self.curriculum(*self._newest)

    async def _stored(self, write: Callable[[], T]) -> T:
        """What `write` gives; while the disk is full or fails the run stands still and tries again."""
        trouble = ""
        while True:
            try:
                found = write()
            except StoreUnavailable as error:
                if not trouble:
                    self._home.emit("disk_failed", run=self.name, error=str(error))
                trouble = self.last_error = str(error)
                await asyncio.sleep(self._home.config.policy.backoff_seconds)
            else:
                if trouble and self.last_error == trouble:
                    self.last_error = ""
                return found

    def _next_draws(self) -> list[Draw]:
        room = self.request.concurrent_groups - self._active
        if room <= 0 or self.backpressure:
            return []
        draws = self._redo[:room]
        end = self._cursor + room - len(draws)
        if self._evaluation and self.request.tasks is not None:
            end = min(end, self.request.tasks)
        new = [self._draw(number) for number in range(self._cursor, end)]
        if new:
            started = self._counters["started"] + len(new)
            self._home.store.start_groups(self.name, new, {**self._counters, "started": started})
            self._cursor, self._counters["started"] = end, started
        self._redo = self._redo[room:]
        return draws + new

    def _draw(self, number: int) -> Draw:
        seed = self.request.seed
        if self._evaluation:
            return Draw(number, fixed_task(self._tasks, seed, number), HarnessVersions())
        if self._pinned is None:
            return Draw(number, draw_task(self._tasks, seed, number, None), HarnessVersions())
        task = draw_task(self._tasks, seed, number, self._pinned.cumulative)
        return Draw(number, task, HarnessVersions(curriculum=str(self._pinned.identity)))

    async def _group(self, roller: Roller, draw: Draw) -> None:
        group = f"{self.name}.{draw.seq}.{self._home.boot_id}"
        deadline = Budget(self._home.config.group_seconds, roller.policy.away)
        results = await asyncio.gather(
            *(roller.roll(group, index, draw, deadline) for index in range(self.request.group_size))
        )
        rollouts = [rollout for rollout, _ in results]
        self._counters["rollouts"] += len(rollouts)
        self._counters["failures"] += sum(failures for _, failures in results)
        await self._close(group, draw, rollouts)
        if self._drops:  # where every group is dropped, the run must not burn through them
            await asyncio.sleep(min(self._home.config.policy.backoff_seconds, 0.02 * 2 ** min(self._drops, 16)))
        self._active -= 1
        self._changed.set()
        self._notify()

    async def _close(self, group: str, draw: Draw, rollouts: list[Rollout]) -> None:
        size = self.request.group_size
        needed = 1 if size == 1 else max(2, -(-size // 2))
        usable = sum(rollout.usable for rollout in rollouts)
        if usable >= needed:
            add = self._home.store.add_group
            await self._stored(lambda: add(self.name, draw, group, rollouts, dict(self._counters)))
            self.ledger.add(group)
            self._drops = 0
            return
        self._drops += 1
        self._counters["dropped"] += 1
        await self._stored(lambda: self._home.store.drop_group(self.name, draw, dict(self._counters)))
        example = next((finding for rollout in rollouts for finding in rollout.findings), "no finding")
        self.last_error = f"group {group} dropped: {usable} of {size} rollouts usable, {needed} needed; {example}"
        self._home.emit("drop", group=group, task=draw.task, usable=usable, needed=needed)

    def _notify(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.last_error = f"the run ended by an error: {type(error).__name__}: {error}; restart the environment Space"
        self.failed = True
        self._home.emit("run_failed", run=self.name, error=self.last_error)
        self._notify()
