"""Publisher and follower over a store: what is promised on good days and on bad ones."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import Fault, FaultStore, copy_of, cut, flip
from support.runs import (
    Time,
    abandon,
    assert_i1,
    assert_i2,
    assert_i4,
    assert_i5,
    folder_bytes,
    head_of,
    manifests,
    publish,
    publisher,
    refs_of,
    stamp,
)
from support.states import NumpyEngine, nudged, same_bits, small_state

from sync import DirectoryStore, Follower, Identity, MemoryStore, Publisher, Stamp, state_digest
from sync.base import Base
from sync.codec import CODECS
from sync.digest import PieceSums, Sums
from sync.errors import (
    ConfigError,
    CorruptObject,
    DeltawireError,
    EngineFailed,
    Fenced,
    InvalidPatch,
    InvalidRequest,
    Pruned,
    StoreUnavailable,
)
from sync.mirror import Mirror
from sync.pieces import layout_of
from sync.safetensors_io import MappedCheckpoint, MappedState
from sync.stores import ObjectInfo, Store
from sync.tensors import schema_of, state_bytes

pytestmark = pytest.mark.unit


@pytest.fixture(params=["memory", "directory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return DirectoryStore(tmp_path / "bucket", create=True, writable=True)


class Run:
    """A channel with one publisher, one follower and one engine; `state` is what was published last."""

    def __init__(self, folder: Path, **habits: Any) -> None:
        self.inner = MemoryStore()
        self.written = FaultStore(self.inner)
        self.read = FaultStore(self.inner)
        self.writer = publisher(self.written, **habits)
        self.folder = folder
        self.state = small_state()
        self.writer.open(self.state, stamp(0))
        self.engine = NumpyEngine()
        self.follower = Follower(self.read, folder, self.engine)
        self.follower.poll()
        self.count = 0

    def publish(self, times: int = 1, *, changed: bool = True) -> Identity:
        for _ in range(times):
            self.count += 1
            if changed:
                self.state = nudged(self.state, self.count)
            at = publish(self.writer, self.state, self.count)
        return at

    def restart(self, *, clean: bool = True) -> None:
        self.follower.close() if clean else abandon(self.follower)
        self.engine = NumpyEngine()
        self.follower = Follower(self.read, self.folder, self.engine)

    def check(self) -> None:
        """The engine serves the last published bits."""
        assert same_bits(self.engine.state, {n: a.view(self.engine.state[n].dtype) for n, a in self.state.items()})
        assert self.engine.identity == self.writer.identity
        assert not self.engine.paused
        status = self.follower.status()
        assert status.ready
        assert status.version == status.mirror == status.head == str(self.writer.identity)
        assert status.digest_failures == 0
        assert_i1(self.inner)
        assert_i2(self.inner, self.follower, self.engine)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "mirror")
    yield made
    made.follower.close()


# --- versions


@pytest.mark.parametrize("codec", CODECS)
def test_every_version_arrives_bit_for_bit_with_the_declared_digest(
    any_store: Store, codec: str, tmp_path: Path
) -> None:
    writer, engine, state = publisher(any_store, codec=codec), NumpyEngine(), small_state()
    follower = Follower(any_store, tmp_path / "mirror", engine)
    assert follower.poll() is False
    assert not follower.status().ready
    for n in range(9):
        at = writer.open(state, stamp(0)) if n == 0 else publish(writer, state, n)
        assert at == Identity(1, n)
        assert follower.poll() is True
        assert follower.poll() is False
        manifest = head_of(any_store).manifest
        assert manifest is not None
        assert (manifest.identity, manifest.step) == (at, n)
        assert manifest.state_digest == state_digest(state) == engine.digest(schema_of(state))
        assert follower.status().state_digest == manifest.state_digest
        assert_i2(any_store, follower, engine)
        state = nudged(state, n)
    assert engine.loads == 1
    assert engine.served == [Identity(1, n) for n in range(9)]
    assert_i1(any_store)
    assert_i4(any_store)
    assert_i5(any_store, tmp_path)
    writer.close()
    assert head_of(any_store).closed
    follower.close()


def test_a_lagging_follower_applies_the_union_in_one_pause(run: Run) -> None:
    run.publish(7)
    assert run.follower.poll()
    run.check()
    assert run.engine.served == [Identity(1, 0), Identity(1, 7)]
    assert (run.engine.loads, run.engine.applies) == (1, 1)
    assert run.follower.status().versions_applied == 7


def test_a_tensor_that_changed_widely_is_read_whole(run: Run) -> None:
    run.state = {n: a + np.array(1, a.dtype) for n, a in run.state.items()}
    publish(run.writer, run.state)
    run.follower.poll()
    run.check()
    assert run.engine.whole == {name for name, array in run.state.items() if array.size}
    run.publish()
    run.follower.poll()
    assert not run.engine.whole & {name for name, array in run.state.items() if array.size > 64}


def test_facts_of_a_version_are_kept(run: Run) -> None:
    run.state = nudged(run.state, 1)
    assert run.writer.offer(run.state, Stamp(7, 3, {"curriculum": ("4@1", "5@1")}))
    run.writer.wait()
    manifest = head_of(run.inner).manifest
    assert manifest is not None
    assert (manifest.step, manifest.sync, manifest.harness) == (7, 3, {"curriculum": ("4@1", "5@1")})
    last = run.writer.history[-1]
    assert (last.kind, last.payload) == ("delta", manifest.payload_bytes)
    assert last.full == state_bytes(schema_of(run.state))
    assert 0 < last.changed < last.elements


def test_an_unchanged_state_is_a_version_without_an_object(run: Run) -> None:
    before = run.follower.status().bytes_fetched
    run.publish(changed=False)
    manifest = head_of(run.inner).manifest
    assert manifest is not None
    assert (manifest.kind, manifest.objects, manifest.base_digest) == ("delta", (), manifest.state_digest)
    assert run.follower.poll()
    run.check()
    assert run.follower.status().bytes_fetched == before


def test_unchanged_versions_on_both_sides_of_a_catchup_list_do_not_strand_a_follower(run: Run) -> None:
    for behind in range(1, 9):
        run.publish(behind, changed=False)
        assert run.follower.poll()
        run.check()


def test_offers_while_one_is_in_flight_are_merged_never_lost(tmp_path: Path) -> None:
    run = Run(tmp_path / "m", threads=True)
    gate, reached = threading.Event(), threading.Event()

    def hold(method: str, _keys: tuple[str, ...]) -> Fault | None:
        if method == "put_batch":
            reached.set()
            assert gate.wait(60)
        return None

    run.written.rule = hold
    states = [nudged(run.state, n) for n in range(4)]
    assert run.writer.offer(states[0], stamp(1))
    assert reached.wait(60)
    assert run.writer.busy
    assert same_bits(run.writer.base.state, run.state)  # I7: the base is the last committed version, never a staged one
    assert not run.writer.offer(states[1], stamp(2))
    assert not run.writer.offer(states[2], stamp(3))
    assert head_of(run.inner).version == 0
    gate.set()
    run.writer.wait()
    assert same_bits(run.writer.base.state, states[0])
    run.state = states[3]
    assert run.writer.offer(run.state, stamp(4))
    run.state = {n: a.copy() for n, a in run.state.items()}
    states[3]["embed"][:] = 0  # what was offered may change as soon as offer returned
    run.writer.wait()
    assert [p.identity.version for p in run.writer.history] == [0, 1, 2]
    run.follower.poll()
    run.check()
    run.follower.close()
    run.writer.close()


def test_i7_the_base_stays_where_it_was_when_a_commit_fails(run: Run) -> None:
    before = {n: a.copy() for n, a in run.writer.base.state.items()}
    run.written.rule = lambda m, keys: "fail before" if m == "put_batch" and "heads/" in keys[0] else None
    run.writer.offer(nudged(run.state, 1), stamp(1))
    with pytest.raises(StoreUnavailable, match="claims a new epoch"):
        run.writer.wait()
    assert same_bits(run.writer.base.state, before)
    assert run.writer.identity == Identity(1, 0)
    run.written.rule = lambda _m, _k: None
    for again in (run.writer.wait, lambda: run.writer.offer(run.state, stamp(2))):
        with pytest.raises(StoreUnavailable):  # the term is over
            again()
    head = head_of(run.inner)
    run.writer.close()
    assert head_of(run.inner) == head


def test_flush_publishes_the_last_state_once(run: Run) -> None:
    run.state = nudged(run.state, 1)
    assert run.writer.flush(run.state, stamp(1)) == Identity(1, 1)
    assert run.writer.flush(run.state, stamp(1)) == Identity(1, 1)
    assert run.writer.flush(run.state, stamp(2)) == Identity(1, 2)
    run.follower.poll()
    run.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {**s, "extra": np.ones(3, np.float32)},
        lambda s: {n: a for n, a in s.items() if n != "norm"},
        lambda s: {**s, "norm": np.ones(17, np.float32)},
        lambda s: {**s, "norm": s["norm"].astype(np.float64)},
        lambda s: {**s, "norm": s["norm"].view(np.int32)},
    ],
    ids=["added", "removed", "reshaped", "wider", "same width"],
)
def test_a_changed_schema_is_published_as_an_anchor(run: Run, change: object) -> None:
    assert callable(change)
    run.publish()
    run.state = change(run.state)
    publish(run.writer, run.state)
    manifest = head_of(run.inner).manifest
    assert manifest is not None
    assert (manifest.kind, manifest.version) == ("anchor", 2)
    assert run.follower.poll()
    run.check()
    run.publish()
    assert run.follower.poll()
    run.check()


def test_adaptive_anchors_bound_what_a_late_follower_fetches(tmp_path: Path) -> None:
    share = 1.0
    run = Run(tmp_path / "m", anchor_share=share, collect_every=1)
    full, largest = len(run.inner.get(refs_of(run.inner)[0].key[:-13] + "model.safetensors", limit=1 << 30)), 0
    for n in range(60):
        run.publish()
        largest = max(largest, run.writer.history[-1].payload)
        if n % 7 == 0:
            late = Follower(run.inner, tmp_path / f"late-{n}", None)
            assert late.poll()
            assert late.status().bytes_fetched <= full * (1 + share) + 2 * largest + 4096
            assert late.status().mirror == str(run.writer.identity)
            late.close()
    anchors = [r for r in refs_of(run.inner) if r.kind == "anchor"]
    assert len(anchors) == 2
    assert sum(k.startswith("weights/anchors/") for k in manifests(run.inner)) > 4
    assert_i5(run.inner, tmp_path)
    run.follower.poll()
    run.check()
    run.follower.close()


# --- writers


def test_a_young_head_fences_a_second_writer_until_takeover_close_or_ten_minutes() -> None:
    time = Time()
    store = MemoryStore(now=time.now)
    first = publisher(store, time)
    first.open(small_state(), stamp(0))
    time.seconds += 590
    with pytest.raises(Fenced, match="takeover"):
        publisher(store, time).open(small_state(1), stamp(0))
    assert head_of(store).epoch == 1
    publish(first, small_state(1))  # it was detected, not disturbed
    time.seconds += 601
    second = publisher(store, time)
    assert second.open(small_state(2), stamp(0)) == Identity(2, 2)
    second.close()
    third = publisher(store, time)
    assert third.open(small_state(3), stamp(0)) == Identity(3, 3)
    fourth = publisher(store, time)
    assert fourth.open(small_state(4), stamp(0), takeover=True) == Identity(4, 4)
    assert head_of(store).channel_uid == next(iter(manifests(store).values())).channel_uid
    assert [i.key for i in store.list("claims/")] == []


def test_a_claim_survives_a_stale_look_at_its_own_probe() -> None:
    store = MemoryStore()
    publisher(store).open(small_state(), stamp(0))
    rival = FaultStore(store)
    rival.stale = copy_of(store)
    with pytest.raises(DeltawireError):
        publisher(rival).open(small_state(), stamp(0))
    assert head_of(store).epoch == 1


def test_a_takeover_fences_the_old_writer_and_readers_move_to_the_new_epoch(run: Run) -> None:
    run.publish(2)
    run.follower.poll()
    rival = publisher(run.inner)
    state = nudged(run.state, 99)
    assert rival.open(state, stamp(3), takeover=True) == Identity(2, 3)
    base = {n: a.copy() for n, a in run.writer.base.state.items()}
    run.writer.offer(nudged(run.state, 100), stamp(3))
    with pytest.raises(Fenced, match="epoch 2"):
        run.writer.wait()
    assert same_bits(run.writer.base.state, base)
    with pytest.raises(Fenced):
        run.writer.offer(run.state, stamp(4))
    head = head_of(run.inner)
    run.writer.close()
    assert head_of(run.inner) == head
    assert run.follower.poll()
    run.writer, run.state = rival, state
    run.check()
    assert_i4(run.inner)
    run.publish(3)
    run.follower.poll()
    run.check()


def test_a_fork_below_the_head_is_left_through_an_anchor(run: Run) -> None:
    run.publish(2)
    fork = FaultStore(run.inner)
    fork.stale = copy_of(run.inner)  # the old writer does not see the takeover
    rival = publisher(run.inner)
    state = nudged(run.state, 50)
    rival.open(state, stamp(3), takeover=True)
    for key in [i.key for i in run.inner.list("heads/") if "-000002-" in i.key]:
        held = run.inner.get(key, limit=1 << 30)
        run.inner.delete([key])
    run.publish(2)  # 3@1 and 4@1 are committed on the fork and followed
    run.follower.poll()
    assert run.engine.identity == Identity(1, 4)
    run.inner.put_batch({key: held})
    assert run.follower.poll()  # 3@2 is higher than 4@1: identities order by epoch
    run.writer, run.state = rival, state
    run.check()


def test_a_split_of_one_epoch_stops_both_writers_and_readers_keep_what_they_hold(run: Run) -> None:
    run.publish(2)
    run.follower.poll()
    run.writer.close()
    blind, time = FaultStore(run.inner), Time()
    blind.stale = copy_of(run.inner)
    first = publisher(run.inner)
    first.open(nudged(run.state, 8), stamp(3))

    def see() -> None:
        blind.stale = None

    time.on_sleep = see
    time.clock = time.clock._replace(token_hex=lambda n: "f" * 2 * n)
    with pytest.raises(Fenced, match="epoch 2"):
        publisher(blind, time).open(nudged(run.state, 9), stamp(3))
    first.offer(nudged(run.state, 10), stamp(4))
    with pytest.raises(Fenced, match="f" * 16):
        first.wait()
    before = run.follower.status()
    assert run.follower.poll() is False
    assert run.follower.status().version == before.version == "2@1"
    assert run.engine.identity == Identity(1, 2)
    run.writer = publisher(run.inner)
    run.state = nudged(run.state, 11)
    assert run.writer.open(run.state, stamp(5), takeover=True).epoch == 3
    assert run.follower.poll()
    run.check()
    assert_i4(run.inner)


def test_two_first_claims_at_once_stop_each_other() -> None:
    store, time = MemoryStore(), Time()
    blind = FaultStore(store)
    blind.stale = MemoryStore()
    first = publisher(store)
    first.open(small_state(), stamp(0))

    def see() -> None:
        blind.stale = None

    time.on_sleep = see
    time.clock = time.clock._replace(token_hex=lambda n: "e" * 2 * n)
    with pytest.raises(Fenced):
        publisher(blind, time).open(small_state(), stamp(0))
    first.offer(small_state(1), stamp(1))
    with pytest.raises(Fenced):
        first.wait()
    again = publisher(store)
    assert again.open(small_state(2), stamp(0), takeover=True).epoch == 2


# --- lost replies


@pytest.mark.parametrize("fault", ["fail before", "fail after"])
@pytest.mark.parametrize("method", ["put_batch", "info", "list"])
def test_a_failure_of_any_call_of_a_publish_is_repeated_and_settled(run: Run, method: str, fault: Fault) -> None:
    for n in range(2):
        start = len(run.written.calls)
        seen: list[int] = []

        def once(called: str, _keys: tuple[str, ...], n: int = n, seen: list[int] = seen) -> Fault | None:
            if called != method:
                return None
            seen.append(1)
            return fault if len(seen) == n + 1 else None

        run.written.rule = once
        run.publish()
        if len(seen) > n:
            assert len(run.written.calls) - start > 4  # as many as an undisturbed publish makes
        run.follower.poll()
        run.check()
    assert [p.identity.version for p in run.writer.history] == [0, 1, 2]


def test_a_refused_write_is_never_taken_for_the_object_of_equal_size_before_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "m", catchup_every=0)
    run.publish(3, changed=False)  # consecutive heads of one size
    sizes = {len(run.inner.get(i.key, limit=1 << 30)) for i in run.inner.list("heads/")}
    refused: list[str] = []

    def refuse(method: str, keys: tuple[str, ...]) -> Fault | None:
        if method == "put_batch" and keys[0].startswith("heads/") and not refused:
            refused.append(keys[0])
            return "fail before"
        return None

    run.written.rule = refuse
    run.publish(changed=False)
    assert refused
    assert {i.size for i in run.inner.list("heads/")} == sizes
    assert head_of(run.inner).identity == run.writer.identity
    run.follower.poll()
    run.check()
    run.follower.close()


def test_a_store_that_stays_away_ends_the_publish_at_its_deadline(run: Run) -> None:
    run.written.rule = lambda _m, _k: "fail before"
    run.writer.offer(nudged(run.state, 1), stamp(1))
    with pytest.raises(StoreUnavailable, match="within 30 s"):
        run.writer.wait()
    run.written.rule = lambda _m, _k: None
    run.writer.close()
    assert head_of(run.inner).identity == Identity(1, 0)
    assert not head_of(run.inner).closed
    follow = run.follower.poll()
    assert follow is False
    run.check()


def test_a_publisher_is_opened_once_and_first(run: Run) -> None:
    with pytest.raises(InvalidRequest, match="open already"):
        run.writer.open(run.state, stamp(0))
    unopened = publisher(MemoryStore())
    for call in (unopened.wait, lambda: unopened.offer(run.state, stamp(0))):
        with pytest.raises(InvalidRequest, match="open the publisher first"):
            call()
    unopened.close()
    with pytest.raises(ConfigError, match="codec"):
        publisher(MemoryStore(), codec="tightest").open(run.state, stamp(0))
    run.writer.close()
    run.writer.close()


# --- readers


def test_i3_an_older_head_is_never_applied(run: Run) -> None:
    run.publish(2)
    old = copy_of(run.inner)
    run.publish(3)
    run.follower.poll()
    run.read.inner = old
    assert run.follower.poll() is False
    assert run.engine.served[-1] == Identity(1, 5)
    assert run.follower.status().version == "5@1"
    run.restart()
    run.follower.poll()
    assert run.engine.served == [Identity(1, 5)]
    assert run.follower.status().ready
    run.read.inner = run.inner
    run.publish()
    run.follower.poll()
    run.check()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_i3_holds_when_the_mirror_is_damaged_and_the_bucket_shows_the_past(run: Run, clean: bool) -> None:
    run.publish(2)
    old = copy_of(run.inner)
    run.publish(3)
    run.follower.poll()
    run.read.inner = old
    model = next(run.folder.glob("g-*")) / "model.safetensors"
    run.follower.close() if clean else abandon(run.follower)
    model.write_bytes(flip("", -1)("x", model.read_bytes()))
    run.engine = NumpyEngine()
    run.follower = Follower(run.read, run.folder, run.engine)
    assert run.follower.status().highest_reported == "5@1"
    run.follower.poll()
    status = run.follower.status()
    assert not status.ready
    assert "5@1" in status.reason
    assert run.engine.served == []
    run.read.inner = run.inner
    assert run.follower.poll()
    run.check()


def test_another_channel_in_the_same_place_is_loaded_anew(run: Run) -> None:
    run.publish(5)
    run.follower.poll()
    run.inner.delete([i.key for i in run.inner.list("")])
    assert run.follower.poll() is False
    assert run.follower.status().version == "5@1"  # nothing there: keep what is held
    time = Time()
    time.clock = time.clock._replace(token_hex=lambda n: "ab" * n)
    run.writer = publisher(run.inner, time)
    run.state = small_state(7, rows=9)
    run.writer.open(run.state, stamp(0))
    assert run.follower.poll()
    run.check()
    assert run.follower.status().highest_reported == "0@1"
    run.restart()
    run.follower.poll()
    run.check()


@pytest.mark.parametrize("harm", [flip, lambda w: flip(w, 40), cut], ids=["end", "start", "cut"])
@pytest.mark.parametrize("where", ["delta.safetensors", "heads/"])
def test_a_damaged_object_is_named_and_nothing_is_applied(run: Run, where: str, harm: object) -> None:
    assert callable(harm)
    run.publish(1)
    run.read.damage = harm(where)
    files, bits_before = folder_bytes(run.folder), {n: a.copy() for n, a in run.engine.state.items()}
    with pytest.raises(CorruptObject, match=where):
        run.follower.poll()
    assert folder_bytes(run.folder) == files
    assert same_bits(run.engine.state, bits_before)
    status = run.follower.status()
    assert (status.ready, status.version, where in status.last_error) == (True, "0@1", True)
    assert run.engine.served == [Identity(1, 0)]
    run.read.damage = lambda _k, data: data
    assert run.follower.poll()
    run.check()
    assert run.follower.status().last_error == ""


@pytest.mark.parametrize("harm", [flip, lambda w: flip(w, 40), cut], ids=["end", "start", "cut"])
@pytest.mark.parametrize("where", ["anchors/", "model.safetensors", "config.json", "versions/", "catchup/"])
def test_a_new_follower_refuses_damaged_objects_by_name(run: Run, tmp_path: Path, where: str, harm: object) -> None:
    assert callable(harm)
    run.publish(6)
    store = FaultStore(run.inner)
    store.damage = harm(where)
    engine = NumpyEngine()
    follower = Follower(store, tmp_path / "new", engine)
    with pytest.raises(CorruptObject, match=where):
        follower.poll()
    assert engine.served == ([Identity(1, 0)] if where == "versions/" else [])  # the newest that could be verified
    assert_i2(run.inner, follower, engine)
    store.damage = lambda _k, data: data
    assert follower.poll()
    assert same_bits(engine.state, run.engine.state) is False
    assert engine.identity == run.writer.identity
    assert_i2(run.inner, follower, engine)
    follower.close()


def test_an_object_that_is_missing_is_named(run: Run) -> None:
    run.publish()
    gone = [i.key for i in run.inner.list("weights/versions/") if "delta" in i.key]
    run.inner.delete(gone)
    with pytest.raises(CorruptObject, match=r"delta\.safetensors.*missing"):
        run.follower.poll()
    assert run.engine.identity == Identity(1, 0)


def test_a_wrong_digest_is_counted_and_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(base: Base, _patch: object, _codec: str) -> tuple[list[bytes], str, PieceSums]:
        return [], Sums(1, 2).text(), np.zeros_like(base._mirror._pieces)

    monkeypatch.setattr("sync.base.Base.encode", encode)  # the writer declares nonsense
    run.publish()
    monkeypatch.undo()
    with pytest.raises(CorruptObject, match="declared"):
        run.follower.poll()
    assert run.follower.status().digest_failures == 1
    assert run.engine.identity == Identity(1, 0)
    assert run.follower._mirror.audit()


def test_a_damaged_anchor_is_passed_by_through_another_way(tmp_path: Path) -> None:
    run = Run(tmp_path / "m", anchor_share=0.0, keep_anchors=9)  # an anchor of every version
    run.publish(3)
    bad = [r.key for r in refs_of(run.inner) if r.kind == "anchor"][-1]
    run.read.damage = flip(bad.removesuffix("manifest.json"))
    assert run.follower.poll()
    run.check()
    assert run.follower.status().refused_objects == 1
    assert (run.follower.status().anchors_loaded, run.follower.status().versions_applied) == (1, 3)
    run.follower.close()


def test_a_follower_behind_everything_live_is_pruned_by_name(run: Run, tmp_path: Path) -> None:
    run.publish(2)
    follower = Follower(run.inner, tmp_path / "n", None)
    head = head_of(run.inner)
    with pytest.raises(Pruned, match="nothing"):
        follower._follow(head.model_copy(update={"catchup": None, "recent": head.recent[-1:]}))
    follower.close()


def test_a_mirror_alone_moves_and_says_so(run: Run, tmp_path: Path) -> None:
    alone = Follower(run.inner, tmp_path / "alone", None)
    assert alone.poll() is True  # an anchor
    assert alone.poll() is False
    run.publish()
    assert alone.poll() is True  # a delta
    run.publish(changed=False)
    assert alone.poll() is True
    assert alone.poll() is False
    assert alone.status().ready
    assert alone.status().mirror == str(run.writer.identity)
    assert_i2(run.inner, alone)
    alone.close()


def test_a_restart_resumes_from_the_mirror(run: Run) -> None:
    run.publish(3)
    run.follower.poll()
    for clean in (True, False):
        run.restart(clean=clean)
        assert run.follower.status().mirror == str(run.writer.identity)
        assert run.follower.poll()
        run.check()
        assert run.follower.status().bytes_fetched == 0
        run.publish(2)
        run.follower.poll()
        run.check()


def test_a_restart_serves_from_the_mirror_while_the_bucket_is_away(run: Run) -> None:
    run.publish(3)
    run.follower.poll()
    run.restart()
    run.read.rule = lambda _m, _k: "fail before"
    with pytest.raises(StoreUnavailable):
        run.follower.poll()
    assert run.engine.served == [Identity(1, 3)]
    assert run.follower.status().ready


def test_a_mirror_folder_has_one_owner(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use"):
        Mirror(run.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Mirror(tmp_path / "file" / "below")


def test_sharded_anchors_are_mapped_as_they_are(run: Run, tmp_path: Path) -> None:
    from sync.safetensors_io import pack_state

    schema = schema_of(run.state)
    mirror = Mirror(tmp_path / "sharded")

    def fill(folder: Path) -> None:
        for n, names in enumerate((["embed", "norm"], ["head", "step", "none"])):
            part = {name: schema[name] for name in names}
            data = pack_state({name: run.state[name] for name in names}, part)
            (folder / f"model-{n}.safetensors").write_bytes(data)
        (folder / "model.safetensors.index.json").write_text("{}")
        (folder / "config.json").write_text("{}")

    mirror.install("0" * 16, Identity(1, 4), state_digest(run.state), fill)
    assert mirror.audit()
    assert same_bits(mirror.state, run.state)
    mirror.apply(
        {"norm": (np.array([1], np.int32), np.array([7], np.uint16))}, Identity(1, 5), np.zeros_like(mirror._pieces)
    )
    mirror.flush()
    assert MappedCheckpoint(mirror.checkpoint).state["norm"][1] == 7  # the shard that holds it
    mirror.install("0" * 16, Identity(1, 4), state_digest(run.state), fill)
    with pytest.raises(CorruptObject, match="declared"):
        mirror.install("0" * 16, Identity(1, 5), state_digest(small_state(3)), fill)
    with pytest.raises(CorruptObject, match=r"no \.safetensors"):
        mirror.install("0" * 16, Identity(1, 5), state_digest(run.state), lambda _f: None)
    assert mirror.held is not None
    assert mirror.held.identity == Identity(1, 4)
    mirror.close()
    again = Mirror(tmp_path / "sharded")
    assert again.recovered
    assert again.held == mirror.held
    again.close()


@pytest.mark.parametrize("harm", ["no meta", "meta", "model", "no model", "redo", "foreign redo", "side", "no side"])
def test_a_damaged_mirror_is_rebuilt_from_the_bucket(run: Run, harm: str) -> None:
    run.publish(3)
    run.follower.poll()
    abandon(run.follower)
    model = next(run.folder.glob("g-*")) / "model.safetensors"
    redo = sorted((run.folder / "redo").iterdir())
    assert len(redo) == 3
    if harm == "no meta":
        (run.folder / "mirror.json").unlink()
    elif harm == "meta":
        (run.folder / "mirror.json").write_bytes(b"{}")
    elif harm == "model":
        model.write_bytes(model.read_bytes()[:-3])
    elif harm == "no model":
        shutil.rmtree(model.parent)
    elif harm == "side":
        (model.parent / "config.json").write_bytes(b'{"model_type": "tast"}')
    elif harm == "no side":
        (model.parent / "config.json").unlink()
    elif harm == "redo":
        redo[-1].write_bytes(redo[-1].read_bytes()[:-5])
    else:
        redo[-1].write_bytes(redo[0].read_bytes())
    run.engine = NumpyEngine()
    run.follower = Follower(run.read, run.folder, run.engine)
    run.follower.poll()
    run.check()
    assert (next(run.folder.glob("g-*")) / "config.json").read_bytes() == b'{"model_type": "test"}'
    run.publish()
    run.follower.poll()
    run.check()
    assert len(list(run.folder.glob("g-*"))) == 1


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_a_disk_that_fails_once_never_leaves_the_engine_with_other_bits(
    run: Run, kind: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.follower._mirror._flush_every = 2
    if kind == "delta":
        run.publish(3)
    else:
        run.writer.close()
        run.writer, run.state = publisher(run.inner), nudged(run.state, 77)
        run.writer.open(run.state, stamp(1))
    left = [call]

    def full(plain: Callable[..., None]) -> Callable[..., None]:
        def work(*args: object) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.ENOSPC, "No space left on device")
            plain(*args)

        return work

    monkeypatch.setattr(os, "fsync", full(os.fsync))
    monkeypatch.setattr(MappedState, "flush", full(MappedState.flush))
    with suppress(StoreUnavailable, EngineFailed):
        run.follower.poll()
        left[0] = 1 << 30  # fewer calls than that: nothing failed
    assert ("No space left" in run.follower.status().last_error) == (left[0] < 0)
    left[0] = 1 << 30
    run.follower.poll()
    run.check()
    run.publish()
    run.follower.poll()
    run.check()


def test_a_download_that_finds_no_room_blames_the_disk_of_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = publisher(DirectoryStore(tmp_path / "bucket", create=True))
    writer.open(small_state(), stamp(0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(writer), closing(Follower(DirectoryStore(tmp_path / "bucket"), tmp_path / "mirror", None)) as follower:
        monkeypatch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(StoreUnavailable, match=r"the disk of the mirror failed \(No space left"):
            follower.poll()
        monkeypatch.undo()
        assert follower.poll()


def test_a_mirror_that_cannot_be_opened_or_is_closed_twice_frees_its_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.follower.close()
    run.follower.close()

    def full(_self: MappedState) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MappedState, "flush", full)
    with pytest.raises(ConfigError, match="No space left"):
        Mirror(run.folder)
    monkeypatch.undo()
    run.restart(clean=True)
    run.follower.poll()
    run.check()


# --- engines that fail


@pytest.mark.parametrize("error", [InvalidPatch("refused by the test"), RuntimeError("out of memory, says the test")])
@pytest.mark.parametrize("step", ["pause", "apply", "read", "resume", "lose a write"])
def test_a_failed_apply_leaves_the_engine_not_ready_and_is_mended_from_the_mirror(
    run: Run, step: str, error: Exception
) -> None:
    run.publish(2)
    if step == "lose a write":
        run.engine.lose_a_write = True
        error = EngineFailed("engine holds other bits")
    else:
        run.engine.fail[step] = error
    with pytest.raises(EngineFailed if isinstance(error, RuntimeError) else type(error), match=str(error)):
        run.follower.poll()
    status = run.follower.status()
    assert not status.ready
    assert str(error) in status.reason
    assert run.engine.paused or step == "pause"
    assert run.engine.served == [Identity(1, 0)]
    assert status.mirror == "2@1"
    before = len(run.read.calls)
    assert run.follower.poll()
    assert {method for method, _ in run.read.calls[before:]} <= {"list"}
    assert run.engine.loads == 2
    run.check()


def test_an_engine_is_mended_from_the_mirror_while_the_bucket_is_away(run: Run) -> None:
    run.publish()
    run.engine.fail["apply"] = InvalidPatch("refused by the test")
    with pytest.raises(InvalidPatch):
        run.follower.poll()
    run.read.rule = lambda _m, _k: "fail before"
    with pytest.raises(StoreUnavailable):
        run.follower.poll()
    run.read.rule = lambda _m, _k: None
    run.check()


def test_a_load_that_fails_is_tried_again(run: Run) -> None:
    run.restart()
    run.engine.fail["load"] = ConfigError("this engine serves another model")
    with pytest.raises(ConfigError):
        run.follower.poll()
    assert not run.follower.status().ready
    assert run.follower.poll()
    run.check()


def test_an_engine_that_drifts_is_found_by_the_audit(tmp_path: Path) -> None:
    run = Run(tmp_path / "m")
    run.follower.close()
    run.engine = NumpyEngine()
    run.follower = Follower(run.read, tmp_path / "m", run.engine, audit_every=2)
    run.follower.poll()
    run.engine.state["norm"][3] ^= 1  # a bit flips where no delta looks
    run.publish()
    run.follower.poll()
    run.publish()
    with pytest.raises(EngineFailed, match="parameters"):
        run.follower.poll()
    assert run.follower.status().digest_failures == 1
    assert not run.follower.status().ready
    assert run.follower.poll()
    assert same_bits(run.engine.state, {n: a.view(run.engine.state[n].dtype) for n, a in run.state.items()})
    run.follower.close()


def test_a_mirror_changed_where_no_delta_looks_is_found_within_its_pieces_and_loaded_anew(run: Run) -> None:
    run.publish()
    run.follower.poll()
    mirror = run.follower._mirror
    mirror.state["norm"][0] ^= 1
    pieces, polls = len(layout_of(mirror.schema).pieces), 0
    while run.follower.status().digest_failures == 0:
        run.publish(changed=False)
        assert run.follower.poll()
        polls += 1
        assert polls <= pieces
    assert run.follower.status().anchors_loaded == 2
    assert mirror.audit()
    assert same_bits(run.engine.state, {n: a.view(run.engine.state[n].dtype) for n, a in run.state.items()})


def test_a_base_that_was_changed_is_found_within_its_pieces_and_an_anchor_follows(tmp_path: Path) -> None:
    run = Run(tmp_path / "m", anchor_share=50.0)
    base = run.writer.base._mirror
    base.state["norm"][0] ^= 1
    kinds = []
    for _ in range(len(layout_of(base.schema).pieces) + 1):
        run.publish()
        manifest = head_of(run.inner).manifest
        assert manifest is not None
        kinds.append(manifest.kind)
    assert kinds.count("anchor") == 1
    assert run.writer.base.digest == state_digest(run.state)
    run.follower.poll()
    assert same_bits(run.engine.state, {n: a.view(run.engine.state[n].dtype) for n, a in run.state.items()})
    run.follower.close()


def test_the_engine_never_aliases_the_mirror(run: Run) -> None:
    held = {n: a.copy() for n, a in run.engine.state.items()}
    for array in run.follower._mirror.state.values():
        array.reshape(-1)[:1] = 7
    run.follower._mirror.flush()
    assert same_bits(run.engine.state, held)


def test_run_follows_pokes_survives_errors_and_stops(run: Run) -> None:
    stop, moved = threading.Event(), threading.Event()
    engine = run.engine
    resume = engine.resume

    def noticed() -> None:
        resume()
        moved.set()

    engine.resume = noticed  # type: ignore[method-assign]
    thread = threading.Thread(target=run.follower.run, args=(stop, 3600.0))
    failing = threading.Event()

    def away(_m: str, _k: tuple[str, ...]) -> Fault | None:
        failing.set()
        return "fail before"

    run.read.rule = away
    thread.start()
    assert failing.wait(60)  # the first poll fails and is survived
    run.read.rule = lambda _m, _k: None
    run.publish()
    while not moved.wait(0.05):
        run.follower.poke()
        assert thread.is_alive()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    run.check()


def test_run_goes_on_after_an_engine_failed(run: Run) -> None:
    run.publish()
    run.engine.fail["apply"] = RuntimeError("the device is gone")
    stop = threading.Event()
    thread = threading.Thread(target=run.follower.run, args=(stop, 0.01))
    thread.start()
    while run.engine.loads < 2 or not run.follower.status().ready:
        assert thread.is_alive(), run.follower.status().reason
        time.sleep(0.005)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    run.check()


def test_run_says_why_it_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(_prefix: str) -> list[ObjectInfo]:
        raise ZeroDivisionError("a defect of a store")

    monkeypatch.setattr(run.read, "list", defect)
    with pytest.raises(ZeroDivisionError):
        run.follower.run(threading.Event(), 3600.0)
    status = run.follower.status()
    assert not status.ready
    assert "a defect of a store" in status.reason


def test_publishers_may_be_told_of_commits() -> None:
    seen: list[Identity] = []
    writer = Publisher(MemoryStore(), on_commit=lambda p: seen.append(p.identity))
    writer.open(small_state(), stamp(0))
    publish(writer, small_state(1))
    writer.close()
    assert seen == [Identity(1, 0), Identity(1, 1)]
