"""Spans, anchors, pins, collecting and resuming: what happens behind and between the versions."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.faults import FaultStore, Stopped, copy_of, flip
from support.runs import (
    Inline,
    Time,
    abandon,
    assert_i1,
    assert_i2,
    assert_i4,
    assert_i5,
    head_of,
    manifests,
    publish,
    publisher,
    refs_of,
    stamp,
)
from support.states import NumpyEngine, State, nudged, same_bits, small_state

from sync import (
    ArtifactPublisher,
    DirectoryStore,
    Follower,
    Identity,
    MemoryStore,
    Publisher,
    PublisherOptions,
    state_digest,
)
from sync.base import Base
from sync.canonical import seal
from sync.collect import Collector, sweepable
from sync.errors import (
    ConfigError,
    CorruptObject,
    Fenced,
    InvalidRequest,
    StopError,
    StoreUnavailable,
)
from sync.events import emitter
from sync.mirror import Mirror
from sync.pins import ReaderPin, read_pins
from sync.plan import Held, plan
from sync.publisher import MOST_BEHIND
from sync.schema.artifacts import Curriculum
from sync.schema.wire import Head, parse
from sync.term import Term, TermOptions
from sync.tools.verify import verify

pytestmark = pytest.mark.unit


def chain(store: MemoryStore, time: Time, versions: int, **habits: object) -> tuple[Publisher, dict[int, State]]:
    """A channel of `versions` deltas behind its first anchor, and every state of it."""
    writer, state = publisher(store, time, **habits), small_state()  # type: ignore[arg-type]
    writer.open(state, stamp(0))
    states = {0: state}
    for n in range(1, versions + 1):
        states[n] = nudged(states[n - 1], n)
        publish(writer, states[n], n)
    return writer, states


def spans_of(store: MemoryStore) -> list[tuple[int | None, int]]:
    return sorted((r.from_version, r.version) for r in refs_of(store) if r.kind == "span")


# --- spans


def test_spans_cover_aligned_powers_of_two_and_give_the_states_they_name(tmp_path: Path) -> None:
    store = MemoryStore()
    writer, states = chain(store, Time(), 33, largest_span=16, anchor_share=1000.0)
    writer.close()
    fours = [(n, n + 4) for n in range(0, 32, 4)]
    assert spans_of(store) == sorted([*fours, *[(n, n + 8) for n in range(0, 32, 8)], (0, 16), (16, 32)])
    for start in range(33):
        engine = NumpyEngine()
        follower = Follower(store, tmp_path / str(start), engine)
        head = head_of(store)
        follower._replica.go_to(Identity(1, start), head)
        follower._move_engine()
        way = plan(refs_of(store), Identity(1, 33), follower._mirror.held)
        assert len(way) <= 8
        follower.poll()
        assert same_bits(engine.state, {n: a.view(engine.state[n].dtype) for n, a in states[33].items()})
        assert_i2(store, follower, engine)
        assert engine.applies <= 1  # all of it in one pause
        follower.close()


def test_a_thousand_versions_behind_takes_at_most_24_steps_and_all_of_it_verifies() -> None:
    store = MemoryStore()
    writer = publisher(store, Time(), largest_span=1024, anchor_share=1e9)
    states: dict[int, State] = {0: {"embed": np.zeros(6000, np.uint16)}}
    writer.open(states[0], stamp(0))
    state = states[0]
    for n in range(1, 1101):
        state = {name: array.copy() for name, array in state.items()}
        state["embed"].reshape(-1)[n % state["embed"].size] += 1
        if n in (1, 37, 99, 100):
            states[n] = state
        assert writer.offer(state, stamp(n))
    writer.close()
    refs = refs_of(store)
    for behind in (1, 37, 99, 100):
        held = Held(Identity(1, behind), state_digest(states[behind]))
        anchorless = plan([r for r in refs if r.kind != "anchor"], Identity(1, 1100), held)
        assert len(anchorless) <= 24
        assert len(plan(refs, Identity(1, 1100), held)) <= 24
    result = verify(store)
    assert (result["ok"], result["problems"], result["leftovers"], result["foreign"]) == (True, [], [], [])
    assert result["channels"][0]["replayed"]["deltas"] == 1100
    rng = np.random.default_rng(0)
    keys = [i.key for i in store.list("")]
    for key in rng.choice(keys, 6, replace=False):
        data = store.get(key, limit=1 << 30)
        store.put_batch({key: flip("", int(rng.integers(0, len(data))))("", data)})
        assert [p["key"] for p in verify(store, quick=True)["problems"]] == [key]
        store.put_batch({key: data})


def test_pieces_of_spans_survive_a_restart_in_the_same_folder(tmp_path: Path) -> None:
    store, time = MemoryStore(), Time()
    first, states = chain(store, time, 6, largest_span=8, work=tmp_path / "w")
    first.base.close()  # a kill: nothing else is tidied
    again = publisher(store, time, largest_span=8, work=tmp_path / "w")
    assert again.open(nudged(states[6], 70), stamp(7)) == Identity(2, 7)
    publish(again, nudged(states[6], 71), 8)
    publish(again, nudged(states[6], 72), 9)
    assert spans_of(store) == [(0, 4), (0, 8), (4, 8)]
    assert_i1(store)
    assert_i5(store, tmp_path)
    again.close()
    other = publisher(store, time, largest_span=8, work=tmp_path / "elsewhere")
    other.open(nudged(states[6], 73), stamp(10))
    for n in range(11, 18):
        publish(other, nudged(states[6], 60 + n), n)
    assert spans_of(store) == [(0, 4), (0, 8), (4, 8), (12, 16)]  # (8, 12] would need the lost folder's pieces
    other.close()


def test_a_span_as_large_as_the_state_is_not_sent() -> None:
    store, time = MemoryStore(), Time()
    writer, rng = publisher(store, time, largest_span=8, anchor_share=1e9), np.random.default_rng(1)
    writer.open({"w": rng.integers(0, 2**16, 4000, dtype=np.uint16)}, stamp(0))
    for n in range(9):
        publish(writer, {"w": rng.integers(0, 2**16, 4000, dtype=np.uint16)}, n)
    assert spans_of(store) == []
    writer.close()


def test_a_failed_upload_behind_costs_no_version(tmp_path: Path) -> None:
    inner, time = MemoryStore(), Time()
    store = FaultStore(inner)
    store.rule = lambda m, k: "fail before" if m == "put_batch" and "/spans/" in k[0] else None
    writer = publisher(store, time, largest_span=4)
    state = small_state()
    writer.open(state, stamp(0))
    for n in range(1, 10):
        state = nudged(state, n)
        publish(writer, state, n)
    assert writer._compactor is not None
    assert writer._compactor.failed == 2
    assert head_of(inner).version == 9
    assert spans_of(inner) == []
    assert_i5(inner, tmp_path)
    writer.close()


def test_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="largest_span is 12"):
        PublisherOptions(largest_span=12)
    with pytest.raises(ConfigError, match="codec 'zip'"):
        PublisherOptions(codec="zip")
    with pytest.raises(ConfigError, match="grace is -1"):
        TermOptions(grace=-1.0)


# --- resuming


@pytest.mark.parametrize("kept", [True, False], ids=["own folder", "empty folder"])
@pytest.mark.parametrize("back", [0, 3])
def test_a_resuming_publisher_follows_itself_and_sends_one_delta(tmp_path: Path, *, kept: bool, back: int) -> None:
    inner, time = MemoryStore(), Time()
    first, states = chain(inner, time, 6, anchor_share=1e9, work=tmp_path / "w")
    first.base.close()
    store = FaultStore(inner)
    again = publisher(store, time, work=tmp_path / ("w" if kept else "new"))
    state = states[6 - back]
    assert again.open(state, stamp(9), takeover=not kept) == Identity(2, 7)
    assert again.history[-1].kind == "delta"
    assert (again.history[-1].changed > 0) == (back > 0)
    puts = [keys for method, keys in store.calls if method == "put_batch"]
    assert not any("model" in key for keys in puts for key in keys)  # no full upload
    fetched = [keys[0] for method, keys in store.calls if method in ("get", "fetch") and "/versions/" in keys[0]]
    assert bool(fetched) != kept
    engine = NumpyEngine()
    follower = Follower(inner, tmp_path / "f", engine)
    follower.poll()
    assert engine.digest(follower._mirror.schema) == state_digest(state)
    assert_i4(inner)
    follower.close()
    again.close()


def test_a_folder_resumes_its_own_term_without_a_takeover_and_no_other(tmp_path: Path) -> None:
    store, time = MemoryStore(), Time()
    first, states = chain(store, time, 2, work=tmp_path / "w")
    first.base.close()
    with pytest.raises(Fenced, match="not closed"):
        publisher(store, time, work=tmp_path / "x").open(states[2], stamp(3))
    assert publisher(store, time, work=tmp_path / "w").open(states[2], stamp(3)) == Identity(2, 3)


def test_an_artifact_channel_is_resumed_by_its_own_folder_alone(tmp_path: Path) -> None:
    store, time = MemoryStore(), Time()

    def opened(folder: str) -> ArtifactPublisher:
        made = ArtifactPublisher(store, "curriculum", clock=time.clock, work=tmp_path / folder)
        made.open()
        return made

    assert opened("a").publish(Curriculum(environment="e"), measured_against=None) == Identity(1, 0)
    with pytest.raises(Fenced):
        opened("b")
    assert opened("a").publish(Curriculum(environment="e"), measured_against=None) == Identity(2, 1)


@pytest.mark.parametrize("where", ["diff", "advance"])
def test_a_full_disk_ends_the_publisher_by_name_and_a_restart_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "w"))

    store, time = MemoryStore(), Time()
    writer, states = chain(store, time, 2, work=tmp_path / "w")
    monkeypatch.setattr(Base, where, full)
    with pytest.raises(StoreUnavailable, match=r"disk of .*w failed \(No space left on device\)"):
        publish(writer, nudged(states[2], 3), 3)
    monkeypatch.undo()
    writer.close()
    committed = 3 if where == "advance" else 2
    assert head_of(store).version == committed
    again = publisher(store, time, work=tmp_path / "w")
    assert again.open(nudged(states[2], 4), stamp(4)) == Identity(2, committed + 1)
    assert again.history[-1].kind == "delta"
    assert_i1(store)
    assert_i4(store)
    assert_i5(store, tmp_path)
    again.close()


def test_a_base_that_cannot_be_reached_becomes_an_anchor(tmp_path: Path) -> None:
    inner, time = MemoryStore(), Time()
    first, states = chain(inner, time, 3, work=tmp_path / "w")
    first.close()
    inner.delete([i.key for i in inner.list("weights/anchors/")])
    again = publisher(inner, time, work=tmp_path / "x")
    assert again.open(states[3], stamp(4)) == Identity(2, 4)
    assert again.history[-1].kind == "anchor"
    follower = Follower(inner, tmp_path / "f", None)
    follower.poll()
    assert follower._mirror.identity == Identity(2, 4)
    follower.close()
    again.close()


def test_a_stale_head_is_not_resumed_over_what_the_folder_knows_to_be_committed(tmp_path: Path) -> None:
    from support.faults import copy_of

    inner, time = MemoryStore(), Time()
    first, states = chain(inner, time, 2, work=tmp_path / "w")
    past = copy_of(inner)
    publish(first, nudged(states[2], 9), 3)
    first.base.close()
    store = FaultStore(inner)
    store.inner = past
    with pytest.raises(StoreUnavailable, match="stale look"):
        publisher(store, time, work=tmp_path / "w", deadline=3.0).open(states[2], stamp(4))
    store.inner = inner
    assert publisher(store, time, work=tmp_path / "w").open(states[2], stamp(4)) == Identity(2, 4)


def test_a_publisher_that_could_not_open_leaves_its_folder_free(tmp_path: Path) -> None:
    store, time = MemoryStore(), Time()
    first, states = chain(store, time, 1)
    rival = publisher(store, time, work=tmp_path / "w")
    with pytest.raises(Fenced):
        rival.open(states[1], stamp(2))
    first.close()
    assert publisher(store, time, work=tmp_path / "w").open(states[1], stamp(2)) == Identity(2, 2)


def test_large_states_are_sharded_with_an_index_and_followed(tmp_path: Path) -> None:
    store = MemoryStore()
    options = PublisherOptions(shard_bytes=1000, largest_span=0, term=TermOptions(settle=0.0))
    writer = Publisher(store, options=options, side_files={"config.json": b"{}"}, executor=Inline)
    state = small_state()
    writer.open(state, stamp(0))
    names = [i.key.rsplit("/")[-1] for i in store.list("weights/anchors/")]
    assert "model.safetensors.index.json" in names
    assert sum(n.endswith(".safetensors") for n in names) > 1
    engine = NumpyEngine()
    follower = Follower(store, tmp_path / "f", engine)
    follower.poll()
    state = nudged(state, 1)
    publish(writer, state)
    follower.poll()
    assert engine.digest(follower._mirror.schema) == state_digest(state)
    follower.close()
    writer.close()


# --- pins and collecting


class Collected:
    """A channel with an anchor of every version or so, a store whose clock is the test's, and its collector."""

    def __init__(self, grace: float = 100.0) -> None:
        self.time = Time()
        self.store = MemoryStore(now=self.time.now)
        self.writer, self.states = chain(
            self.store, self.time, 6, anchor_share=0.0, keep_anchors=2, collect_every=0, grace=grace, catchup_every=2
        )
        assert self.writer._term is not None
        self.term = self.writer._term
        self.collector = Collector(self.term, emitter("test", "none"))

    def publish(self) -> None:
        n = max(self.states) + 1
        self.states[n] = nudged(self.states[n - 1], n)
        publish(self.writer, self.states[n], n)

    def head(self) -> Head:
        return head_of(self.store)


@pytest.fixture
def collected() -> Iterator[Collected]:
    made = Collected()
    yield made
    made.writer.close()


def test_collecting_raises_the_floor_announces_waits_and_sweeps(collected: Collected, tmp_path: Path) -> None:
    c = collected
    assert c.head().floor == 0
    before = set(manifests(c.store))
    assert c.collector.step() == "planned"  # old catchup lists; nothing that a head named
    assert set(manifests(c.store)) == before
    c.publish()
    assert c.head().floor > 0
    assert c.collector.step() == "waiting"
    c.time.seconds += 101
    assert c.collector.step() == "waiting"  # by the store's clock, read off one's own last write
    c.publish()
    assert c.collector.step() == "swept"
    assert c.collector.step() == "planned"
    c.time.seconds += 101
    c.publish()
    assert c.collector.step() == "swept"
    gone = before - set(manifests(c.store))
    assert gone
    floor = c.head().floor
    assert all(int(key.split("/")[2][:10]) <= floor for key in gone)
    assert [i.key for i in c.store.list("weights/plans/")] == []
    assert_i1(c.store)
    assert_i4(c.store)
    assert_i5(c.store, tmp_path)


def test_manifests_go_newest_first_and_before_the_objects(collected: Collected) -> None:
    head = collected.head().model_copy(update={"catchup": None})
    keys = sweepable(collected.store.list("weights/"), head, (), (), 0.0)
    kinds = [key.endswith("manifest.json") for key in keys]
    assert kinds == sorted(kinds, reverse=True)
    versions = [int(k.split("/")[2][:10]) for k in keys if k.endswith("manifest.json")]
    assert versions == sorted(versions, reverse=True)


def test_a_pin_holds_the_floor_until_it_expires(collected: Collected) -> None:
    c = collected
    pin = ReaderPin(c.store, "weights", 50.0, "reader", c.time.clock, emitter("test", "none"))
    assert pin.due(c.head(), Identity(1, 1))
    assert pin.write(c.head(), Identity(1, 1))
    assert not pin.due(c.head(), Identity(1, 1))
    c.collector.step()
    c.publish()
    assert c.head().floor == 1  # the pin's version, far below the second newest anchor
    c.time.seconds += 20
    assert pin.due(c.head(), Identity(1, 1))  # a third of its time is over
    c.time.seconds += 40
    c.publish()
    c.collector.step()
    c.publish()
    assert c.head().floor > 1
    (pinned,), damaged = read_pins(c.store, "weights", c.head().channel_uid)
    assert pinned.expired(c.term.now)
    assert not damaged
    pin.release()
    assert read_pins(c.store, "weights", c.head().channel_uid) == ([], [])


def test_a_pin_between_plan_and_delete_is_spared(collected: Collected) -> None:
    c = collected
    c.collector.step()
    c.publish()
    c.time.seconds += 101
    c.publish()
    c.collector.step()
    assert c.collector.step() == "planned"
    reached = {k for k in manifests(c.store) if int(k.split("/")[2][:10]) > 2}
    assert any(int(k.split("/")[2][:10]) < c.head().floor for k in reached)
    ReaderPin(c.store, "weights", 1000.0, "", c.time.clock, emitter("test", "none")).write(
        c.head().model_copy(update={"floor": 0}), Identity(1, 2)
    )
    c.time.seconds += 101
    c.publish()
    assert c.collector.step() == "swept"
    assert reached <= set(manifests(c.store))
    assert not any(int(k.split("/")[2][:10]) < 2 for k in manifests(c.store))


def test_a_follower_pins_what_it_is_behind_and_lets_go(collected: Collected, tmp_path: Path) -> None:
    c = collected
    follower = Follower(c.store, tmp_path / "f", None, pin_ttl=1000.0, reader="gpu-1", clock=c.time.clock)
    follower.poll()
    (pinned,), _ = read_pins(c.store, "weights", c.head().channel_uid)
    assert (pinned.pin.reader, pinned.pin.version) == ("gpu-1", 0)  # the floor: it held nothing
    c.publish()
    c.time.seconds += 61
    follower.poll()  # writes the pin for where it is, then moves on
    (pinned,), _ = read_pins(c.store, "weights", c.head().channel_uid)
    assert pinned.pin.version == 6
    follower.close()
    assert read_pins(c.store, "weights", c.head().channel_uid) == ([], [])


def test_a_reader_that_may_not_write_follows_without_a_pin(tmp_path: Path) -> None:
    root = tmp_path / "b"
    writer = publisher(DirectoryStore(root, create=True, writable=True), Time())
    writer.open(small_state(), stamp(0))

    class ReadOnly(DirectoryStore):
        def put_batch(self, objects: object) -> None:
            raise ConfigError(f"no permission to write {objects!r:.0}")

    said: list[str] = []
    follower = Follower(ReadOnly(root), tmp_path / "f", None, pin_ttl=10.0, emit=lambda event, **_: said.append(event))
    assert follower.poll()
    follower.poll()
    assert said.count("unpinned") == 1
    follower.close()
    writer.close()


def test_a_pin_that_cannot_be_read_puts_everything_off(collected: Collected) -> None:
    c = collected
    key = f"weights/pins/{'c' * 16}.json"
    c.store.put_batch({key: b"{}"})
    assert c.collector.step() == "unsure"
    c.publish()
    assert c.head().floor == 0
    c.store.delete([key])
    assert c.collector.step() == "planned"
    c.publish()
    c.time.seconds += 101
    c.publish()
    c.store.put_batch({key: b"{}"})
    assert c.collector.step() == "unsure"
    c.time.seconds += 31 * 86_400
    c.publish()
    assert c.collector.step() == "swept"  # no pin lives that long


def test_an_announced_plan_outlives_its_writer(collected: Collected) -> None:
    c = collected
    c.collector.step()
    c.publish()
    c.time.seconds += 101
    c.publish()
    c.collector.step()
    assert c.collector.step() == "planned"
    c.writer.close()
    c.time.seconds += 101
    term = Term.claim(c.store, "weights", options=TermOptions(grace=100.0), clock=c.time.clock)
    after = Collector(term, emitter("test", "none"))
    before = len(manifests(c.store))
    assert after.step() == "swept"
    assert len(manifests(c.store)) < before
    assert_i1(c.store)


def test_what_is_newer_than_the_head_or_of_a_higher_epoch_is_never_swept(collected: Collected) -> None:
    c = collected
    for version, epoch in ((7, 1), (3, 2), (8, 2)):
        c.store.put_batch({f"weights/versions/{version:010d}-{epoch:06d}-{'a' * 16}/manifest.json": b"{}"})
    c.store.put_batch({"weights/versions/notes.txt": b"", "other/versions/0000000001-000001-" + "a" * 16 + "/m": b""})
    orphan = f"weights/versions/{3:010d}-{1:06d}-{'b' * 16}/delta.safetensors"
    c.store.put_batch({orphan: b""})
    keys = sweepable(c.store.list(""), c.head(), c.term.refs, (), 0.0)
    assert orphan in keys
    assert not any("a" * 16 in key or "notes" in key for key in keys)


def test_a_killed_reader_leaves_a_pin_that_expires(collected: Collected, tmp_path: Path) -> None:
    c = collected
    follower = Follower(c.store, tmp_path / "f", None, pin_ttl=30.0, clock=c.time.clock)
    follower.poll()
    abandon(follower)
    c.collector.step()
    c.publish()
    assert c.head().floor == 0
    c.time.seconds += 31
    c.publish()
    c.collector.step()
    c.publish()
    assert c.head().floor > 0


# --- a run that is deleted and made again


def test_a_stale_look_at_a_deleted_run_takes_no_reader_back(tmp_path: Path) -> None:
    time, old, new = Time(), MemoryStore(), MemoryStore()
    chain(old, time, 2)[0].close()
    writer, states = chain(new, time, 1)
    view, engine = FaultStore(old), NumpyEngine()
    follower = Follower(view, tmp_path / "f", engine)
    assert follower.poll()
    view.inner = new
    assert follower.poll()
    assert engine.identity == Identity(1, 1)
    publish(writer, nudged(states[1], 2), 2)
    follower.poll()
    view.inner = old  # the deleted run once more
    assert not follower.poll()
    assert "was left for" in follower.status().last_error
    view.inner = new
    assert not follower.poll()
    assert (engine.identity, follower.status().last_error) == (Identity(1, 2), "")
    follower.close()
    again = Follower(old, tmp_path / "f", NumpyEngine())  # also after a restart
    again.poll()
    assert again.status().mirror == "2@1"
    assert again.status().channel_uid == head_of(new).channel_uid
    again.close()
    writer.close()


# --- what may fail behind, beside and around a publisher


def test_spans_and_anchors_go_up_while_a_commit_is_in_flight() -> None:
    store, time = MemoryStore(), Time()
    writer, _ = chain(store, time, 1)
    term = writer._term
    assert term is not None
    with term._step():  # a commit is under way in the publishing thread
        term.put_behind({"weights/spans/x": b"1"}, "a span")
    assert store.get("weights/spans/x", limit=1) == b"1"
    with pytest.raises(StoreUnavailable), term._step():
        raise StoreUnavailable("its outcome is unknown")
    with pytest.raises(StopError):
        term.put_behind({"weights/spans/y": b"1"}, "a span")


@pytest.mark.parametrize("broken", ["write_patch", "copy"])
def test_a_full_disk_behind_costs_spans_and_anchors_not_versions(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "scratch")

    if broken == "copy":
        monkeypatch.setattr(Base, "copy", full)
    else:
        monkeypatch.setattr("sync.compact.write_patch", full)
    store = MemoryStore()
    writer, _ = chain(store, Time(), 9, largest_span=8, anchor_share=0.0 if broken == "copy" else 1e9)
    assert head_of(store).version == 9
    assert (spans_of(store) == []) == (broken == "write_patch")
    assert sum(r.kind == "anchor" for r in refs_of(store)) == 1
    monkeypatch.undo()
    writer.close()
    assert_i5(store, tmp_path)


def test_a_damaged_patch_on_the_disk_becomes_no_span(tmp_path: Path) -> None:
    store, time = MemoryStore(), Time()
    first, states = chain(store, time, 3, largest_span=4, work=tmp_path / "w")
    first.base.close()
    (path,) = tmp_path.glob("w/patches/0-2.patch")
    data = bytearray(path.read_bytes())
    data[-len(data) // 2] ^= 1
    path.write_bytes(data)
    again = publisher(store, time, largest_span=4, work=tmp_path / "w")
    again.open(nudged(states[3], 4), stamp(4))
    publish(again, nudged(states[3], 5), 5)
    assert spans_of(store) == []
    assert_i5(store, tmp_path)
    again.close()


def test_a_kill_right_after_a_claim_locks_nobody_out(tmp_path: Path) -> None:
    inner, time = MemoryStore(), Time()
    first, states = chain(inner, time, 1, work=tmp_path / "w")
    first.base.close()
    for stop in ("stop before", "stop after"):
        store = FaultStore(inner)
        store.rule = lambda m, k, stop=stop: stop if m == "put_batch" and k[0].startswith("heads/") else None  # type: ignore[misc]
        with pytest.raises(Stopped):
            publisher(store, time, work=tmp_path / "w").open(states[1], stamp(2))
    again = publisher(inner, time, work=tmp_path / "w")
    assert again.open(states[1], stamp(2)).version == 2
    again.close()


def test_a_span_that_comes_after_the_floor_rose_is_not_named() -> None:
    store, time = MemoryStore(), Time()
    writer, states = chain(store, time, 6, largest_span=4, catchup_every=2)
    term = writer._term
    assert term is not None
    key = next(r.key for r in refs_of(store) if r.kind == "span")
    manifest = manifests(store)[key]
    term.wanted_floor = 3
    publish(writer, nudged(states[6], 7), 7)
    assert head_of(store).floor == 3
    term.add(manifest, key.removesuffix("manifest.json"))  # (0, 4]: its upload took that long
    publish(writer, nudged(states[6], 8), 8)
    writer.close()
    assert all((r.version if r.from_version is None else r.from_version) >= 3 for r in refs_of(store))
    assert term.pending == set()


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "x.safetensors.index.json", "a b.json", "../x"])
def test_a_side_file_that_an_anchor_cannot_hold_is_refused_before_the_claim(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot lie beside"):
        Publisher(MemoryStore(), side_files={name: b""})


def test_pins_that_may_not_be_read_put_collecting_off_and_end_no_training(tmp_path: Path) -> None:
    class Shut(MemoryStore):
        def get(self, key: str, *, limit: int) -> bytes:
            if "/pins/" in key:
                raise ConfigError("no permission to read")
            return super().get(key, limit=limit)

    time = Time()
    store = Shut(now=time.now)
    writer, states = chain(store, time, 2, anchor_share=0.0, keep_anchors=1, collect_every=1, grace=0.0)
    ReaderPin(store, "weights", 60.0, "", time.clock, emitter("test", "none")).write(head_of(store), Identity(1, 1))
    before = set(manifests(store))
    for n in range(3, 8):
        publish(writer, nudged(states[2], n), n)
    assert before <= set(manifests(store))
    writer.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_listed_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "b", create=True)
    store.put_batch({"weights/pins/x.json": b"{}"})
    (tmp_path / "b" / "weights" / "pins").chmod(0)
    with pytest.raises(ConfigError, match="no permission to list"):
        store.list("weights/")
    (tmp_path / "b" / "weights" / "pins").chmod(0o700)


def test_a_write_that_fails_leaves_nothing_in_the_bucket_folder(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "b", create=True)
    with pytest.raises(StoreUnavailable):
        store.put_batch({"w/a": tmp_path / "missing"})
    assert [p for p in (tmp_path / "b").rglob("*") if p.is_file()] == []


def test_compaction_that_is_behind_sheds_patches_and_holds_up_no_version(tmp_path: Path) -> None:
    store, gate = FaultStore(MemoryStore()), threading.Event()

    def hold(method: str, keys: tuple[str, ...]) -> None:
        if method == "put_batch" and "/spans/" in keys[0]:
            assert gate.wait(60)

    store.rule = hold
    writer = publisher(store, largest_span=8, threads=True, anchor_share=1e9, work=tmp_path / "w")
    state = small_state()
    writer.open(state, stamp(0))
    for n in range(1, 120):
        state = nudged(state, n)
        writer.wait()
        assert writer.offer(state, stamp(n))
    writer.wait()
    assert head_of(store.inner).version == 119
    waiting = len([*tmp_path.glob("w/*.patch"), *tmp_path.glob("w/patches/*.patch")])
    assert waiting <= MOST_BEHIND + 8
    gate.set()
    writer.wait_behind()
    writer.close()
    assert_i1(store.inner)
    assert_i5(store.inner, tmp_path)


# --- odd clocks, odd heads, odd stamps


def test_a_store_whose_clock_jumps_ahead_deletes_nothing_that_is_pinned(collected: Collected) -> None:
    c = collected
    pin = ReaderPin(c.store, "weights", 50.0, "", c.time.clock, emitter("test", "none"))
    pin.write(c.head(), Identity(1, 1))
    c.collector.step()
    c.publish()
    before = set(manifests(c.store))
    jumped = c.store._now
    c.store._now = lambda: jumped() + 10_000_000.0
    c.publish()  # one write with a clock that is wrong
    c.collector.step()
    c.store._now = jumped
    for _ in range(3):
        c.publish()
        c.collector.step()
    assert before <= set(manifests(c.store))


def test_an_own_head_that_a_rival_kept_from_going_on_is_no_stale_look(tmp_path: Path) -> None:
    store, time = MemoryStore(), Time()
    first, states = chain(store, time, 2, work=tmp_path / "w")
    rival_sees = copy_of(store)
    publish(first, nudged(states[2], 3), 3)  # 3@1 is committed and in the base
    first.base.close()
    stale = FaultStore(store)
    stale.inner = rival_sees
    old = head_of(rival_sees)
    term = Term(store, old.model_copy(update={"epoch": 2, "writer": "f" * 16}), (), TermOptions(), time.clock)
    term.refresh()  # a rival that saw 2@1 as the head claims epoch 2
    killed = FaultStore(store)
    killed.rule = lambda m, _k: "stop before" if m == "list" and len(killed.calls) > 3 else None
    with pytest.raises(Stopped):
        publisher(killed, time, work=tmp_path / "w").open(states[2], stamp(4), takeover=True)
    again = publisher(store, time, work=tmp_path / "w")
    assert again.open(states[2], stamp(4), takeover=True).version == 3
    again.close()
    assert_i1(store)
    assert_i4(store)
    assert_i5(store, tmp_path)


def test_a_head_that_contradicts_itself_is_refused() -> None:
    store = MemoryStore()
    writer, _ = chain(store, Time(), 2)
    good = head_of(store)
    writer.close()
    wrong: list[dict[str, object]] = [
        {"version": 7}, {"version": None}, {"manifest": None}, {"floor": 3}, {"recent": []}, {"epoch": 0},
        {"channel_uid": "a" * 16},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(CorruptObject, match="key: not a Head"):
            parse(Head, seal(good.model_dump(mode="json") | change), "key")


def test_a_stamp_that_no_manifest_holds_is_refused_by_name() -> None:
    writer, states = chain(MemoryStore(), Time(), 1)
    with pytest.raises(InvalidRequest, match="cannot be published: step"):
        publish(writer, nudged(states[1], 2), -2)
    writer.close()


def test_a_reader_that_no_pin_can_name_is_refused_at_once(tmp_path: Path) -> None:
    for more in ({"reader": "a;b"}, {"pin_ttl": 0.0}, {"pin_ttl": 1e9}):
        with pytest.raises(ConfigError, match=r"pin|reader"):
            Follower(MemoryStore(), tmp_path / "f", None, **{"pin_ttl": 5.0, **more})  # type: ignore[arg-type]
        Follower(MemoryStore(), tmp_path / "f", None).close()  # its folder is free


def test_very_many_small_deltas_make_an_anchor_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.publisher.MOST_DELTAS", 5)
    store = MemoryStore()
    chain(store, Time(), 14, anchor_share=1e9)[0].close()
    assert sorted(r.version for r in refs_of(store) if r.kind == "anchor") == [0, 5, 10]


def test_a_base_is_free_after_close_although_a_forked_child_lives(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "m")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        mirror.close()
        again = Mirror(tmp_path / "m")
        assert again.held is None
        again.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_bucket_folder_opens_while_others_write(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "b", create=True)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            store.put_batch({"w/a": b"1", "w/b": b"2"})

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(300):
        DirectoryStore(tmp_path / "b", writable=True)
    stop.set()
    for writer in writers:
        writer.join()
    assert {info.key for info in store.list("")} == {"w/a", "w/b"}
