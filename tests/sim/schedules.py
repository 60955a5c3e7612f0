"""Schedules with a name: what can go wrong with two writers and a bucket that lags, each step by step.

A schedule is a function of a Play: it adds actors, runs a script as the first task, and asserts what must come of it.
The judge watches all the while, and `finale` checks that everyone reaches the head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.states import same_bits

from sync.errors import Fenced
from sync.schema.wire import Head
from sync.tensors import bits
from sync.term import TermOptions

from .actors import Trainer
from .play import Play
from .setups import Setup
from .store import Fault, Weather
from .world import Task

LAG = 5.0
Schedule = Callable[[Play], None]
SCHEDULES: dict[str, Schedule] = {}


def named(schedule: Schedule) -> Schedule:
    """Enter a schedule under its function's name."""
    SCHEDULES[schedule.__name__] = schedule
    return schedule


def habits(**more: object) -> Setup:
    """A calm bucket whose listings may lag, and a publisher that does everything often."""
    term = TermOptions(settle=LAG, deadline=30.0, catchup_every=2, keep_anchors=1, grace=80.0, collect_every=1)
    setup = Setup(Path(), Weather(lag=LAG, stray=40.0), term, anchor_share=9.0, rows=40, steps=1000)
    for name, value in more.items():
        assert hasattr(setup, name)
        setattr(setup, name, value)
    return setup


def play_named(name: str, seed: int = 1) -> Play:
    """Play a named schedule; raises what broke."""
    schedule = SCHEDULES[name]
    with Play(seed, habits()) as stage:
        try:
            schedule(stage)
        except BaseException as error:
            error.add_note(f"{stage.world.tail()}\nschedule {name}")
            raise
        return stage


# --- steps


def opened(stage: Play, name: str = "trainer") -> Trainer:
    """A trainer that has opened and committed its first version."""
    trainer = stage.trainer(name)
    trainer.open(takeover=True)
    return trainer


def commit(trainer: Trainer, times: int = 1) -> None:
    """Steps, each committed before the next, with all compaction behind them."""
    assert trainer.publisher is not None
    for _ in range(times):
        trainer.advance()
        trainer.publisher.wait_behind()


def beside(stage: Play, trainer: Trainer, work: Callable[[], None]) -> Task:
    """Run `work` as a task of a trainer's process."""
    return stage.world.spawn(trainer.process, trainer.process.name, work)


def until(stage: Play, condition: Callable[[], bool]) -> None:
    """Let the others run until a condition holds."""
    assert stage.world.pause("until", 600.0, condition)


def once(fault: Fault, method: str, where: str, *, skip: int = 0) -> Callable[[str, tuple[str, ...]], Fault | None]:
    """A rule: the call of `method` with a key that contains `where` meets a fault, once, after `skip` such calls."""
    left = [skip]

    def rule(called: str, keys: tuple[str, ...]) -> Fault | None:
        if called == method and any(where in k for k in keys):
            left[0] -= 1
            return fault if left[0] == -1 else None
        return None

    return rule


def head(stage: Play) -> Head:
    """The newest head in truth."""
    (found,) = stage.judge.newest()
    return found


def version(stage: Play) -> int:
    """The newest head's version."""
    at = head(stage).version
    assert at is not None
    return at


# --- schedules


@named
def head_post_replayed_after_a_rivals_commit(stage: Play) -> None:
    """The request that wrote a head is repeated by the client's network after another trainer took over."""

    def script() -> None:
        first, reader = opened(stage), stage.reader()
        commit(first)
        first.view.rule = once(Fault("again", 30.0), "put", "heads/")
        commit(first)
        reader.poll()
        second = opened(stage, "rival")
        commit(second, 2)
        stage.world.pause("the request lands again", 31.0)
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        assert head(stage).epoch == 2
        with pytest.raises(Fenced):
            commit(first)
        commit(second)
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        first.give_up()
        second.end()
        stage.finale()

    stage.run(script)


@named
def old_head_of_the_same_term_lands_late(stage: Play) -> None:
    """A repeated request brings a term's older head back for a while, after a collecting announced its plan."""

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer)
        trainer.view.rule = once(Fault("again", 40.0), "put", "heads/")
        commit(trainer)
        before = version(stage)
        stage.setup.anchor_share = 0.0
        trainer.end()
        trainer.open(takeover=True)
        assert version(stage) > before
        commit(trainer, 6)
        reader.poll()
        stage.world.pause("the old head is back", 41.0)
        commit(trainer, 2)
        reader.poll()
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def stale_read_back_of_a_landed_head(stage: Play) -> None:
    """A head's reply is lost and the bucket shows the time before it: the same bytes go up until they are seen."""

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer)
        before, left = version(stage), [3]

        def rule(method: str, keys: tuple[str, ...]) -> Fault | None:
            if not any(k.startswith("heads/") for k in keys) or left[0] == 0:
                return None
            if method == "put":
                left[0] -= 1
                return Fault("lost")
            return Fault("stale", LAG, where=lambda _: True) if method == "info" else None

        trainer.view.rule = rule
        commit(trainer)
        assert left == [0]
        assert version(stage) == before + 1
        reader.poll()
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def claim_tie_under_stale_listing(stage: Play) -> None:
    """Two trainers claim the same epoch, and the listing does not show one to the other: at most one goes on."""

    def script() -> None:
        reader = stage.reader()
        commit(opened(stage, "earlier"))
        reader.poll()
        pair = [stage.trainer("one"), stage.trainer("two")]
        results: list[str] = []
        listed, own = [0, 0], ["", ""]

        def claim(n: int) -> None:
            def rule(method: str, keys: tuple[str, ...]) -> Fault | None:
                if method == "put" and keys[0].startswith("heads/"):
                    own[n] = keys[0]
                if method != "list" or keys != ("heads/",):
                    return None
                listed[n] += 1
                if listed[n] == 1:  # both read the earlier term's head before either claims
                    return Fault("hold", 60.0, lambda: min(listed) >= 1)
                return Fault("stale", LAG, where=lambda key: key != own[n]) if listed[n] == 2 else None

            pair[n].view.rule = rule
            try:
                pair[n].open(takeover=True)
                results.append("went on")
            except Fenced:
                results.append("fenced")
                pair[n].give_up()

        tasks = [beside(stage, trainer, lambda n=n: claim(n)) for n, trainer in enumerate(pair)]  # type: ignore[misc]
        until(stage, lambda: all(t.done for t in tasks))
        assert "fenced" in results
        reader.poll()
        stage.finale()

    stage.run(script)


@named
def a_step_during_an_inflight_publish(stage: Play) -> None:
    """While an upload hangs no difference is taken; the next one carries every step since the last commit."""

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer)
        assert trainer.publisher is not None
        let_go = [False]
        trainer.view.rule = once(Fault("hold", 500.0, lambda: let_go[0]), "put", "versions/")
        assert trainer.advance()
        for _ in range(3):
            assert not trainer.advance()
        before = version(stage)
        reader.poll()
        let_go[0] = True
        trainer.publisher.wait()
        assert version(stage) == before + 1
        assert trainer.advance()
        trainer.publisher.wait()
        reader.poll()
        assert same_bits(reader.engine.state, {n: bits(a).reshape(a.shape) for n, a in trainer.state.items()})
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def collecting_while_an_anchor_uploads(stage: Play) -> None:
    """An anchor is half uploaded while versions, plans and sweeps of a resumed term pass: what is named stays whole."""
    stage.setup.anchor_share = 0.3

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        trainer.view.rule = once(Fault("late", 39.0), "put", "anchors/")
        for _ in range(6):
            trainer.advance()
            stage.world.pause("train", 2.0)
        trainer.process.kill()
        trainer.killed()
        stage.world.pause("restart", 1.0)
        trainer.process.dead = False
        trainer.open(takeover=True)
        for _ in range(12):
            commit(trainer)
            reader.poll()
            stage.world.pause("train", 15.0)
        stage.judge.replay()
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def a_pin_between_plan_and_delete(stage: Play) -> None:
    """A reader comes back after its pin expired and was planned against; another pins in time. Both reach the head."""
    stage.setup.anchor_share, stage.setup.pin_ttl = 0.3, 30.0

    def script() -> None:
        trainer, late, held = opened(stage), stage.reader("late-reader"), stage.reader("held-reader")
        commit(trainer, 2)
        late.poll()
        held.poll()
        stage.setup.pin_ttl = 2000.0
        held.close()
        held.poll()
        for n in range(14):
            commit(trainer)
            stage.world.pause("train", 12.0)
            if n == 8:
                late.poll()
        late.poll()
        held.poll()
        for reader in (late, held):
            assert reader.engine.identity == head(stage).identity
        commit(trainer, 8)
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def an_old_head_that_comes_back_after_a_sweep(stage: Play) -> None:
    """A head request strays while versions pass; what the older head names must live as long as the grace."""
    stage.setup.anchor_share, stage.setup.weather.stray = 0.05, 40.0

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer, 3)
        trainer.view.rule = once(Fault("again", 39.0), "put", "heads/")
        commit(trainer, 12)
        stage.world.pause("the old head is back", 40.0)
        reader.poll()
        commit(trainer)
        reader.poll()
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def a_reader_on_a_fork(stage: Play) -> None:
    """A rival adopts a version, then the old writer commits one more: its readers leave the fork and never go back."""
    stage.setup.codec, stage.setup.largest_span = "raw", 0  # only digests tell the chains apart

    def script() -> None:
        first, reader, slow = opened(stage), stage.reader(), stage.reader("slow-reader")
        commit(first)
        second = stage.trainer("rival")
        let_go = [False]
        second.view.rule = once(Fault("hold", 500.0, lambda: let_go[0]), "put", "heads/")
        task = beside(stage, second, lambda: second.open(takeover=True))
        stage.world.pause("the rival has read the head", 3.0)
        commit(first)  # the rival does not know this version
        reader.poll()
        slow.poll()
        forked = reader.engine.identity
        assert forked is not None
        assert forked == head(stage).identity
        let_go[0] = True
        until(stage, lambda: task.done)
        assert version(stage) == forked.version
        assert head(stage).epoch == 2
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        commit(second, 2)
        slow.poll()
        assert slow.engine.identity == head(stage).identity
        with pytest.raises(Fenced):
            commit(first)
        first.give_up()
        second.end()
        stage.finale()

    stage.run(script)


@named
def a_run_deleted_and_created_again(stage: Play) -> None:
    """An operator deletes everything; a new channel begins at the same place, also for whoever held the old one."""

    def script() -> None:
        first, reader = opened(stage), stage.reader()
        commit(first, 5)
        reader.poll()
        first.end()
        stage.judge.delete_the_run()
        stage.world.pause("listings forget", LAG + 1)
        reader.poll()
        first.open(takeover=False)
        commit(first, 2)
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        first.end()
        stage.finale()

    stage.run(script)


@named
def resume_from_a_checkpoint_older_than_the_head(stage: Play) -> None:
    """A trainer goes back to its first state: one delta from the head, no anchor, and readers follow it."""

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer, 5)
        reader.poll()
        before = version(stage)
        trainer.end()
        trainer.checkpoints = trainer.checkpoints[:1]
        trainer.open(takeover=False)
        assert version(stage) == before + 1
        found = head(stage).manifest
        assert found is not None
        assert found.kind == "delta"
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def a_head_listed_before_its_bytes_are_served(stage: Play) -> None:
    """The listing shows a new head, its bytes are still the old ones: the reader looks again, not only at the next."""

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer)
        reader.poll()
        stage.world.pause("time passes", 60.0)
        commit(trainer)
        reader.view.rule = once(Fault("stale", 30.0, where=lambda _: True), "get", "heads/")
        reader.poll()
        stage.world.pause("the bucket has settled", 60.0)
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def a_writer_that_slept_through_a_takeover(stage: Play) -> None:
    """A trainer hangs in the middle of a commit, another takes over and goes on; the first wakes up and stops."""

    def script() -> None:
        first, reader = opened(stage), stage.reader()
        commit(first, 2)
        let_go = [False]
        first.view.rule = once(Fault("hold", 5000.0, lambda: let_go[0]), "put", "heads/")
        assert first.advance()
        stage.world.pause("the first hangs", 5.0)
        second = opened(stage, "rival")
        commit(second, 6)
        reader.poll()
        let_go[0] = True
        assert first.publisher is not None
        with pytest.raises(Fenced):
            first.publisher.wait()
        first.give_up()
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        second.end()
        stage.finale()

    stage.run(script)


@named
def a_pin_that_the_collector_reads_damaged(stage: Play) -> None:
    """The writer gets other bytes for a live pin: it does not take it for no pin."""
    stage.setup.anchor_share, stage.setup.pin_ttl = 0.3, 5000.0

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        commit(trainer, 2)
        reader.poll()
        reader.poll()
        trainer.view.rule = lambda method, keys: Fault("damaged") if method == "get" and "/pins/" in keys[0] else None
        for _ in range(16):
            commit(trainer)
            stage.world.pause("train", 12.0)
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        trainer.view.rule = lambda _method, _keys: None
        trainer.end()
        stage.finale()

    stage.run(script)


@named
def a_late_reader_at_the_start_of_a_late_span(stage: Play) -> None:
    """The last head names a span that begins at a reader's version; what follows the span is in the catchup list."""
    stage.setup.rows, stage.setup.largest_span = 100, 4

    def script() -> None:
        trainer, reader = opened(stage), stage.reader()
        assert trainer.publisher is not None
        commit(trainer, 4)
        reader.poll()
        let_go = [False]
        trainer.view.rule = once(Fault("hold", 500.0, lambda: let_go[0]), "put", "spans/")
        commit(trainer, 3)
        while version(stage) < 10 or len(head(stage).recent) > 1:
            assert trainer.advance()
            trainer.publisher.wait()
        let_go[0] = True
        trainer.end()
        assert [r.kind for r in head(stage).recent if r.from_version == 4] == ["span"]
        reader.poll()
        assert reader.engine.identity == head(stage).identity
        stage.finale()

    stage.run(script)
