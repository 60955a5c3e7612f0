"""Who takes part: trainers, followers, an operator. Each is a process of the world that runs the real library.

A trainer keeps what a trainer keeps on its disk: the publisher's folder and its own checkpoints, from which it resumes,
sometimes from an older one. A follower keeps its mirror. Both are killed at any store call and started again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np
from support.faults import Stopped
from support.runs import abandon
from support.states import NumpyEngine, State

from sync import Follower, Identity, Publisher, Stamp, state_digest
from sync.errors import (
    CorruptObject,
    DeltawireError,
    Fenced,
    InvalidPatch,
    ObjectMissing,
    ResyncError,
    StopError,
    StoreUnavailable,
)
from sync.events import Emit
from sync.mirror import Mirror
from sync.tools.close import close
from sync.tools.gc import collect
from sync.tools.rollback import rollback
from sync.tools.status import status

from .promises import Judge
from .setups import Setup
from .store import Bucket, View
from .world import Process, SimExecutor, Task, World

SIDE = {"config.json": b'{"model_type": "test"}'}


def first_state(rng: Random, rows: int) -> State:
    """A tiny checkpoint."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    return {
        "embed": numbers.integers(0, 2**16, (rows, 8), dtype=np.uint16),
        "norm": numbers.standard_normal(5).astype(np.float32),
        "step": np.array(0, dtype=np.int64),
    }


def trained(rng: Random, state: State, share: float) -> State:
    """A step later: about `share` of the elements differ, and always one."""
    new = {n: a.copy() for n, a in state.items()}
    flat = new["embed"].reshape(-1)
    for at in range(flat.size):
        if rng.random() < share:
            flat[at] ^= rng.choice((1, 1, 2, 0x8000))
    flat[rng.randrange(flat.size)] ^= 4
    new["norm"][rng.randrange(5)] *= np.float32(1.5) if rng.random() < 0.5 else np.float32(-1)
    new["step"] = new["step"] + 1
    return new


def counting(world: World, role: str) -> Emit:
    """Counts the events that the library reports."""

    def emit(event: str, **facts: object) -> None:
        world.count[f"{role}: {event}"] += 1
        if event == "collect":
            world.count["objects collected"] += int(str(facts["deleted"]))

    return emit


def digest_of(publisher: Publisher) -> str | None:
    """The digest of a publisher's present base, from its bits; None while it has none."""
    state = publisher.base.state
    return state_digest(state, publisher.base.schema) if state else None


class Actor(Protocol):
    """Somebody with a process of their own."""

    process: Process

    def life(self) -> None:
        """What it does until the faults end; Stopped ends it anywhere."""
        ...

    def killed(self) -> None:
        """What a kill leaves to the operating system."""
        ...


class Trainer:
    """One trainer's process. `checkpoints` survive a kill."""

    def __init__(self, world: World, judge: Judge, bucket: Bucket, setup: Setup, process: Process) -> None:
        self.world, self.judge, self.setup, self.process = world, judge, setup, process
        self.view = View(bucket, process, setup.weather)
        self.folder = setup.folder / process.name
        self.checkpoints: list[tuple[State, Stamp]] = []
        self.left = setup.steps
        self.publisher: Publisher | None = None
        self.state: State = {}

    def life(self) -> None:
        """Open, train, publish, close; begin again after an error, until the steps are used up."""
        rng, world = self.world.rng, self.world
        while self.left > 0 and not world.quiet:
            try:
                self.open(takeover=rng.random() < 0.7)
                while self.left > 0 and not world.quiet:
                    self.step()
                    if rng.random() < 0.05:
                        break
                self.end()
            except Fenced:
                world.count["fenced"] += 1
                self.give_up()
                world.pause("fenced", rng.choice((30.0, 700.0)))
            except (StoreUnavailable, StopError, CorruptObject, ObjectMissing) as error:
                world.note(f"{type(error).__name__}: {error}")
                self.give_up()
                world.pause("broken off", rng.uniform(1.0, 60.0))

    def resume_point(self) -> tuple[State, Stamp]:
        """The newest checkpoint, sometimes an older one, at first a new state."""
        if not self.checkpoints:
            state = first_state(self.world.rng, self.setup.rows)
            self.checkpoints.append((state, self.judge.stamp(state)))
        back = self.world.rng.choice((1, 1, 1, 2, 4))
        return self.checkpoints[-min(back, len(self.checkpoints))]

    def open(self, *, takeover: bool) -> None:
        """Open a publisher on the resumed state."""
        world = self.world
        self.state, stamp = self.resume_point()
        self.folder.mkdir(exist_ok=True)
        self.publisher = publisher = Publisher(
            self.view, side_files=SIDE, options=self.setup.publisher_options(),
            clock=self.process.clock, work=self.folder,
            executor=lambda name: SimExecutor(world, self.process, name), emit=counting(world, "trainer"),
        )  # fmt: skip
        with self.judge.bounded(f"{self.process.name} open"):
            identity = publisher.open(self.state, stamp, takeover=takeover)
        assert publisher._term is not None
        self.judge.bases[publisher._term.head.writer] = lambda: digest_of(publisher)
        world.note(f"open at {identity}")
        world.count["opened"] += 1

    def step(self) -> None:
        """Train one step and offer it; sometimes wait for it, sometimes go back, sometimes change the schema."""
        rng = self.world.rng
        self.left -= 1
        kind = rng.random()
        if kind < 0.1:
            self.state, _ = self.resume_point()
        elif kind < 0.13:
            self.state = {**self.state, "more": self.state["norm"].copy()}
        elif kind > 0.15:
            self.train()
        self.offer(flush=rng.random() < 0.2)
        self.world.pause("train", rng.choice((0.1, 1.0, 1.0, 5.0, 20.0)))

    def advance(self) -> bool:
        """Train one step and offer it; False while a publish is in flight."""
        self.train()
        return self.offer()

    def train(self) -> None:
        """Change the state."""
        self.state = trained(self.world.rng, self.state, self.world.rng.choice((0.02, 0.1, 0.8)))

    def offer(self, *, flush: bool = False) -> bool:
        """Offer the state and keep it as a checkpoint."""
        assert self.publisher is not None
        stamp = self.judge.stamp(self.state)
        self.checkpoints = [*self.checkpoints[-6:], (self.state, stamp)]
        with self.judge.bounded(f"{self.process.name} offer"):
            if flush:
                self.publisher.flush(self.state, stamp)
            taken = flush or self.publisher.offer(self.state, stamp)
        self.world.count["offered" if taken else "offered while busy"] += 1
        self.state = {n: a.copy() for n, a in self.state.items()}
        return taken

    def end(self) -> None:
        """Close in order."""
        assert self.publisher is not None
        with self.judge.bounded(f"{self.process.name} close"):
            self.publisher.close()
        self.publisher = None

    def give_up(self) -> None:
        """Close after an error."""
        if self.publisher is not None:
            try:
                self.end()
            except DeltawireError as error:
                self.publisher = None
                self.world.note(f"close: {type(error).__name__}: {error}")

    def killed(self) -> None:
        """What the operating system does: the folder's lock is free."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None and publisher._base is not None:
            release(publisher._base._mirror)


def release(mirror: Mirror) -> None:
    """Free a mirror's lock as the end of its process does; nothing is flushed."""
    if mirror._lock is not None:
        os.close(mirror._lock)
        mirror._lock = None


class Probe(NumpyEngine):
    """An engine whose every return to service is judged."""

    def __init__(self, judge: Judge, who: str) -> None:
        super().__init__()
        self._judge, self._who = judge, who

    def load(self, folder: Path, identity: Identity) -> None:
        """Judge what lies beside the weights, then load."""
        holds = (folder / "config.json").read_bytes() == SIDE["config.json"]
        self._judge.check("I2", holds=holds, why=f"{self._who} loads another config.json")
        super().load(folder, identity)

    def resume(self) -> None:
        """Judge, then serve on."""
        super().resume()
        assert self.identity is not None
        self._judge.engine_serves(self._who, self.identity, self.state)


class Reader:
    """One follower's process."""

    def __init__(self, world: World, judge: Judge, bucket: Bucket, setup: Setup, process: Process) -> None:
        self.world, self.judge, self.setup, self.process = world, judge, setup, process
        self.view = View(bucket, process, setup.weather)
        self.folder = setup.folder / process.name
        self.engine = Probe(judge, process.name)
        self.follower: Follower | None = None
        self.uid: str | None = None
        self.highest: Identity | None = None
        self.served = 0

    def life(self) -> None:
        """Poll until the faults end."""
        rng = self.world.rng
        while not self.world.quiet:
            self.poll()
            self.world.pause("idle", rng.choice((0.2, 2.0, 10.0, 10.0, 60.0)))
            if rng.random() < 0.03:
                self.close()

    def poll(self) -> None:
        """One poll; every error a follower may raise is noted, and the promises are judged after it."""
        if self.follower is None:
            self.engine = Probe(self.judge, self.process.name)
            self.served = 0
            self.follower = Follower(
                self.view, self.folder, self.engine, clock=self.process.clock, audit_every=8,
                pin_ttl=self.setup.pin_ttl, emit=counting(self.world, "follower"),
            )  # fmt: skip
            self.judge_status()
        if not self.world.quiet and self.world.rng.random() < self.setup.engine_failures:
            kind = self.world.rng.choice(("apply", "read", "resume", "load", "pause", "lose"))
            if kind == "lose":
                self.engine.lose_a_write = True
            else:
                self.engine.fail[kind] = InvalidPatch("refused by the engine")
            self.world.count["engine failure"] += 1
        try:
            with self.judge.bounded(f"{self.process.name} poll"):
                moved = self.follower.poll()
            self.world.note(f"polled: {'moved to ' if moved else ''}{self.engine.identity}")
        except (StoreUnavailable, CorruptObject, ResyncError, InvalidPatch) as error:
            self.world.note(f"{type(error).__name__}: {error}")
            self.world.count["poll refused"] += 1
        self.judge_status()

    def judge_status(self) -> None:
        """I2 and I3 as clients see them."""
        assert self.follower is not None
        status, who = self.follower.status(), self.process.name
        mirror = self.follower._mirror
        if mirror.uid != self.uid and mirror.uid is not None:
            self.uid, self.highest = mirror.uid, None
        if mirror.identity is not None and mirror.uid is not None:
            self.judge.mirror_holds(who, mirror.uid, mirror.identity, mirror.sums.text())
            self.judge.check("I2", holds=mirror.audit(), why=f"{who}: the mirror's bits are not its digest's")
        for identity in self.engine.served[self.served :]:
            self.reported(identity)
        self.served = len(self.engine.served)
        if status.ready and status.version is not None:
            self.reported(Identity.parse(status.version))
        if mirror.uid == self.uid and self.highest is not None:
            seen = status.highest_reported
            holds = seen is not None and Identity.parse(seen) >= self.highest
            self.judge.check("I3", holds=holds, why=f"{who} forgot {self.highest}, says {seen}")

    def reported(self, identity: Identity) -> None:
        """I3: a version that this reader's clients have seen."""
        holds = self.highest is None or identity >= self.highest
        self.judge.check("I3", holds=holds, why=f"{self.process.name} goes back from {self.highest} to {identity}")
        self.highest = identity

    def close(self) -> None:
        """End in order; the next poll opens again."""
        if self.follower is not None:
            self.follower.close()
            self.follower = None

    def killed(self) -> None:
        """What the operating system does."""
        if self.follower is not None:
            abandon(self.follower)
            self.follower = None


class Operator:
    """Somebody at a command line: collects, rolls back, closes, looks; trainers are at work or gone."""

    def __init__(self, world: World, judge: Judge, bucket: Bucket, setup: Setup, process: Process) -> None:
        self.world, self.judge, self.setup, self.process = world, judge, setup, process
        self.view = View(bucket, process, setup.weather)

    def life(self) -> None:
        """A command now and then."""
        rng = self.world.rng
        for _ in range(rng.randint(1, 3)):
            self.world.pause("away", rng.choice((5.0, 60.0, 300.0)))
            if self.world.quiet:
                return
            kind = rng.choice(("collect", "rollback", "close", "status"))
            self.world.count[f"operator {kind}"] += 1
            try:
                with self.judge.bounded(f"operator {kind}"):
                    self.command(kind, takeover=rng.random() < 0.6)
                self.world.count[f"operator {kind} done"] += 1
            except DeltawireError as error:
                self.world.note(f"{kind}: {type(error).__name__}: {error}")

    def command(self, kind: str, *, takeover: bool) -> None:
        """One command."""
        view, term, clock = self.view, self.setup.term, self.process.clock
        if kind == "collect":
            collect(view, takeover=takeover, wait=self.world.rng.random() < 0.5, options=term, clock=clock)
        elif kind == "rollback":
            live = [r for head in self.judge.newest() for r in self.judge.refs(head)]
            version = self.world.rng.choice(live).version if live else 0
            rollback(view, str(version), takeover=takeover, options=term, clock=clock)
        elif kind == "close":
            close(view, takeover=takeover, options=term, clock=clock)
        else:
            status(view)

    def killed(self) -> None:
        """Nothing of a command survives."""


def alone(world: World, task: Task) -> Callable[[], bool]:
    """What a task waits for until the other tasks of its process have ended."""
    return lambda: not world.others(task)


def supervised(world: World, actor: Actor) -> Callable[[], None]:
    """The actor's life, started again some time after every kill."""

    def run() -> None:
        while True:
            try:
                return actor.life()
            except Stopped:
                world.reborn()
                world.pause("dead", float("inf"), alone(world, world.current))
                actor.killed()
                world.pause("dead", world.rng.choice((0.0, 5.0, 100.0)))
                actor.process.dead = False

    return run
