"""Stop at a step, start again, and every promise holds: for each store call of a writer, each file operation of a
mirror, and a follower killed at random."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultStore, Stopped
from support.runs import (
    abandon,
    assert_i1,
    assert_i2,
    assert_i4,
    declared,
    head_of,
    manifests,
    publish,
    publisher,
    stamp,
)
from support.states import NumpyEngine, State, nudged, same_bits, small_state

import sync.mirror
from sync import ArtifactFollower, ArtifactPublisher, DirectoryStore, Follower, Identity, MemoryStore, state_digest
from sync.errors import StoreUnavailable
from sync.mirror import Mirror
from sync.safetensors_io import MappedState
from sync.schema.artifacts import Curriculum
from sync.tensors import schema_of

pytestmark = pytest.mark.crash


# --- the writer stops at every store call


def write_a_channel(store: FaultStore, takeover: bool) -> None:
    """Claim, resume, deltas with and without objects, anchors and spans behind, collecting, a changed schema, close."""
    writer = publisher(store, anchor_share=0.3, catchup_every=2, largest_span=8, collect_every=2, grace=0.0)
    state = small_state(3)
    writer.open(state, stamp(0), takeover=takeover)
    for n in range(1, 8):
        state = nudged(state, n, share=0.1)
        publish(writer, state, n)
    publish(writer, state, 8)
    publish(writer, {**state, "more": state["norm"]}, 9)
    writer.close()


def before_the_stop() -> MemoryStore:
    """A channel with history: one term, three versions, not closed."""
    store = MemoryStore()
    writer = publisher(store)
    state = small_state(1)
    writer.open(state, stamp(0))
    for n in range(2):
        state = nudged(state, n)
        publish(writer, state, n)
    return store


def calls_of_a_writer() -> int:
    store = FaultStore(before_the_stop())
    write_a_channel(store, takeover=True)
    return len(store.calls)


WRITER_CALLS = calls_of_a_writer()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_stopped_at_any_store_call_leaves_a_channel_that_goes_on(when: str, tmp_path: Path) -> None:
    assert WRITER_CALLS > 30
    for call in range(WRITER_CALLS):
        inner = before_the_stop()
        engine = NumpyEngine()
        follower = Follower(inner, tmp_path / f"{when}-{call}", engine)
        follower.poll()
        was = engine.identity
        with pytest.raises(Stopped):
            write_a_channel(FaultStore(inner, {call: "stop before" if when == "before" else "stop after"}), True)
        assert_i1(inner)
        assert_i4(inner)
        follower.poll()
        assert_i2(inner, follower, engine)
        assert engine.identity is not None
        assert was is not None
        assert engine.identity >= was  # I3
        assert engine.identity == head_of(inner).identity
        head = head_of(inner).version
        assert head is not None
        writer, state = publisher(inner), small_state(9)
        assert writer.open(state, stamp(9), takeover=True).version == head + 1
        state = nudged(state, 1)
        publish(writer, state)
        follower.poll()
        assert engine.identity == writer.identity
        assert engine.digest(schema_of(state)) == state_digest(state)
        assert_i1(inner)
        assert_i2(inner, follower, engine)
        assert_i4(inner)
        follower.close()
        shutil.rmtree(tmp_path / f"{when}-{call}")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_artifact_writer_stopped_at_any_store_call_leaves_a_channel_that_goes_on(when: str) -> None:
    def write(store: FaultStore) -> None:
        writer = ArtifactPublisher(store, "curriculum")
        writer.open(takeover=True)
        for n in range(2):
            writer.publish(Curriculum(environment=f"e{n}"), measured_against=None)
        writer.close()

    counted = FaultStore(MemoryStore())
    write(counted)
    for call in range(len(counted.calls)):
        inner = MemoryStore()
        follower = ArtifactFollower(inner, "curriculum")
        with pytest.raises(Stopped):
            write(FaultStore(inner, {call: "stop before" if when == "before" else "stop after"}))
        assert_i1(inner)
        before = follower.poll().get("curriculum")
        writer = ArtifactPublisher(inner, "curriculum")
        writer.open(takeover=True)
        at = writer.publish(Curriculum(environment="after"), measured_against=None)
        assert follower.poll()["curriculum"] == (at, Curriculum(environment="after"))
        assert before is None or at.version == before[0].version + 1
        assert_i1(inner)


@pytest.mark.parametrize("fault", ["fail before", "fail after", "stop before", "stop after"])
def test_a_follower_that_loses_any_store_call_goes_on(fault: Any, tmp_path: Path) -> None:
    inner = before_the_stop()
    counted = FaultStore(inner)
    Follower(counted, tmp_path / "count", None).poll()
    for call in range(len(counted.calls)):
        store, engine, folder = FaultStore(inner, {call: fault}), NumpyEngine(), tmp_path / f"m{call}"
        follower = Follower(store, folder, engine)
        with pytest.raises((StoreUnavailable, Stopped)):
            follower.poll()
        assert_i2(inner, follower, engine)
        if fault.startswith("stop"):
            abandon(follower)
            engine = NumpyEngine()
            follower = Follower(store, folder, engine)
        follower.poll()
        assert engine.identity == Identity(1, 2)
        assert_i2(inner, follower, engine)
        follower.close()


# --- the mirror stops at every file operation


class Saw:
    """Wraps the file operations of a mirror: counts them, and stops before, within or after the one named."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop_at, self.when = 0, -1, "before"
        self.names: list[str] = []
        for owner, name in (
            (os, "fsync"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"),
            (MappedState, "flush"), (shutil, "rmtree"), (sync.mirror, "scatter"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self.wrapped(name, getattr(owner, name)))

    def wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **more: Any) -> Any:
            if self.when == "within" and name != "scatter":
                return plain(*args, **more)
            here, self.count = self.count, self.count + 1
            self.names.append(name)
            if here == self.stop_at and self.when == "before":
                raise Stopped
            if here == self.stop_at and self.when == "within":
                array, index, values = args
                if index is not None:
                    plain(array, index[: len(index) // 2], values[: len(index) // 2])
                raise Stopped
            result = plain(*args, **more)
            if here == self.stop_at and self.when != "before":
                raise Stopped
            return result

        return work

    def arm(self, at: int, when: str) -> None:
        """Stop at the `at`-th operation from now (-1: never)."""
        self.count, self.stop_at, self.when = 0, at, when
        self.names = []


def a_channel_to_follow() -> tuple[MemoryStore, list[State], list[Callable[[], None]]]:
    """A store at its first version, and steps that each publish more: deltas, a changed schema, another channel."""
    store = MemoryStore()
    states = [small_state(1)]
    writer = publisher(store)
    writer.open(states[0], stamp(0))

    def more(state: State, times: int) -> None:
        for n in range(times):
            state = nudged(state, n + len(states))
            states.append(state)
            publish(writer, state, n)

    def schema() -> None:
        states.append({**states[-1], "more": states[-1]["norm"]})
        publish(writer, states[-1], 8)

    steps = [lambda: more(states[-1], 2), lambda: more(states[-1], 3), schema, lambda: more(states[-1], 1)]
    return store, states, steps


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_mirror_stopped_at_any_file_operation_comes_back_to_a_declared_state(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mirror.__init__, "__kwdefaults__", {"flush_every": 2})
    saw, at, operations = Saw(monkeypatch), 0, set()
    stopped = True
    while stopped:  # one more operation survives each time, until the whole story passes
        saw.arm(-1, when)
        store, states, steps = a_channel_to_follow()
        folder = tmp_path / f"m{at}"
        highest: Identity | None = None
        stopped, spent = False, 0
        for n, step in enumerate([lambda: None, *steps]):
            saw.arm(-1, when)
            step()
            saw.arm(at - spent if not stopped else -1, when)
            follower: Follower | None = None
            try:
                follower = Follower(store, folder, None)
                follower.poll()
                highest = follower._mirror.identity
                if n % 2:
                    follower.close()  # a clean end, with its flush, every other time
                    spent += saw.count
                    continue
            except Stopped:
                stopped = True
                operations.add(saw.names[-1])
            spent += saw.count
            saw.arm(-1, when)
            if follower is not None:
                abandon(follower)
            again = Follower(store, folder, None)
            check(store, again, highest, states)
            again.poll()
            check(store, again, again._mirror.identity, states)
            assert again._mirror.identity == head_of(store).identity
            highest = again._mirror.identity
            abandon(again)
        saw.arm(-1, when)
        shutil.rmtree(folder)
        at += 1
    if when == "within":
        assert at > 5
        assert operations == {"scatter"}
    else:
        assert at > 60
        assert operations == {"fsync", "replace", "rename", "unlink", "mkdir", "flush", "rmtree", "scatter"}


def check(store: MemoryStore, follower: Follower, highest: Identity | None, states: list[State]) -> None:
    """What a restarted follower holds is declared, and not below the highest version ever reported."""
    mirror = follower._mirror
    assert_i2(store, follower)
    if mirror.identity is not None:
        assert same_bits(
            mirror.state, {n: a.view(mirror.state[n].dtype) for n, a in states[mirror.identity[1]].items()}
        )
    if highest is not None:
        assert mirror.identity is not None
        assert mirror.highest is not None
        assert mirror.highest >= mirror.identity >= highest


@pytest.mark.parametrize("operation", ["rename", "mkdir", "replace"])
def test_logs_outlive_an_install_that_was_stopped(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, states, steps = a_channel_to_follow()
    follower = Follower(store, tmp_path / "m", None)
    follower.poll()
    steps[0]()
    follower.poll()  # two versions that only the logs keep
    steps[2]()

    def stop(*_args: object, **_more: object) -> None:
        raise Stopped

    monkeypatch.setattr(Path, operation, stop)
    with pytest.raises(Stopped):
        follower.poll()
    monkeypatch.undo()
    abandon(follower)
    again = Follower(store, tmp_path / "m", None)
    check(store, again, Identity(1, 2), states)
    assert again.poll()
    check(store, again, Identity(1, 3), states)
    again.close()


# --- a follower killed at random

FOLLOWER = """
import sys, threading
from pathlib import Path
from sync import DirectoryStore, Follower
store, folder = DirectoryStore(Path(sys.argv[1])), Path(sys.argv[2])
follower = Follower(store, folder, None)
while True:
    follower.poll()
    print(follower.status().mirror, follower.status().state_digest, flush=True)
"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for child in made:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_follower_killed_at_random_moments_never_holds_or_reports_what_was_not_declared(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    store = DirectoryStore(tmp_path / "bucket", create=True, writable=True)
    writer = publisher(store, anchor_share=1.0)
    state = small_state(1, rows=600)
    writer.open(state, stamp(0))
    highest, n, until = Identity(1, 0), 0, time.monotonic() + 18
    for round_ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(tmp_path / "bucket"), str(tmp_path / "mirror")],
            stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        children.append(child)
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        for _ in range(3 + round_):
            n += 1
            state = nudged(state, n)
            publish(writer, state, n)
        if round_ == 3:  # a new anchor that must be installed
            state = small_state(2, rows=500)
            publish(writer, state, n)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        known = {(str(identity), digest) for _, identity, digest in declared(store)}
        seen = []
        for line in lines:
            if line.endswith(b"\n"):
                identity, digest = line.decode().split()
                assert (identity, digest) in known
                seen.append(Identity.parse(identity))
        assert seen == sorted(seen)
        assert seen[0] >= highest  # I3, across the kill
        highest = seen[-1]
        child.wait()
        mirror = Mirror(tmp_path / "mirror")
        assert mirror.held is not None
        assert mirror.recovered
        assert mirror.audit()
        assert (str(mirror.held.identity), mirror.held.digest) in known
        assert mirror.held.identity >= highest
        mirror.close()
        if time.monotonic() > until:
            break
    follower = Follower(store, tmp_path / "mirror", None)
    follower.poll()
    assert follower.status().mirror == str(writer.identity)
    assert same_bits(follower._mirror.state, {k: a.view(follower._mirror.state[k].dtype) for k, a in state.items()})
    assert len(manifests(store)) > n
    follower.close()
    writer.close()
