"""The rollout service of one process: its runs, its store, and what the routes ask of them."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from pydantic_core import to_json

from sync.errors import ConfigError, InvalidRequest
from sync.events import emitter
from sync.schema.rollouts import AckResponse, RunInfo, RunRequest, ServiceStatus
from sync.stores import open_store

from ..config import EnvConfig
from ..environments import ENVIRONMENTS, environment
from .artifacts import CurriculumThread
from .policy import Totals
from .run import Home, Run
from .stages import Pipeline
from .store import RolloutStore, StoredRun

MAX_RUN_NAME = 96


class RolloutService:
    """Everything behind the HTTP routes; rolls between `start` and `close`.

    Takes up its folder at once: raises ConfigError when that is unusable or holds a run that cannot go on.
    """

    def __init__(self, config: EnvConfig, token: str) -> None:
        self.config = config
        self.boot_id = secrets.token_hex(6)
        self.refused = 0
        self.store = RolloutStore(config.folder)
        self._started_at = time.time()
        self._waiting = 0
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="environment")
        emit = emitter("env", config.log)
        pipeline = Pipeline(config.stages)
        self._home = Home(config, self.store, pipeline, self._threads, token, self.boot_id, Totals(), emit)
        self._runs: dict[str, Run] = {}
        self._curricula: dict[str, CurriculumThread] = {}
        self._changes = asyncio.Lock()
        self._restored = 0
        try:
            self._restore()
        except InvalidRequest as error:
            self.store.close()
            raise ConfigError(
                f"{config.folder}: holds a run that cannot go on: {error}; choose another --folder"
            ) from None
        except (sqlite3.Error, ValueError, KeyError) as error:
            self.store.close()
            raise ConfigError(
                f"{config.folder}: its rollout database is damaged ({error}); move it away or choose another --folder"
            ) from None

    def _restore(self) -> None:
        for stored in self.store.runs():
            self._runs[stored.request.name] = Run(self._home, stored)
            self.store.started(stored.request.name)  # read when the run goes on; damage is said here
        for name, group, size in self.store.ready():
            self._runs[name].ledger.add(group)
            self._restored += size

    async def start(self) -> None:
        """Go on rolling the stored runs."""
        for run in self._runs.values():
            if not run.stopped:
                self._begin(run)
        self._home.emit("boot", boot_id=self.boot_id, runs=len(self._runs), restored_rollouts=self._restored)

    async def close(self) -> None:
        """Stop rolling and release the folder; a later start with it goes on."""
        for thread in self._curricula.values():
            await asyncio.to_thread(thread.close)
        for run in self._runs.values():
            await run.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    async def post_run(self, request: RunRequest) -> RunInfo:
        """Start a run. The same name and body again changes nothing, or starts a stopped run again.

        Raises InvalidRequest: 400 for what cannot be rolled, 409 for another body, 429 for too many runs.
        """
        async with self._changes:
            return self._post_run(request)

    def _post_run(self, request: RunRequest) -> RunInfo:
        run = self._runs.get(request.name)
        if run is not None:
            if run.request != request:
                raise InvalidRequest(
                    f"name: run {request.name!r} exists with another body; choose another name",
                    status=409,
                    code="run_exists",
                )
            if run.stopped:
                self.store.put_run(request)
                self._begin(run)
            return run.info()
        environment(request.environment)
        _check_artifacts(request.artifacts)
        if len(request.name) > MAX_RUN_NAME:
            raise InvalidRequest(f"name: {len(request.name)} characters, at most {MAX_RUN_NAME} leave room for ids")
        rolling = sum(not (r.stopped or r.finished) for r in self._runs.values())
        if rolling >= self.config.max_runs or len(self._runs) >= self.config.max_stored_runs:
            raise InvalidRequest(
                f"{rolling} runs are rolled and {len(self._runs)} stored (settings max_runs, max_stored_runs); "
                "stop one with DELETE /v1/runs/<name>, or start over in another folder",
                status=429,
                code="too_many_runs",
            )
        run = Run(self._home, StoredRun(request, stopped=False, cursor=0, counters={}))
        self.store.put_run(request)
        self._begin(run)
        self._runs[request.name] = run
        self._home.emit("run", run=request.name, environment=request.environment, policy=request.policy_url)
        return run.info()

    async def stop_run(self, name: str) -> RunInfo:
        """Stop a run; its READY groups can still be leased. Raises InvalidRequest (404)."""
        async with self._changes:
            run = self.run(name)
            self.store.stop_run(name)
            if (thread := self._curricula.pop(name, None)) is not None:
                await asyncio.to_thread(thread.close)
            await run.stop()
            return run.info()

    def run(self, name: str) -> Run:
        """The run of that name; raises InvalidRequest (404) listing the known ones."""
        found = self._runs.get(name)
        if found is None:
            known = ", ".join(list(self._runs)[:20]) or "none"
            raise InvalidRequest(
                f"run: {name[:128]!r} is unknown; known: {known}; start it with POST /v1/runs",
                status=404,
                code="unknown_run",
            )
        return found

    async def lease(self, name: str, limit: int, wait: float, gone: Callable[[], Awaitable[bool]]) -> bytes:
        """A LeaseResponse as JSON; a caller that is `gone` by the end of its wait leases nothing.

        Raises InvalidRequest: 404 unknown run, 429 too many wait, 500 the run failed.
        """
        run = self.run(name)
        if self._waiting >= self.config.max_waiting:
            raise InvalidRequest(
                f"{self._waiting} lease requests wait already (setting max_waiting)", status=429, code="overloaded"
            )
        self._waiting += 1
        try:
            groups = await run.lease(limit, wait)
            if groups and await gone():
                run.release(groups)
                groups = []
        finally:
            self._waiting -= 1
        if not groups and run.failed:
            raise InvalidRequest(run.last_error, status=500, code="run_failed")
        return b'{"boot_id":%s,"lease":%s,"seconds":%s,"groups":[%s],"complete":%s}' % (
            to_json(self.boot_id),
            to_json(f"{self.boot_id}.{secrets.token_hex(4)}" if groups else None),
            to_json(self.config.lease_seconds),
            b",".join(map(self.store.group_json, groups)),
            to_json(run.finished and run.ledger.ready == 0),
        )

    def ack(self, groups: tuple[str, ...]) -> AckResponse:
        """Groups that need not come again; unknown and already acked ones are ignored and counted."""
        of_run: dict[str, list[str]] = {}
        for group in groups:
            of_run.setdefault(group.rsplit(".", 2)[0], []).append(group)
        counters: dict[str, dict[str, int]] = {}
        found: dict[str, list[str]] = {}
        for name in of_run.keys() & self._runs.keys():
            found[name], counters[name] = self._runs[name].ack(of_run[name])
        changed = [group for mine in found.values() for group in mine]
        if changed:
            self.store.ack(changed, counters, self.config.keep_rollouts)
        for name, mine in found.items():
            self._runs[name].acked(mine)
        return AckResponse(changed=len(changed), ignored=len(set(groups)) - len(changed))

    def renew(self, groups: Iterable[str]) -> AckResponse:
        """Leases that start anew; groups that are not leased are ignored and counted."""
        wanted = set(groups)
        changed = sum(run.ledger.renew(wanted, self.config.lease_seconds) for run in self._runs.values())
        return AckResponse(changed=changed, ignored=len(wanted) - changed)

    def status(self, refused: int) -> ServiceStatus:
        """The process at a glance; `refused` counts requests that were refused before they came here."""
        totals = self._home.totals
        return ServiceStatus(
            boot_id=self.boot_id,
            started_at=self._started_at,
            environments=tuple(sorted(ENVIRONMENTS)),
            runs=tuple(run.info() for run in self._runs.values()),
            restored_rollouts=self._restored,
            stage_active={stage.name: stage.active for stage in self._home.pipeline.all()},
            stage_seconds={stage.name: round(stage.seconds, 6) for stage in self._home.pipeline.all()},
            backpressure=any(run.backpressure for run in self._runs.values()),
            calls=totals.calls,
            output_tokens=totals.output_tokens,
            policy_wait_seconds=round(totals.wait_seconds, 6),
            refused_requests=self.refused + refused,
        )

    def _begin(self, run: Run) -> None:
        url = run.request.artifacts
        if url is not None and run.request.purpose == "training":
            loop = asyncio.get_running_loop()
            self._curricula[run.name] = CurriculumThread(
                url,
                self.config.poll_seconds,
                lambda identity, document: _in_loop(loop, run.curriculum, identity, document),
                lambda text: _in_loop(loop, run.curriculum_error, text),
            )
        run.start()


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *values: object) -> None:
    loop.call_soon_threadsafe(function, *values)


def _check_artifacts(url: str | None) -> None:
    if url is None:
        return
    try:
        open_store(url)
    except ConfigError as error:
        raise InvalidRequest(f"artifacts: {error}") from None
