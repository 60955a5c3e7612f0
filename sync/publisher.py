"""Publish weights: differences taken at step boundaries, uploaded behind the training, base advanced after commit.

    idle ──offer(state)──▶ diff on the caller's thread ──▶ in flight: encode, upload, commit head, advance base ──▶ idle
                            │ (in flight: no difference is taken; the next offer merges what was skipped)

The base is always the last *committed* version. When the deltas since the last anchor outweigh `anchor_share` full
copies, a complete checkpoint of the new version is stored as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from . import layout
from .canonical import canonical_json, sha256_hex
from .clock import REAL, Clock
from .codec import CODECS, Patch, diff, encode, patched, scatter
from .digest import Sums, state_sums
from .errors import ConfigError, DeltawireError, InvalidRequest, SchemaChanged
from .events import Emit, emitter
from .safetensors_io import pack_state, parse_header, view
from .schema.artifacts import Artifact
from .schema.base import Identity
from .schema.wire import Harness, Manifest
from .stores.base import Store
from .tensors import State, TensorSpec, bits, require_fit, schema_digest, schema_of, state_bytes
from .term import Term, TermOptions


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
    """codec: raw or fast. anchor_share: a new anchor when deltas outweigh this many full copies."""

    codec: str = "fast"
    anchor_share: float = 4.0
    term: TermOptions = field(default_factory=TermOptions)


class Publisher:
    """The one writer of a weights channel. Call it from one thread; work in flight has a thread of its own.

    side_files: config, tokenizer and the like (name → bytes), stored with every anchor so that it loads as an
    ordinary checkpoint. An error of work in flight is raised by the next call, and ends the publisher.
    """

    def __init__(
        self, store: Store, *, channel: str = "weights", side_files: Mapping[str, bytes] | None = None,
        options: PublisherOptions | None = None, clock: Clock = REAL, emit: Emit | None = None,
        on_commit: Callable[[Published], None] | None = None,
    ) -> None:  # fmt: skip
        self._store, self._channel, self._side_files = store, channel, dict(side_files or {})
        self._options, self._clock = options or PublisherOptions(), clock
        self._emit, self._on_commit = emit or emitter("publisher", "none"), on_commit or (lambda _: None)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{channel}")
        self._job: Future[None] | None = None
        self._term: Term | None = None
        self._base: dict[str, NDArray[Any]] = {}
        self._schema: dict[str, TensorSpec] = {}
        self._since_anchor = 0
        self.history: list[Published] = []

    @property
    def identity(self) -> Identity | None:
        """The last committed version."""
        return self.history[-1].identity if self.history else None

    @property
    def busy(self) -> bool:
        """True while the outcome of a publish is not known."""
        return self._job is not None and not self._job.done()

    def open(self, state: State, stamp: Stamp, *, takeover: bool = False) -> Identity:
        """Claim the channel and publish `state` (name → array; uint16 is BF16) as an anchor; waits for the commit.

        Raises Fenced when another writer owns the channel, ConfigError when the codec is unknown.
        """
        if self._options.codec not in CODECS:
            raise ConfigError(f"codec {self._options.codec!r} is unknown; use one of {', '.join(CODECS)}")
        if self._term is not None:
            raise InvalidRequest("this publisher is open already")
        self._term = Term.claim(
            self._store, self._channel, takeover=takeover, options=self._options.term, clock=self._clock
        )
        self._submit(self._publish_anchor, {n: a.copy() for n, a in state.items()}, stamp, 0.0)
        self.wait()
        return self.history[-1].identity

    def offer(self, state: State, stamp: Stamp) -> bool:
        """At a step boundary: take the difference to the base and publish it behind; False while one is in flight.

        `state` is read before this returns and may change afterwards. Raises what the publish before failed with.
        """
        if self.busy:
            return False
        self._settle()
        started = self._clock.monotonic()
        try:
            require_fit(state, self._schema)
            patch = diff(self._base, state, self._schema)
        except SchemaChanged:
            copy = {n: a.copy() for n, a in state.items()}
            self._submit(self._publish_anchor, copy, stamp, self._clock.monotonic() - started)
            return True
        self._submit(self._publish_delta, patch, stamp, self._clock.monotonic() - started)
        return True

    def flush(self, state: State, stamp: Stamp) -> Identity:
        """Wait for what is in flight, publish `state` if it differs from the base, and wait for that too."""
        self.wait()
        before = self.history[-1].stamp if self.history else None
        if before != stamp or not self._holds(state):
            self.offer(state, stamp)
            self.wait()
        return self.history[-1].identity

    def _holds(self, state: State) -> bool:
        try:
            require_fit(state, self._schema)
        except SchemaChanged:
            return False
        return not diff(self._base, state, self._schema)

    def wait(self) -> None:
        """Wait until nothing is in flight; raises what it failed with. Bounded by the term's deadline."""
        if self._job is not None:
            wait([self._job])
        self._settle()

    def settled(self, seconds: float) -> bool:
        """Wait at most `seconds` for what is in flight; True when nothing is. Any thread may call it."""
        job = self._job
        return job is None or not wait([job], seconds).not_done

    def close(self) -> None:
        """Wait, mark the head closed, end the thread. Safe to call twice and after an error."""
        if self._job is not None:
            wait([self._job])
        failed = self._job is not None and self._job.exception() is not None
        self._pool.shutdown()
        if self._term is not None and not failed and not self._term.head.closed:
            self._term.close()

    def _settle(self) -> None:
        if self._term is None:
            raise InvalidRequest("open the publisher first")
        if self._job is not None and self._job.done():
            self._job.result()

    def _submit(self, work: Callable[..., None], *args: Any) -> None:
        self._job = self._pool.submit(work, *args)

    # --- on the publisher's own thread

    def _publish_anchor(self, state: dict[str, NDArray[Any]], stamp: Stamp, diff_seconds: float) -> None:
        started = self._clock.monotonic()
        schema = schema_of(state)
        digest = state_sums(state, schema).text()
        objects = {**self._side_files, layout.MODEL: pack_state(state, schema)}
        manifest = self._commit("anchor", objects, stamp, {"state_digest": digest}, schema)
        self._base, self._schema, self._since_anchor = state, schema, 0
        self._record(manifest, stamp, 0, diff_seconds, started)

    def _publish_delta(self, patch: Patch, stamp: Stamp, diff_seconds: float) -> None:
        started = self._clock.monotonic()
        last = self._require_term().head.manifest
        assert last is not None
        objects: dict[str, bytes] = {}
        digest = last.state_digest
        if patch:
            encoded = encode(patch, self._schema, self._options.codec, lambda n: self._patched(n, patch), self._base)
            objects[layout.DELTA] = encoded.data
            digest = Sums.parse(digest).minus(encoded.removed).plus(encoded.added).text()
        facts = {"state_digest": digest, "base_digest": last.state_digest, "codec": self._options.codec}
        manifest = self._commit("delta", objects, stamp, facts, self._schema)
        for name, change in patch.items():
            scatter(self._base[name], change.index, change.new)
        changed = sum(len(c.index) for c in patch.values())
        self._since_anchor += manifest.payload_bytes
        self._record(manifest, stamp, changed, diff_seconds, started)
        if self._since_anchor > self._options.anchor_share * state_bytes(self._schema):
            self._store_anchor(manifest)

    def _patched(self, name: str, patch: Patch) -> NDArray[Any]:
        return patched(bits(self._base[name]), patch[name])

    def _store_anchor(self, manifest: Manifest) -> None:
        """Store a complete checkpoint of a committed version, after its digest was recomputed from the file."""
        data = pack_state(self._base, self._schema)
        _, entries = parse_header(data, layout.MODEL)
        found = state_sums({n: view(data, e) for n, e in entries.items()}, self._schema).text()
        if found != manifest.state_digest:
            raise DeltawireError(
                f"anchor {manifest.identity} gives digest {found}, not {manifest.state_digest}: report it"
            )
        self._require_term().add_anchor(manifest, {**self._side_files, layout.MODEL: data})
        self._since_anchor = 0
        self._emit("anchor", version=manifest.identity, bytes=len(data))

    def _commit(
        self,
        kind: str,
        objects: Mapping[str, bytes],
        stamp: Stamp,
        facts: dict[str, Any],
        schema: dict[str, TensorSpec],
    ) -> Manifest:
        facts |= {
            "step": stamp.step,
            "sync": stamp.sync,
            "harness": stamp.harness,
            "schema_digest": schema_digest(schema),
        }
        return self._require_term().commit(kind, objects, facts)

    def _record(self, manifest: Manifest, stamp: Stamp, changed: int, diff_seconds: float, started: float) -> None:
        elements = sum(s.size for s in self._schema.values())
        done = Published(
            manifest.identity, stamp, manifest.kind, manifest.payload_bytes, state_bytes(self._schema), changed,
            elements, diff_seconds, self._clock.monotonic() - started,
        )  # fmt: skip
        self.history.append(done)
        self._emit("publish", version=done.identity, kind=done.kind, bytes=done.payload, step=stamp.step)
        self._on_commit(done)

    def _require_term(self) -> Term:
        if self._term is None:
            raise InvalidRequest("open the publisher first")
        return self._term


class ArtifactPublisher:
    """The one writer of an artifact channel; every call waits for its commit."""

    def __init__(self, store: Store, channel: str, *, options: TermOptions | None = None, clock: Clock = REAL) -> None:
        self._store, self._channel, self._clock = store, channel, clock
        self._options = options
        self._term: Term | None = None

    @property
    def identity(self) -> Identity | None:
        """The last committed version."""
        return self._term.head.identity if self._term else None

    def open(self, *, takeover: bool = False) -> None:
        """Claim the channel. Raises Fenced when another writer owns it."""
        self._term = Term.claim(self._store, self._channel, takeover=takeover, options=self._options, clock=self._clock)

    def publish(self, artifact: Artifact, *, measured_against: Identity | None, step: int = 0) -> Identity:
        """Commit `artifact` as the next version, with the weights version it was computed on.

        After an error this publisher is over (StopError); opening it again claims a new epoch.
        """
        if self._term is None:
            raise InvalidRequest("open the artifact publisher first")
        data = canonical_json(artifact.model_dump(mode="json"))
        facts = {
            "state_digest": f"sha256:{sha256_hex(data)}",
            "step": step,
            "measured_against": str(measured_against) if measured_against else None,
        }
        return self._term.commit("document", {layout.DOCUMENT: data}, facts).identity

    def close(self) -> None:
        """Mark the head closed; nothing is written when an error ended the term."""
        if self._term is not None and not self._term.head.closed and not self._term.over:
            self._term.close()
