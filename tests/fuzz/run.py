"""Mutate payloads for a while and print what came of it: `PYTHONPATH=tests python -m fuzz.run --seconds 60`.

Seeds are played one after the other from `--seed`; what a seed does depends on nothing else. Exits 1 when the codec did
anything wrong, each time printed with its seed; 2 when a kind of mutation never ran; 3 when a payload made it hang.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from .judge import PER_SEED, Tally, Watch, play
from .outer import KINDS

SEEDS_OF_A_JOB = 10_000_000
REPLAY = "PYTHONPATH=tests python -m fuzz.run --seed N --payloads 1"


def run(seed: int, *, seconds: float = 0, payloads: int = 0, failures: int = 50) -> Tally:
    """Play seeds from `seed` until the time is over or at least so many payloads were mutated (a seed is always played
    to its end), or so many failures were met."""
    tally, began = Tally(), time.monotonic()
    with Watch() as watch:
        while len(tally.failures) < failures:
            play(seed, tally, watch)
            seed += 1
            if seconds and time.monotonic() - began >= seconds:
                break
            if payloads and tally.mutations.total() >= payloads:
                break
    return tally


def run_jobs(jobs: int, seed: int, seconds: float, payloads: int) -> Tally:
    """`run` in several processes, each from a seed far from the others'; what they print on standard error goes on.

    Raises SystemExit with a process's status when it ended without counts: 3 when a payload made it hang.
    """
    children = []
    for job in range(jobs):
        flags = ["--seed", str(seed + job * SEEDS_OF_A_JOB), "--seconds", str(seconds), "--payloads", str(payloads)]
        command = [sys.executable, "-m", "fuzz.run", "--json", *flags]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    tally, status = Tally(), 0
    for child in children:
        text, _ = child.communicate()
        if not text:
            status = child.returncode
            continue
        said = json.loads(text)
        for name in ("mutations", "sealed", "accepted", "refused"):
            getattr(tally, name).update(said[name])
        tally.measured += said["measured"]
        tally.failures += said["failures"]
    if status:
        raise SystemExit(status)
    return tally


def report(tally: Tally, seconds: float) -> str:
    """The counts as text."""
    width = max(map(len, KINDS))
    lines = [f"{'kind of mutation':<{width}}  {'made':>10}  {'resealed':>10}  {'accepted':>10}"]
    for name in KINDS:
        counts = (tally.mutations[name], tally.sealed[name], tally.accepted[name])
        lines.append(f"{name:<{width}}  " + "  ".join(f"{n:>10,}" for n in counts))
    lines.append("")
    lines += [f"refused as {name}: {n:,}" for name, n in tally.refused.most_common()]
    made, sealed = tally.mutations.total(), tally.sealed.total()
    lines.append(f"{made:,} payloads mutated, {sealed:,} of them resealed and tried again, {made / seconds * 60:,.0f} "
                 f"a minute; memory measured for {tally.measured:,}; {len(tally.failures)} failures")  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="fuzz.run", description="Mutate payloads and judge what the codec does.")
    parser.add_argument("--seconds", type=float, default=0, help="go on for so long (default 60 without --payloads)")
    parser.add_argument("--seed", type=int, default=0, help=f"begin here; a seed mutates {PER_SEED} payloads")
    parser.add_argument("--payloads", type=int, default=0, help="stop at the end of the seed that reaches so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with seeds of its own")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    args = parser.parse_args()
    began = time.monotonic()
    seconds = args.seconds or (0 if args.payloads else 60)
    if args.jobs > 1:
        tally = run_jobs(args.jobs, args.seed, seconds, args.payloads // args.jobs)
    else:
        tally = run(args.seed, seconds=seconds, payloads=args.payloads)
    took = time.monotonic() - began
    if args.json:
        print(json.dumps({"seconds": round(took, 1), **vars(tally)}))
    else:
        print(report(tally, took))
    if args.jobs == 1:  # the others have said theirs
        for failure in tally.failures:
            print(f"FAILURE {failure}", file=sys.stderr)
    if tally.failures:
        print(f"replay one: {REPLAY}", file=sys.stderr)
        return 1
    if missing := tally.missing():
        print(f"never ran: {', '.join(missing)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
