"""Play many seeds and print what was met and checked: `PYTHONPATH=tests python -m sim.run --seeds 5000 --jobs 2`.

Exits 1 when a promise was broken, a named schedule failed or a mutant was not caught; every failure is printed with its
seed, the end of its trace and the command that plays it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from .mutants import MUTANTS, caught
from .play import REPLAY, play
from .schedules import SCHEDULES, play_named


class Outcome(NamedTuple):
    """What a piece of work found: counts, and the failures in words."""

    counts: Counter[str]
    failures: list[str]


def words(error: BaseException) -> str:
    """An error with the trace and the way to replay it that `play` noted on it."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def seeds(wanted: Iterable[int]) -> Outcome:
    """Play seeds; a failure ends none of the others."""
    count, failures = Counter[str](), []
    for seed in wanted:
        count["schedules"] += 1
        try:
            count.update(play(seed)[0])
        except Exception as error:  # noqa: BLE001 - reported with its seed
            failures.append(f"seed {seed}: {words(error)}")
    return Outcome(count, failures)


def named(name: str) -> Outcome:
    """Play a named schedule."""
    try:
        stage = play_named(name)
    except Exception as error:  # noqa: BLE001 - reported by name
        return Outcome(Counter({"named schedules": 1}), [f"schedule {name}: {words(error)}"])
    return Outcome(Counter({"named schedules": 1}) + stage.world.count, [])


def mutant(name: str) -> Outcome:
    """Look for a seed that catches a mutant."""
    found = caught(name)
    if found is None:
        return Outcome(Counter({"mutants missed": 1}), [f"mutant {name!r} was not caught"])
    return Outcome(Counter({"mutants caught": 1, f"mutant {name}: seed {found[0]} broke {found[1]}": 1}), [])


def everything(first: int, number: int, jobs: int, *, alone: bool) -> Outcome:
    """All of it, in `jobs` processes."""
    total, failures = Counter[str](), []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        blocks = [range(at, min(at + 20, first + number)) for at in range(first, first + number, 20)]
        work = [pool.submit(seeds, list(block)) for block in blocks]
        if not alone:
            work += [pool.submit(named, name) for name in SCHEDULES]
            work += [pool.submit(mutant, name) for name in MUTANTS]
        for done in work:
            outcome = done.result()
            total.update(outcome.counts)
            failures += outcome.failures
            if outcome.failures:
                print("\n\n".join(outcome.failures), file=sys.stderr, flush=True)
    return Outcome(total, failures)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="sim.run", description="Play seeded schedules of writers and readers.")
    parser.add_argument("--seeds", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--seed", type=int, help="begin here, and play seeds alone: no named schedules, no mutants")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    args = parser.parse_args()
    began = time.monotonic()
    first, alone = args.seed or 0, args.seed is not None
    total, failures = everything(first, args.seeds, args.jobs, alone=alone)
    seconds = time.monotonic() - began
    if args.json:
        print(json.dumps({"counts": dict(sorted(total.items())), "failures": failures, "seconds": round(seconds, 1)}))
    else:
        width = max(len(k) for k in total)
        print("\n".join(f"{name:<{width}}  {n:>10,}" for name, n in sorted(total.items())))
        print(f"\n{len(failures)} failures in {seconds:.0f} s", end="")
        print(f"; replay one: {REPLAY.format(seed='N')}" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
