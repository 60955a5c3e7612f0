"""Publish weights: differences taken at step boundaries, uploaded behind the training, base advanced after commit.

    idle ──offer(state)──▶ diff on the caller's thread ──▶ in flight: encode, upload, commit head, advance base ──▶ idle
                            │ (in flight: no difference is taken; the next offer merges what was skipped)

The base is always the last *committed* version. It lies in a mirror, memory-mapped, so a publisher that starts again
follows its own channel to the head and goes on with one delta. Anchors and spans go up behind (`sync/compact.py`).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from . import layout
from .base import Base, Elsewhere
from .clock import REAL, Clock
from .codec import CODECS
from .compact import Committed, Compactor
from .errors import ConfigError, InvalidRequest, RejectError, ResyncError, SchemaChanged, StoreUnavailable
from .events import Emit, emitter
from .own_terms import OwnTerms
from .patchfile import PatchFile
from .safetensors_io import SHARD_BYTES
from .schema.base import Identity
from .schema.wire import Harness, Manifest, Ref
from .stores.base import Content, Store
from .tensors import Schema, State, schema_digest, state_bytes
from .term import Term, TermOptions

T = TypeVar("T")
MOST_DELTAS = 4096
"""Deltas after which an anchor is due however small they are: catchup lists name them all."""
FEW_BEHIND, MOST_BEHIND = 8, 64
"""Versions that may wait for compaction: with more than a few it only composes, beyond the most it skips some."""


class Stamp(NamedTuple):
    """What the trainer says of a state: its optimizer step, its sync count, the harness versions behind it."""

    step: int
    sync: int
    harness: Harness = {}


class Published(NamedTuple):
    """One committed version: identity, stamp, kind, payload bytes, bytes of a full copy, changed and all elements,
    seconds on the caller's thread (diff) and behind it (encode, upload, commit)."""

    identity: Identity
    stamp: Stamp
    kind: str
    payload: int
    full: int
    changed: int
    elements: int
    diff_seconds: float
    upload_seconds: float


@dataclass(frozen=True)
class PublisherOptions:
    """codec: raw, fast or tight. anchor_share: a new anchor when deltas outweigh this many full copies. largest_span:
    versions in the longest span, a power of two (0: no spans). shard_bytes: most bytes of one file of an anchor."""

    codec: str = "fast"
    anchor_share: float = 4.0
    largest_span: int = 1024
    shard_bytes: int = SHARD_BYTES
    term: TermOptions = field(default_factory=TermOptions)

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError(f"codec {self.codec!r} is unknown; use one of {', '.join(CODECS)}")
        if self.largest_span < 0 or self.largest_span & (self.largest_span - 1):
            raise ConfigError(f"largest_span is {self.largest_span}; use a power of two, or 0 for no spans")


class Worker(Protocol):
    """One thread of its own for jobs in order; the future needs `done`, `result` and `exception`."""

    def submit(self, fn: Callable[..., None], /, *args: Any) -> Future[None]:
        """Run `fn(*args)` after the jobs before it."""
        ...

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - the signature of concurrent.futures
        """Take no more jobs, and wait for those there are."""
        ...


def _thread(name: str) -> Worker:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


class Publisher:
    """The one writer of a weights channel. Call it from one thread; work in flight has threads of its own.

    side_files: config, tokenizer and the like (name → bytes), stored with every anchor so that it loads as an
    ordinary checkpoint. work: a folder for the base and for patches, kept between runs so that a restart needs no
    download and claims its own channel at once; None: a temporary one. on_sent is called on the publishing thread when
    a head was sent (a hint for followers, one listing earlier), on_commit when it was confirmed. An error of work in
    flight is raised by the next call, and ends the publisher.
    """

    def __init__(
        self, store: Store, *, channel: str = "weights", side_files: Mapping[str, bytes] | None = None,
        options: PublisherOptions | None = None, clock: Clock = REAL, emit: Emit | None = None,
        on_commit: Callable[[Published], None] | None = None, on_sent: Callable[[], None] | None = None,
        work: Path | None = None,
        executor: Callable[[str], Worker] = _thread,
    ) -> None:  # fmt: skip
        self._store, self._channel, self._side_files = store, channel, _checked(side_files or {})
        self._options, self._clock = options or PublisherOptions(), clock
        self._emit, self._on_commit = emit or emitter("publisher", "none"), on_commit or (lambda _: None)
        self._on_sent = on_sent or (lambda: None)
        self._executor, self._given_work = executor, work
        self._work: Path | None = None
        self._publishing: Worker | None = None
        self._compacting: Worker | None = None
        self._job: Future[None] | None = None
        self._behind: Future[None] | None = None
        self._queued, self._count = 0, threading.Lock()
        self._closing = False
        self._term: Term | None = None
        self._base: Base | None = None
        self._compactor: Compactor | None = None
        self._since_anchor = self._deltas = self._copies = 0
        self.history: list[Published] = []

    @property
    def identity(self) -> Identity | None:
        """The last committed version."""
        return self.history[-1].identity if self.history else None

    @property
    def busy(self) -> bool:
        """True while the outcome of a publish is not known."""
        return self._job is not None and not self._job.done()

    @property
    def base(self) -> Base:
        """The state of the last committed version, as the next difference will be taken against it."""
        return _opened(self._base)

    def open(self, state: State, stamp: Stamp, *, takeover: bool = False) -> Identity:
        """Claim the channel and publish `state` (name → array; uint16 is BF16); waits for the commit.

        A new channel begins with an anchor. On a channel that has versions this publisher first follows it to its head,
        and `state`, older or newer, goes up as one delta from there; an anchor only when the head cannot be reached or
        has other tensors. Raises Fenced when another writer owns the channel.
        """
        if self._term is not None:
            raise InvalidRequest("this publisher is open already")
        try:
            self._claim(takeover=takeover)
            self._resume()
        except BaseException:
            self.close()
            raise
        self._offer(state, stamp)
        self.wait()
        return self.history[-1].identity

    def _claim(self, *, takeover: bool) -> None:
        work = self._work = self._given_work or Path(tempfile.mkdtemp(prefix="deltawire-publisher-"))
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{work}: cannot hold the publisher's base ({error.strerror}); choose another") from None
        self._base = Base(work, self._side_files, self._options.shard_bytes, self._emit)
        own = OwnTerms(work, self._channel)
        term = self._term = Term.claim(
            self._store, self._channel, takeover=takeover, options=self._options.term, clock=self._clock,
            own=own, at_least=self._base.identity,
        )  # fmt: skip
        self._publishing = self._executor(f"publish-{self._channel}")
        self._compacting = self._executor(f"compact-{self._channel}")
        self._compactor = Compactor(term, work / "patches", self._emit, self._options.largest_span)

    def _resume(self) -> None:
        """Bring the base to the head; without one, or without a way to it, the next version is an anchor."""
        base, head = self.base, _opened(self._term).head
        if head.manifest is None:
            return base.forget()
        try:
            base.follow(self._store, head)
        except (ResyncError, RejectError) as error:
            self._emit("base_lost", head=head.identity, why=str(error))
            return base.forget()
        _opened(self._compactor).adopt(_opened(self._term).refs)
        after = _after_newest_anchor(_opened(self._term))
        self._since_anchor, self._deltas = sum(r.payload for r in after), len(after)
        self._emit("resumed", version=base.identity)
        return None

    def offer(self, state: State | Elsewhere, stamp: Stamp) -> bool:
        """At a step boundary: take the difference to the base and publish it behind; False while one is in flight.

        `state` is read before this returns and may change afterwards. Raises what the publish before failed with.
        """
        if self.busy:
            return False
        self._settle()
        self._offer(state, stamp)
        return True

    def _offer(self, state: State | Elsewhere, stamp: Stamp) -> None:
        started = self._clock.monotonic()
        with _disk_errors(self._work):
            try:
                patch = self.base.diff(state)
            except SchemaChanged:
                schema = self.base.stage(state if isinstance(state, Mapping) else state.fetch())
                self._submit(self._publish_anchor, schema, stamp, self._clock.monotonic() - started)
                return
        self._submit(self._publish_delta, patch, stamp, self._clock.monotonic() - started)

    def flush(self, state: State, stamp: Stamp) -> Identity:
        """Wait for what is in flight, publish `state` if it differs from the base, and wait for that too."""
        self.wait()
        before = self.history[-1].stamp if self.history else None
        if before != stamp or not self.base.equals(state):
            self.offer(state, stamp)
            self.wait()
        return self.history[-1].identity

    def wait(self) -> None:
        """Wait until nothing is in flight; raises what it failed with. Bounded by the term's deadline."""
        if self._job is not None:
            self._job.exception()
        self._settle()

    def wait_behind(self) -> None:
        """Wait for anchors, spans and collecting too; raises what they failed with."""
        self.wait()
        if self._behind is not None:
            self._behind.result()

    def settled(self, seconds: float) -> bool:
        """Wait at most `seconds` for what is in flight; True when nothing is. Any thread may call it."""
        try:
            if self._job is not None:
                self._job.exception(seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Wait, mark the head closed, end the threads. Safe to call twice and after an error.

        What compaction has under way is finished and named by the last head; what only waits is not sent.
        """
        self._closing = True
        if self._job is not None:
            self._job.exception()
        for worker in (self._publishing, self._compacting):
            if worker is not None:
                worker.shutdown()
        try:
            if self._term is not None and not self._term.over and not self._term.head.closed:
                self._term.close()
        finally:
            if self._base is not None:
                with _disk_errors(self._work):
                    self._base.close()
            if self._work is not None and self._given_work is None:
                shutil.rmtree(self._work, ignore_errors=True)

    def _settle(self) -> None:
        if self._term is None:
            raise InvalidRequest("open the publisher first")
        for job in (self._job, self._behind):
            if job is not None and job.done():
                job.result()

    def _submit(self, work: Callable[..., None], *args: Any) -> None:
        self._job = _opened(self._publishing).submit(self._published, work, *args)

    # --- on the publisher's own thread

    def _published(self, work: Callable[..., None], *args: Any) -> None:
        with _disk_errors(self._work):
            work(*args)

    def _publish_anchor(self, schema: Schema, stamp: Stamp, diff_seconds: float) -> None:
        started, before = self._clock.monotonic(), _opened(self._term).head.manifest
        digest, objects = self.base.staged()
        manifest = self._commit("anchor", objects, stamp, {"state_digest": digest}, schema)
        self.base.install(manifest)
        self._since_anchor = self._deltas = 0
        self._record(manifest, stamp, 0, diff_seconds, started)
        self._compact(Committed(manifest, before, None, None, self.base.schema))

    def _publish_delta(self, patch: PatchFile, stamp: Stamp, diff_seconds: float) -> None:
        started, before = self._clock.monotonic(), _opened(self._term).head.manifest
        assert before is not None
        payloads, digest, change = self.base.encode(patch, self._options.codec)
        objects: dict[str, Content] = dict(zip(layout.delta_names(len(payloads)), payloads, strict=True))
        facts = {"state_digest": digest, "base_digest": before.state_digest, "codec": self._options.codec}
        manifest = self._commit("delta", objects, stamp, facts, self.base.schema)
        self.base.advance(patch, manifest, change)
        self._since_anchor += manifest.payload_bytes
        self._record(manifest, stamp, patch.changes, diff_seconds, started)
        copy = None
        self._deltas += 1
        due = self._since_anchor > self._options.anchor_share * state_bytes(self.base.schema)
        due = due or self._deltas >= MOST_DELTAS
        if due and self._copies == 0:  # one anchor in flight
            copy = self._private_copy()
        self._compact(Committed(manifest, before, patch, copy, self.base.schema))

    def _private_copy(self) -> Path | None:
        """What an anchor is made from; without room for it the anchor waits for a later version."""
        try:
            copy = self.base.copy()
        except OSError as error:
            self._emit("compact_failed", what="a copy for an anchor", error=type(error).__name__, why=str(error))
            return None
        self._since_anchor, self._deltas, self._copies = 0, 0, 1
        return copy

    def _compact(self, done: Committed) -> None:
        if done.patch is not None and self._queued >= MOST_BEHIND:
            done.patch.remove()  # the disk is no endless queue: a break in the spans costs late readers a few deltas
            done = done._replace(patch=None)
        with self._count:
            self._queued += 1
        self._behind = _opened(self._compacting).submit(self._compact_one, done)

    def _compact_one(self, done: Committed) -> None:
        with self._count:
            self._queued -= 1
        try:
            _opened(self._compactor).after(done, more=self._queued > FEW_BEHIND or self._closing)
        finally:
            if done.copy is not None:
                self._copies = 0

    def _commit(
        self, kind: str, objects: Mapping[str, Content], stamp: Stamp, facts: dict[str, Any], schema: Schema
    ) -> Manifest:
        said = {"step": stamp.step, "sync": stamp.sync, "harness": stamp.harness}
        facts = {**facts, **said, "schema_digest": schema_digest(schema)}
        return _opened(self._term).commit(kind, objects, facts, sent=self._on_sent)

    def _record(self, manifest: Manifest, stamp: Stamp, changed: int, diff_seconds: float, started: float) -> None:
        schema = self.base.schema
        done = Published(
            manifest.identity, stamp, manifest.kind, manifest.payload_bytes, state_bytes(schema), changed,
            sum(s.size for s in schema.values()), diff_seconds, self._clock.monotonic() - started,
        )  # fmt: skip
        self.history.append(done)
        self._emit("publish", version=done.identity, kind=done.kind, bytes=done.payload, step=stamp.step)
        self._on_commit(done)


@contextmanager
def _disk_errors(work: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(
            f"the disk of {work} failed ({error.strerror or error}) at {error.filename or 'a write'}; free some space "
            "and start again: what was committed stays"
        ) from error


def _checked(side_files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name in side_files:
        ours = name == layout.MANIFEST or name.endswith((".safetensors", ".safetensors.index.json"))
        if ours or not layout.is_key_part(name):
            raise ConfigError(
                f"{name!r} cannot lie beside an anchor's weights: it is "
                + (
                    "a name that anchors use themselves"
                    if ours
                    else "no name of letters, digits, dot, dash, underscore"
                )
            )
    return dict(side_files)


def _opened(part: T | None) -> T:
    if part is None:
        raise InvalidRequest("open the publisher first")
    return part


def _after_newest_anchor(term: Term) -> list[Ref]:
    newest = max((r.version for r in term.refs if r.kind == "anchor"), default=0)
    return [r for r in {r.key: r for r in term.refs}.values() if r.kind == "delta" and r.version > newest]
