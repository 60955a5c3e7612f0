"""A whole channel in a few lines: time that passes when somebody sleeps, publishers, followers, and the promises."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sync import Follower, Identity, Publisher, PublisherOptions, Stamp, state_digest
from sync.canonical import sha256_hex
from sync.clock import Clock
from sync.heads import newest, read_catchup, read_head
from sync.schema.wire import Catchup, Head, Manifest, Ref, parse
from sync.stores import Store
from sync.term import TermOptions

from .states import NumpyEngine, State

LIMIT = 1 << 30


class Time:
    """Seconds that pass only when somebody sleeps; `on_sleep` runs in every sleep. Writer ids count up."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0
        self.on_sleep: Callable[[], None] = lambda: None
        self._ids = itertools.count(1)
        self.clock = Clock(self.now, self.now, self.sleep, lambda n: f"{next(self._ids):0{2 * n}x}")

    def now(self) -> float:
        """The present second."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Pass time."""
        self.seconds += seconds
        self.on_sleep()


class Inline:
    """A worker that runs each job where it is submitted. What is no Exception, a kill, ends the caller at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, fn: Callable[..., None], /, *args: Any) -> Future[None]:
        """Run now; the future is done."""
        done: Future[None] = Future()
        try:
            fn(*args)
            done.set_result(None)
        except Exception as error:  # noqa: BLE001 - what a job raises belongs to its future
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True) -> None:
        """Nothing runs."""


def publisher(
    store: Store, time: Time | None = None, *, codec: str = "fast", anchor_share: float = 4.0, deadline: float = 30.0,
    catchup_every: int = 4, keep_anchors: int = 2, largest_span: int = 0, collect_every: int = 0,
    grace: float = 3600.0, work: Path | None = None, threads: bool = False,
) -> Publisher:  # fmt: skip
    """A publisher with short habits; without spans, collecting and threads of its own unless asked for."""
    term = TermOptions(
        settle=1.0, deadline=deadline, catchup_every=catchup_every, keep_anchors=keep_anchors,
        collect_every=collect_every, grace=grace,
    )  # fmt: skip
    options = PublisherOptions(codec=codec, anchor_share=anchor_share, largest_span=largest_span, term=term)
    side = {"config.json": b'{"model_type": "test"}'}
    more: dict[str, Any] = {} if threads else {"executor": Inline}
    return Publisher(store, side_files=side, options=options, clock=(time or Time()).clock, work=work, **more)


def stamp(n: int) -> Stamp:
    """A stamp of step `n`."""
    return Stamp(step=n, sync=n)


def publish(writer: Publisher, state: State, n: int = 1) -> Identity:
    """Offer a state and wait for its commit, and for what is built behind it."""
    assert writer.offer(state, stamp(n))
    writer.wait_behind()
    assert writer.identity is not None
    return writer.identity


def abandon(follower: Follower) -> None:
    """End a follower as a kill does: nothing is flushed, the operating system frees its lock."""
    if (lock := follower._mirror._lock) is not None:
        os.close(lock)
        follower._mirror._lock = None


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def manifests(store: Store) -> dict[str, Manifest]:
    """Every manifest in the store, by key."""
    keys = [i.key for i in store.list("") if i.key.endswith("/manifest.json")]
    return {key: parse(Manifest, store.get(key, limit=LIMIT), key) for key in keys}


def declared(store: Store) -> set[tuple[str, Identity, str]]:
    """(channel uid, identity, state digest) of every manifest."""
    return {(m.channel_uid, m.identity, m.state_digest) for m in manifests(store).values()}


def head_of(store: Store, channel: str = "weights") -> Head:
    """The newest head of a channel."""
    ((key, _),) = newest(store.list("heads/"))[channel]
    return read_head(store, key)


def refs_of(store: Store, channel: str = "weights") -> tuple[Ref, ...]:
    """Everything that the newest head and its catchup list name."""
    head = head_of(store, channel)
    return (*read_catchup(store, head), *head.recent)


def assert_i1(store: Store) -> None:
    """I1: the newest head of every channel only names objects that exist and match their hash."""
    for key, _ in (found for heads in newest(store.list("heads/")).values() for found in heads):
        head = read_head(store, key)
        refs = list(head.recent)
        if head.catchup is not None:
            data = store.get(head.catchup.key, limit=LIMIT)
            assert (len(data), sha256_hex(data)) == (head.catchup.size, head.catchup.sha256)
            refs += parse(Catchup, data, head.catchup.key).refs
        if head.manifest is not None:
            assert head.manifest.sha256() in {r.sha256 for r in refs}
        for ref in refs:
            data = store.get(ref.key, limit=LIMIT)
            assert (len(data), sha256_hex(data)) == (ref.size, ref.sha256)
            for entry in parse(Manifest, data, ref.key).objects:
                data = store.get(ref.key.removesuffix("manifest.json") + entry.name, limit=LIMIT)
                assert (len(data), sha256_hex(data)) == (entry.size, entry.sha256)


def assert_i2(store: Store, follower: Follower, engine: NumpyEngine | None = None) -> None:
    """I2: what a follower holds, and what its engine serves, is bit for bit what a manifest declares."""
    status, mirror, known = follower.status(), follower._mirror, declared(store)
    if mirror.identity is not None and mirror.uid is not None:
        assert mirror.audit()
        assert (mirror.uid, mirror.identity, mirror.sums.text()) in known
        assert status.mirror == str(mirror.identity)
        assert status.state_digest == mirror.sums.text()
        if engine is not None and not engine.paused and engine.identity is not None and engine.state:
            assert (mirror.uid, engine.identity, state_digest(engine.state, mirror.schema)) in known


def assert_i4(store: Store, channel: str = "weights") -> None:
    """I4: one chain is extended per epoch: from the head down to the floor versions are contiguous, parents link up."""
    found = {m.sha256(): m for k, m in manifests(store).items() if m.channel == channel}
    at, floor = head_of(store, channel).manifest, head_of(store, channel).floor
    while at is not None and at.parent is not None and at.version > floor + 1:
        parent = found[at.parent.sha256]
        assert parent.version == at.version - 1
        assert parent.epoch <= at.epoch
        assert at.base_digest in (None, parent.state_digest)
        at = parent


def assert_i5(store: Store, folder: Path) -> None:
    """I5: replay from any live anchor gives the declared digest at every version up to the next break of the chain."""
    refs, head = refs_of(store), head_of(store)
    deltas = {r.version: r for r in refs if r.kind == "delta"}
    anchors = [r for r in refs if r.kind == "anchor"]
    reached = set()
    for n, anchor in enumerate(anchors):
        follower, ref = Follower(store, folder / f"replay-{n}", None), anchor
        follower._replica.step(anchor, head)
        while (after := deltas.get(ref.version + 1)) is not None and after.base_digest == ref.state_digest:
            follower._replica.step(after, head)
            ref = after
            assert follower._mirror.sums.text() == ref.state_digest
        assert follower._mirror.audit()
        reached.add((ref.identity, follower._mirror.sums.text()))
        follower.close()
    assert head.manifest is not None
    assert (head.manifest.identity, head.manifest.state_digest) in reached
