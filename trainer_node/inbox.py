"""The rollout inbox: leases groups from environment Spaces, computes advantages, feeds TRL's queue, acks what is done.

It is TRL's rollout worker: `rollout_buffer` holds samples, and `start`, `stop`, `update_model_version` and
`check_health` are called by the trainer. One thread per Space. A group is acked when every sample of it was trained
(`trained`) or the group was set aside (stale, no spread, unknown version); its lease is renewed until then. Group ids
are remembered, so a group that is delivered again is never trained twice.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable, RetryError
from sync.events import Emit
from sync.schema.base import Identity
from sync.schema.rollouts import AckRequest, AckResponse, Group, HarnessVersions, LeaseResponse, RenewRequest

from .curriculum import TaskStats
from .peers import Peer
from .samples import TokenSample, group_samples, inspect_group

REMEMBERED = 200_000
RENEW_SECONDS = 20.0
NOT_FOUND = 404


@dataclass
class _Pending:
    """A leased group whose samples are on their way through the trainer."""

    peer: Peer
    left: int
    harness: HarnessVersions


@dataclass
class InboxSettings:
    """run: the rollout run's name. samples_per_step, oversample: see TrainConfig. vocabulary: ids must lie below it."""

    run: str
    samples_per_step: int
    group_size: int
    oversample: float
    vocabulary: int
    peer_seconds: float
    lease_limit: int = 8


@dataclass
class Counts:
    """What became of the groups, and of the connection."""

    groups: Counter[str] = field(default_factory=Counter)
    rollouts: int = 0
    boots: dict[str, str] = field(default_factory=dict)


class RolloutInbox:
    """See the module. `sync_of` maps a weights identity to the trainer's sync count at its publish, or None.

    `ask(peer)` posts the rollout run to a Space; it is called at the start, and again when a Space lost its disk.
    """

    def __init__(
        self, peers: Sequence[Peer], settings: InboxSettings, sync_of: Callable[[Identity], int | None],
        ask: Callable[[Peer], object], emit: Emit,
    ) -> None:  # fmt: skip
        self._peers, self._settings, self._sync_of, self._ask, self._emit = peers, settings, sync_of, ask, emit
        self.rollout_buffer: queue.Queue[TokenSample] = queue.Queue(maxsize=2 * settings.samples_per_step)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(maxsize=1_000)
        self.counts = Counts()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._heard = time.monotonic()
        self._stale_since: float | None = None
        self._trouble = ""
        self._pending: dict[str, _Pending] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._to_ack: dict[str, Peer] = {}
        self._aside: list[tuple[Peer, Group]] = []
        self._seen = self._queued = 0
        self._stats: dict[str, TaskStats] = {}
        self._harness: dict[str, set[str]] = {}

    # --- called by TRL

    def start(self) -> None:
        """Start one leasing thread per Space."""
        self._heard = time.monotonic()
        for peer in self._peers:
            thread = threading.Thread(target=self._serve, args=(peer,), name=f"inbox {peer.url}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop leasing, ack what was trained. Waits for the threads, each at most one request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)
        self._threads.clear()

    def update_model_version(self, model_version: int) -> None:
        """TRL's hint after each sync; staleness is read off the samples instead."""

    def check_health(self, stale_after_s: float) -> None:  # noqa: ARG002 - ours is peer_seconds
        """Raise what a leasing thread died of, or PeerUnavailable when for too long no group came that can be trained,
        or only stale ones."""
        if self._error is not None:
            raise self._error
        urls, limit = ", ".join(p.url for p in self._peers), self._settings.peer_seconds
        silent = time.monotonic() - self._heard
        if silent > limit:
            raise PeerUnavailable(
                f"no rollouts from {urls} for {silent:.0f} s (limit {limit:.0f} s, setting peer_seconds); "
                f"last trouble: {self._trouble or 'none, the Space answers but has no group'}"
            )
        since = self._stale_since
        if since is not None and time.monotonic() - since > limit:
            raise PeerUnavailable(
                f"every rollout from {urls} was too old (setting max_staleness) for more than {limit:.0f} s (setting "
                "peer_seconds); last_error in /sync/status of the inference Space says why it does not follow"
            )

    # --- called by the trainer

    def trained(self, groups: Sequence[str]) -> None:
        """One sample of each named group (repeats count) went through a finished optimizer step."""
        with self._lock:
            if groups:
                self._stale_since = None
            for name in groups:
                pending = self._pending.get(name)
                if pending is not None:
                    for channel, version in pending.harness.model_dump(exclude_none=True).items():
                        self._harness.setdefault(channel, set()).add(version)
                    self._one_less(name, pending)

    def stale(self, group: str) -> None:
        """A sample was dropped for its age; counted once per sample."""
        with self._lock:
            self.counts.groups["stale_samples"] += 1
            if self._stale_since is None:
                self._stale_since = time.monotonic()
            pending = self._pending.get(group)
            if pending is not None:
                self._one_less(group, pending)

    def take_stats(self) -> dict[str, TaskStats]:
        """Statistics per task since the last call."""
        with self._lock:
            stats, self._stats = self._stats, {}
            return stats

    def take_harness(self) -> dict[str, tuple[str, ...]]:
        """Artifact versions of the groups trained since the last call: channel → identities."""
        with self._lock:
            taken, self._harness = self._harness, {}
        return {channel: tuple(sorted(versions, key=Identity.parse)) for channel, versions in taken.items()}

    # --- leasing threads

    def _serve(self, peer: Peer) -> None:
        renewed, every, backoff = time.monotonic(), RENEW_SECONDS, 0.2
        asked = False
        try:
            while not self._stop.is_set():
                try:
                    if not asked:
                        self._ask(peer)
                        asked = True
                    self._ack(peer)
                    if time.monotonic() - renewed > every:
                        self._renew(peer)
                        renewed = time.monotonic()
                    every = self._lease(peer, every)
                    backoff = 0.2
                except RetryError as error:
                    self._trouble = str(error)
                    self._stop.wait(backoff)
                    backoff = min(backoff * 2, 5.0)
                except InvalidRequest as error:
                    if error.status != NOT_FOUND:
                        raise
                    asked = False  # the Space came back without its disk: what it had not delivered is lost
                    self.counts.groups["space_disks_lost"] += 1
                    self._emit("space_lost_its_disk", peer=peer.url, why=str(error))
                    self._stop.wait(backoff)
            self._ack(peer)
        except RetryError as error:  # the last acks could not be given: the Space will deliver these groups again
            self._emit("acks_lost", peer=peer.url, why=str(error))
        except BaseException as error:
            self._error = error
            if not isinstance(error, DeltawireError):
                raise

    def _ack(self, peer: Peer) -> None:
        with self._lock:
            names = [n for n, p in self._to_ack.items() if p is peer]
        if names:
            peer.post("/v1/rollouts/ack", AckRequest(groups=tuple(names)), AckResponse)
            with self._lock:
                for name in names:
                    self._to_ack.pop(name, None)

    def _renew(self, peer: Peer) -> None:
        with self._lock:
            names = [n for n, p in self._pending.items() if p.peer is peer]
            names += [g.id for p, g in self._aside if p is peer]
        if names:
            peer.post("/v1/rollouts/renew", RenewRequest(groups=tuple(names)), AckResponse)

    def _lease(self, peer: Peer, every: float) -> float:
        """Lease what there is room for; returns how often leases must be renewed, in seconds."""
        room = self.rollout_buffer.maxsize - self.rollout_buffer.qsize()
        groups = min(self._settings.lease_limit, room // self._settings.group_size)
        if groups < 1:
            self._heard = time.monotonic()  # the trainer is the slow side now
            self._stop.wait(0.02)
            return every
        wait = min(5.0, every)
        answer = peer.get("/v1/rollouts", LeaseResponse, seconds=60.0, run=self._settings.run, limit=groups, wait=wait)
        boot = self.counts.boots.get(peer.url)
        if boot != answer.boot_id:
            self.counts.boots[peer.url] = answer.boot_id
            if boot is not None:
                self.counts.groups["space_restarts"] += 1
                self._emit("space_restarted", peer=peer.url, boot=answer.boot_id)
        for group in answer.groups:
            self._accept(peer, group)
        return min(RENEW_SECONDS, answer.seconds / 3)

    def _accept(self, peer: Peer, group: Group) -> None:
        with self._lock:
            if group.id in self._finished:
                self.counts.groups["delivered_again"] += 1
                self._to_ack[group.id] = peer
                return
            if group.id in self._pending or any(g.id == group.id for _, g in self._aside):
                self.counts.groups["delivered_again"] += 1
                return
            self.counts.groups["received"] += 1
            self.counts.rollouts += len(group.rollouts)
        try:
            facts = inspect_group(group, self._sync_of, self._settings.vocabulary)
        except InvalidRequest as error:
            self._refuse(peer, group, str(error))
            return
        self._heard = time.monotonic()
        with self._lock:
            self._stats.setdefault(group.task, TaskStats()).add(facts.useful_share, facts.success)
            if not facts.spread:
                self.counts.groups["zero_spread"] += 1
                self._aside.append((peer, group))
            chosen = ([(peer, group)] if facts.spread else []) + self._fillers(spread=facts.spread)
        for source, picked in chosen:
            self._queue(source, picked)

    def _fillers(self, *, spread: bool) -> list[tuple[Peer, Group]]:
        """Zero-spread groups fill a step only when `oversample` steps' worth of groups gave too few others.

        They would add nothing but a denominator; without this rule a policy that has learned its task would wait for
        ever for groups that still differ.
        """
        step = self._settings.samples_per_step // self._settings.group_size
        self._seen += 1
        self._queued += spread
        fill: list[tuple[Peer, Group]] = []
        if self._queued < step <= self._seen / self._settings.oversample:
            missing = step - self._queued
            self._aside, fill = self._aside[:-missing], self._aside[-missing:]
            self.counts.groups["fillers"] += len(fill)
        if fill or self._queued >= step:
            self._seen = self._queued = 0
        for peer, group in self._aside[:-step]:
            self._finish(group.id, peer)
        self._aside = self._aside[-step:]
        return fill

    def _queue(self, peer: Peer, group: Group) -> None:
        samples = group_samples(group, self._sync_of)
        with self._lock:
            self._pending[group.id] = _Pending(peer, len(samples), group.harness)
        for sample in samples:
            while not self._stop.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.2)
                    break
                except queue.Full:
                    self._heard = time.monotonic()

    def _refuse(self, peer: Peer, group: Group, why: str) -> None:
        self._trouble = why
        with self._lock:
            self.counts.groups["refused"] += 1
            self._finish(group.id, peer)
        self._emit("group_refused", group=group.id, why=why)

    def _one_less(self, name: str, pending: _Pending) -> None:
        """One sample of a pending group needs nothing more (the lock is held)."""
        pending.left -= 1
        if pending.left == 0:
            del self._pending[name]
            self._finish(name, pending.peer)

    def _finish(self, name: str, peer: Peer) -> None:
        """Remember a group as done and queue its ack (the lock is held)."""
        self._finished[name] = None
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        self._to_ack[name] = peer
