"""One channel, its writers and its follower, driven at random against a dict: version → state."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.faults import FaultStore, copy_of, flip
from support.runs import Time, abandon, assert_i1, assert_i2, assert_i4, assert_i5, head_of, publisher, stamp
from support.states import NumpyEngine, State, nudged, same_bits, small_state

from sync import Follower, Identity, MemoryStore, Publisher, state_digest
from sync.errors import CorruptObject, InvalidPatch, ResyncError, StoreUnavailable
from sync.tensors import bits

pytestmark = pytest.mark.property


def as_bits(state: State) -> State:
    return {n: bits(a).reshape(a.shape) for n, a in state.items()}


class Channel(RuleBasedStateMachine):
    """`model` is what was ever published; `highest` what the follower's clients have seen."""

    @initialize(
        share=st.sampled_from([0.0, 0.2, 4.0]), every=st.integers(0, 5), codec=st.sampled_from(["raw", "fast"]),
        span=st.sampled_from([0, 4, 8]), kept=st.booleans(), pin=st.sampled_from([None, 60.0]),
    )  # fmt: skip
    def begin(self, share: float, every: int, codec: str, span: int, kept: bool, pin: float | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="deltawire-machine-"))
        self.store = MemoryStore()
        self.view = FaultStore(self.store)
        self.share, self.every, self.codec, self.span, self.pin = share, every, codec, span, pin
        self.work = self.folder / "work" if kept else None
        self.time = Time()
        self.training = small_state(1, rows=6)
        self.count = 0
        self.model: dict[Identity, State] = {}
        self.highest: Identity | None = None
        self.writer = self.new_writer()
        self.remember(self.writer.open(self.training, stamp(0)))
        self.past = copy_of(self.store)
        self.engine = NumpyEngine()
        self.follower = Follower(self.view, self.folder / "m", self.engine, pin_ttl=self.pin)

    def new_writer(self) -> Publisher:
        return publisher(
            self.store,
            self.time,
            codec=self.codec,
            anchor_share=self.share,
            catchup_every=self.every,
            keep_anchors=2,
            largest_span=self.span,
            collect_every=3,
            work=self.work,
        )

    def remember(self, at: Identity | None) -> None:
        assert at is not None
        assert at not in self.model
        self.model[at] = {n: a.copy() for n, a in self.training.items()}

    def offer(self) -> None:
        self.count += 1
        assert self.writer.identity is not None
        assert same_bits(
            self.writer.base.state, self.model[self.writer.identity]
        )  # I7: the base is the last committed version
        assert self.writer.offer(self.training, stamp(self.count))
        self.writer.wait()
        assert same_bits(self.writer.base.state, self.training)
        self.remember(self.writer.identity)

    # --- the writer

    @rule(seed=st.integers(0, 999), share=st.sampled_from([0.0, 0.1, 0.9]))
    def publish(self, seed: int, share: float) -> None:
        self.training = nudged(self.training, seed, share=share)
        self.offer()

    @rule()
    def publish_unchanged(self) -> None:
        self.offer()

    @rule(seed=st.integers(0, 999))
    def skip_a_step(self, seed: int) -> None:
        self.training = nudged(self.training, seed)

    @rule(seed=st.integers(0, 999))
    def go_back_to_an_older_state(self, seed: int) -> None:
        known = sorted(self.model)
        self.training = {n: a.copy() for n, a in self.model[known[seed % len(known)]].items()}

    @rule(rows=st.integers(1, 9))
    def change_the_schema(self, rows: int) -> None:
        self.training = small_state(rows, rows=rows)
        self.offer()

    @rule(clean=st.booleans(), back=st.integers(0, 3))
    def restart_the_publisher(self, clean: bool, back: int) -> None:
        if clean:
            self.writer.close()
        else:
            self.writer.base.close()  # a kill frees the lock of its folder
        known = sorted(self.model)
        self.training = {n: a.copy() for n, a in self.model[known[max(0, len(known) - 1 - back)]].items()}
        self.writer = self.new_writer()
        self.remember(self.writer.open(self.training, stamp(self.count), takeover=not clean))

    # --- the follower

    @rule()
    def follow(self) -> None:
        self.follower.poll()
        assert self.follower.status().ready
        assert self.engine.identity == self.writer.identity
        assert self.engine.identity is not None
        assert same_bits(self.engine.state, as_bits(self.model[self.engine.identity]))

    @rule(clean=st.booleans())
    def restart_the_follower(self, clean: bool) -> None:
        self.follower.close() if clean else abandon(self.follower)
        self.engine = NumpyEngine()
        self.follower = Follower(self.view, self.folder / "m", self.engine, pin_ttl=self.pin)

    @rule(clean=st.booleans())
    def damage_the_mirror(self, clean: bool) -> None:
        self.follower.close() if clean else abandon(self.follower)
        self.engine = NumpyEngine()
        for model in self.folder.glob("m/g-*/model.safetensors"):
            model.write_bytes(flip("")("", model.read_bytes()))
        self.follower = Follower(self.view, self.folder / "m", self.engine, pin_ttl=self.pin)

    @rule()
    def remember_the_past(self) -> None:
        self.past = copy_of(self.store)

    @rule()
    def see_the_past(self) -> None:
        self.view.inner = self.past
        self.follower.poll()
        self.view.inner = self.store

    @rule(where=st.sampled_from(["delta.safetensors", "model.safetensors", "catchup/", "heads/"]))
    def see_damaged_objects(self, where: str) -> None:
        self.view.damage = flip(where)
        with suppress(CorruptObject, ResyncError):
            self.follower.poll()
        self.view.damage = lambda _k, data: data

    @rule(call=st.integers(0, 8))
    def lose_the_bucket(self, call: int) -> None:
        self.view.at = {len(self.view.calls) + call: "fail before"}
        with suppress(StoreUnavailable):
            self.follower.poll()
        self.view.at = {}

    @rule(method=st.sampled_from(["apply", "read", "resume", "load", "pause"]))
    def fail_the_engine(self, method: str) -> None:
        self.engine.fail[method] = InvalidPatch("refused by the test")
        try:
            self.follower.poll()
        except InvalidPatch:
            assert not self.follower.status().ready
        self.engine.fail.clear()

    # --- the promises

    @invariant()
    def i1_the_head_names_only_what_exists(self) -> None:
        assert_i1(self.store)

    @invariant()
    def i2_what_is_held_is_what_a_manifest_declares(self) -> None:
        assert_i2(self.store, self.follower, self.engine)
        held = self.follower._mirror.held
        if held is not None:
            assert held.digest == state_digest(self.model[held.identity])
        if not self.engine.paused and self.engine.identity is not None:
            assert same_bits(self.engine.state, as_bits(self.model[self.engine.identity]))

    @invariant()
    def i3_versions_never_go_back(self) -> None:
        status = self.follower.status()
        seen = list(self.engine.served)
        assert seen == sorted(seen)
        if seen:
            assert self.highest is None or seen[-1] >= self.highest
            self.highest = seen[-1]
        if status.ready and status.version is not None and self.highest is not None:
            assert Identity.parse(status.version) >= self.highest
        if self.highest is not None:
            assert status.highest_reported is not None
            assert Identity.parse(status.highest_reported) >= self.highest

    @invariant()
    def i4_one_chain_is_extended_per_epoch(self) -> None:
        assert_i4(self.store)
        assert head_of(self.store).identity == self.writer.identity == max(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        assert_i5(self.store, self.folder)  # I5: replay from any live anchor
        late = Follower(self.store, self.folder / "late", None)
        late.poll()
        assert late._mirror.identity == self.writer.identity
        for follower in (late, self.follower):
            follower.close()
        self.writer.close()
        shutil.rmtree(self.folder)


Channel.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestChannel = Channel.TestCase
