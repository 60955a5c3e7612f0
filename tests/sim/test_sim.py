"""Seeded schedules of real publishers and followers over a bucket that misbehaves; see `world.py` and `promises.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from support.faults import Stopped

from sim.mutants import MUTANTS, caught, head_before_objects, torn_copies
from sim.play import Play, play
from sim.run import seeds
from sim.schedules import SCHEDULES, commit, habits, head, opened, play_named
from sim.setups import calm
from sim.store import KINDS, Bucket, Fault, View, Weather
from sim.world import Broken, Process, SimExecutor, World

pytestmark = pytest.mark.sim

SEEDS = 75
EVENTS = (
    "kill", "engine failure", "documents", "fenced", "poll refused", "offered while busy", "objects collected",
    "check verify", "trainer: resumed", "trainer: span", "trainer: collect", "trainer: compact_failed",
    "follower: anchor", "follower: delta", "follower: detour", "follower: recovered", "operator collect done",
)  # fmt: skip
"""What so many seeds always meet; a count of 0 says that the schedules no longer reach it."""
PROMISES = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "bounded", "live")


@pytest.mark.parametrize("first", [0, SEEDS])
def test_every_promise_holds_in_seeded_schedules(first: int) -> None:
    count, failures = seeds(range(first, first + SEEDS))
    assert not failures, "\n\n".join(failures)
    assert [p for p in PROMISES if not count[f"check {p}"]] == []
    assert {*KINDS, "down"} <= {k.removeprefix("fault ") for k in count if k.startswith("fault ")}
    assert [k for k in EVENTS if not count[k]] == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_named_schedule_keeps_every_promise(name: str) -> None:
    assert play_named(name).world.count["check live"] > 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    found = caught(name)
    assert found is not None, f"no seed notices the mutant {name!r}"


def test_a_torn_copy_never_becomes_an_anchor() -> None:
    failed = 0
    for seed in range(4):
        with torn_copies(), Play(seed, calm(Random(seed))) as stage:
            stage.random()
            failed += stage.world.count["trainer: compact_failed"]
    assert failed > 0


def test_a_failure_names_its_seed_and_how_to_play_it_again() -> None:
    with head_before_objects():
        _, (failure,) = seeds([5])
    assert failure.startswith("seed 5: Broken: I1: ")
    assert "-m sim.run --seed 5 --seeds 1" in failure
    assert "FAILED Broken" in failure


# --- the simulator itself


def test_a_seed_names_one_schedule() -> None:
    for seed in (3, 9, 20):
        assert play(seed) == play(seed)
    assert play(3)[1] != play(7)[1]


def test_a_seed_names_the_same_schedule_in_another_process() -> None:
    code = "from sim.play import play; print(play(3)[1])"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == play(3)[1]


def test_the_baton_goes_round_and_time_is_virtual() -> None:
    world, seen = World(1), list[str]()
    process = Process(world, "p")

    def work(name: str, seconds: float) -> None:
        for _ in range(3):
            world.pause("work", seconds)
            seen.append(f"{name}{world.now - 1_000_000:.0f}")

    world.spawn(process, "a", lambda: work("a", 1.0))
    world.spawn(process, "b", lambda: work("b", 10.0))
    world.run()
    assert seen == ["a1", "a2", "a3", "b10", "b20", "b30"]


def test_a_kill_ends_every_task_of_a_process_and_of_no_other() -> None:
    world, ended = World(1), list[str]()
    one, two = Process(world, "one"), Process(world, "two")

    def work(name: str) -> None:
        try:
            world.pause("long", 100.0)
        except Stopped:
            ended.append(name)
            raise

    for process in (one, two):
        for n in range(2):
            world.spawn(process, f"{process.name}{n}", lambda name=f"{process.name}{n}": work(name))  # type: ignore[misc]

    def kill() -> None:
        world.pause("a moment", 1.0)
        one.kill()

    world.spawn(two, "killer", kill)
    world.run()
    assert sorted(ended) == ["one0", "one1"]
    assert world.now == 1_000_100.0


def test_a_wait_that_nothing_ends_is_reported() -> None:
    world = World(1)

    def forever() -> None:
        world.pause("wait", float("inf"), lambda: False)

    world.spawn(Process(world, "p"), "forever", forever)
    with pytest.raises(Broken, match=r"bounded: nobody can go on"):
        world.run()


def test_work_in_an_executor_runs_in_order_and_carries_its_error() -> None:
    world, seen = World(1), list[object]()
    process = Process(world, "p")

    def fails() -> None:
        seen.append(world.now)
        raise ZeroDivisionError

    def main() -> None:
        worker = SimExecutor(world, process, "w")
        first = worker.submit(lambda: world.pause("long", 9.0))
        second = worker.submit(fails)
        with pytest.raises(TimeoutError):
            first.result(1.0)
        assert not first.done()
        assert first.result() is True
        with pytest.raises(ZeroDivisionError):
            second.result()
        worker.shutdown()

    world.spawn(process, "main", main)
    world.run()
    assert seen == [1_000_009.0]


def test_the_bucket_shows_its_past_and_lands_requests_late() -> None:
    world = World(1)
    bucket, process = Bucket(world), Process(world, "p")
    view = View(bucket, process, Weather())
    world.quiet = True

    def main() -> None:
        view.put_batch({"a/b.json": b"one"})
        world.pause("time", 10.0)
        view.put_batch({"a/b.json": b"two"})
        view.rule = lambda method, _keys: Fault("stale", 5.0, where=lambda _: True) if method == "get" else None
        assert view.get("a/b.json", limit=9) == b"one"
        view.rule = lambda method, _keys: Fault("again", 7.0) if method == "put" else None
        view.put_batch({"a/b.json": b"old"})
        view.rule = lambda _method, _keys: None
        view.put_batch({"a/b.json": b"new"})
        assert bucket.peek("a/b.json") == b"new"
        world.pause("time", 8.0)
        assert bucket.peek("a/b.json") == b"old"

    world.spawn(process, "main", main)
    world.run()


def test_the_judge_objects_to_a_deleted_object_that_the_head_names() -> None:
    with Play(1, habits()) as stage:

        def script() -> None:
            commit(opened(stage))
            stage.bucket.delete([head(stage).recent[0].key])

        with pytest.raises(Broken, match="I6"):
            stage.run(script)
