"""The replicas behind the router: what each last said of itself, what it does for us, and which may take a call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sync.errors import PeerUnavailable
from sync.events import Emit
from sync.schema.base import Identity, IdentityText
from sync.schema.calls import ErrorResponse

from .affinity import Wish, ranked
from .upstream import Client, UpstreamError, UpstreamLateError

_AWAY_AFTER = 3
_MAX_STATE = 16 << 20
_OVER_MEAN = 1.25
_QUEUE_SLACK = 8
_MOST_TRIES = 4
"""Replicas that one call may meet: one that brings down whoever takes it must not go round them all."""


class Report(BaseModel):
    """What the router reads of a replica's SyncStatus; a newer replica may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    ready: bool
    reason: str = ""
    channel_uid: str | None = None
    version: IdentityText | None = None
    head: IdentityText | None = None
    paused: bool = False
    engine: dict[str, Any] = {}

    @property
    def swapping(self) -> bool:
        """It takes new weights now: calls would wait."""
        return self.paused or self.engine.get("paused") in (True, 1)

    def count(self, name: str) -> int:
        """A counter of the engine, 0 where it is not told."""
        value = self.engine.get(name)
        return int(min(value, 1_000_000_000)) if isinstance(value, int | float) and value > 0 else 0


class Replica:
    """One Space. `in_flight` counts calls (a batch counts each of its calls) that are there on our behalf, `failures`
    questions left unanswered in a row; `obstacle` is why it gets no new calls, or ""."""

    def __init__(self, url: str, client: Client) -> None:
        self.url = url
        self.client = client
        self.report: Report | None = None
        self.failures = 0
        self.refused = False
        self.trouble = "not asked yet"
        self.obstacle = "not asked yet"
        self.in_flight = 0
        self.answered = 0
        self.failed = 0
        self.wake = asyncio.Event()

    @property
    def away(self) -> bool:
        """It refused a connection, or left several questions unanswered."""
        return self.refused or self.failures >= _AWAY_AFTER

    def saw(self, report: Report, not_ready: str) -> None:
        """It answered a question about its state; `not_ready` is why it takes no calls, or ""."""
        self.report, self.trouble, self.failures, self.refused = report, not_ready, 0, False

    def missed(self, why: str, *, refused: bool = False) -> None:
        """It gave no answer, or none that can be used; `refused`: nothing listens there."""
        self.trouble, self.refused = why, refused
        self.failures += 1


class Pool:
    """All replicas of one run. Belongs to one event loop."""

    def __init__(
        self, replicas: Sequence[Replica], *, max_lag: int, poll_seconds: float, poll_timeout: float,
        backoff: float, hold: float, emit: Emit,
    ) -> None:  # fmt: skip
        self.replicas = {r.url: r for r in replicas}
        self._max_lag, self._hold = max_lag, hold
        self._poll_seconds, self._poll_timeout, self._backoff = poll_seconds, poll_timeout, backoff
        self._emit = emit
        self._changed = asyncio.Event()
        self._uid: str | None = None
        self.newest: Identity | None = None

    # --- who may take a call

    def refresh(self) -> None:
        """Judge all replicas by what is known now, and wake the calls that wait for one."""
        live = [r.report for r in self.replicas.values() if not r.failures and r.report is not None]
        uids = [report.channel_uid for report in live if report.channel_uid is not None]
        self._uid = max(uids, key=uids.count) if uids else None  # of equals the one configured first
        reports = [r.report for r in self.replicas.values() if r.report and r.report.channel_uid == self._uid]
        known = [Identity.parse(text) for report in reports for text in (report.head, report.version) if text]
        self.newest = max(known, default=None)
        for replica in self.replicas.values():
            before, replica.obstacle = replica.obstacle, self._obstacle(replica)
            if bool(before) != bool(replica.obstacle):
                event = "replica_out" if replica.obstacle else "replica_in"
                self._emit(event, url=replica.url, why=replica.obstacle)
        self._changed.set()
        self._changed = asyncio.Event()

    def _obstacle(self, replica: Replica) -> str:
        report = replica.report
        if replica.failures:
            return f"does not answer: {replica.trouble}"
        if report is None:
            return replica.trouble
        if replica.trouble or not report.ready:
            return replica.trouble or f"not ready: {report.reason}"
        if report.swapping:
            return "takes new weights"
        if report.channel_uid != self._uid:
            return f"follows channel {report.channel_uid}, the others {self._uid}: another run"
        lag = self.lag(replica)
        if lag is None or lag > self._max_lag:
            return f"serves {report.version}, the newest head is {self.newest} (max_lag = {self._max_lag})"
        return ""

    def lag(self, replica: Replica) -> int | None:
        """Versions behind the newest; None: unknown, or of an older epoch, which another writer's has replaced."""
        report = replica.report
        if report is None or report.version is None or self.newest is None:
            return None
        held = Identity.parse(report.version)
        return self.newest.version - held.version if held.epoch == self.newest.epoch else None

    def lost(self, replica: Replica, why: str, *, refused: bool) -> None:
        """A call broke there: no new ones until it has answered a question again, which is asked at once."""
        replica.failed += 1
        if not replica.failures:
            replica.missed(why, refused=refused)
            replica.wake.set()
            self.refresh()

    def turned_away(self, replica: Replica, why: str) -> None:
        """It answered that it is not ready: no new calls until it says otherwise."""
        replica.failed += 1
        if not replica.trouble:
            replica.trouble = why
            replica.wake.set()
            self.refresh()

    def choose(self, wish: Wish, without: frozenset[str] = frozenset()) -> Replica | None:
        """The first replica in the wish's order that takes calls and is not far above the others in load, or None.

        Bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): none takes more than 1.25 times the mean in flight.
        The queue that replicas report, which holds other callers' work too, decides only where it is far above.
        """
        fit = [r for r in self.replicas.values() if not r.obstacle and r.url not in without]
        if not fit:
            return None
        room = math.ceil(_OVER_MEAN * (sum(r.in_flight for r in fit) + 1) / len(fit))
        queues = [r.report.count("queued") if r.report is not None else 0 for r in fit]
        most = 2 * sum(queues) / len(fit) + _QUEUE_SLACK
        short = {r.url: r for r, queued in zip(fit, queues, strict=True) if queued <= most}
        order = ranked(wish.key, list(short))
        if wish.last in short:
            order.insert(0, wish.last)
        return next((short[u] for u in order if short[u].in_flight < room), min(fit, key=lambda r: r.in_flight))

    async def find(self, wish: Wish, without: frozenset[str] = frozenset()) -> Replica:
        """As `choose`, waiting up to `hold` seconds where a replica is only changing weights or catching up.

        Raises PeerUnavailable that names every replica and what is wrong with it.
        """
        if len(without) >= _MOST_TRIES:
            raise PeerUnavailable(f"{len(without)} replicas were tried, none answered: {', '.join(sorted(without))}")
        give_up = asyncio.get_running_loop().time() + self._hold
        while (found := self.choose(wish, without)) is None:
            left = [r for r in self.replicas.values() if r.url not in without]
            if not any(self._soon(r) for r in left) or not await self._change(give_up):
                tried = "".join(f"; {url} was tried" for url in sorted(without))
                why = "; ".join(f"{r.url} {r.obstacle}" for r in left)
                raise PeerUnavailable(f"no replica takes this call now: {why}{tried}; see /router/status")
        return found

    async def settled(self, replica: Replica) -> None:
        """Wait while this one replica changes its weights, up to `hold` seconds."""
        give_up = asyncio.get_running_loop().time() + self._hold
        while not replica.failures and replica.report is not None and replica.report.swapping:
            if not await self._change(give_up):
                raise PeerUnavailable(f"{replica.url}, which holds this session, takes new weights; ask again")

    def home(self, session: str) -> Replica:
        """The one replica that holds this session, whatever its state."""
        return self.replicas[ranked(session.encode(), list(self.replicas))[0]]

    def _soon(self, replica: Replica) -> bool:
        """True where only new weights keep it from taking calls, or nothing is known of it yet."""
        report = replica.report
        return not replica.failures and (report is None or (not replica.trouble and report.ready))

    async def _change(self, give_up: float) -> bool:
        """Wait for news of any replica; False at the deadline."""
        changed = self._changed
        try:
            async with asyncio.timeout_at(give_up):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    # --- watching

    async def watch(self, replica: Replica) -> None:
        """Ask one replica for its state for ever."""
        while True:
            replica.wake.clear()
            await self._look(replica)
            self.refresh()
            pause = self._poll_seconds * 2 ** min(replica.failures, 16)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause, max(self._backoff, self._poll_seconds))):
                    await replica.wake.wait()

    async def _look(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._poll_timeout):
                code, ready = await replica.client.get("/ready", _MAX_STATE)
                status, body = await replica.client.get("/sync/status", _MAX_STATE)
        except TimeoutError:
            replica.missed(f"no answer within {self._poll_timeout:g} s (setting poll_timeout_seconds)")
            return
        except UpstreamError as error:
            replica.missed(str(error), refused=error.refused)
            return
        except UpstreamLateError as error:
            replica.missed(str(error))
            return
        if status != 200 or code not in (200, 503):
            replica.missed(f"answered {code} to GET /ready and {status} to GET /sync/status")
            return
        try:
            replica.saw(Report.model_validate_json(body), "" if code == 200 else _message(ready))
        except ValidationError:
            replica.missed("answered something that is no SyncStatus to GET /sync/status")

    def describe(self) -> dict[str, Any]:
        """Everything known, for `GET /router/status`."""
        return {
            "usable": sum(not r.obstacle for r in self.replicas.values()),
            "newest": None if self.newest is None else str(self.newest),
            "replicas": [self._line(r) for r in self.replicas.values()],
        }

    def _line(self, replica: Replica) -> dict[str, Any]:
        report = replica.report
        return {
            "url": replica.url,
            "usable": not replica.obstacle,
            "obstacle": replica.obstacle,
            "away": replica.away,
            "ready": bool(report and report.ready and not replica.failures and not replica.trouble),
            "version": report and report.version,
            "lag": self.lag(replica),
            "active": report.count("active") if report else 0,
            "queued": report.count("queued") if report else 0,
            "in_flight": replica.in_flight,
            "answered": replica.answered,
            "failed": replica.failed,
        }


def _message(body: bytes) -> str:
    try:
        return ErrorResponse.model_validate_json(body).error.message[:300]
    except ValidationError:
        return "answered 503 to GET /ready"
