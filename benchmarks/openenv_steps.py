"""Steps over OpenEnv's protocol: our Space against OpenEnv's own server, on one echo environment, in one run.

    .venv/bin/python benchmarks/openenv_steps.py [--pairs 5] [--seconds 3] [--json FILE]

Each server is a process, as is the driver: N sockets of the `websockets` library with its defaults, which are what
OpenEnv's client has, each with an episode. (Not named openenv.py, which would hide the package from its own scripts.)

    closed   every episode steps again as soon as it has its answer: steps per second, ours / theirs, at 16 and 256
    open     every episode steps once per second, at moments of its own: p99 of the time from the moment a step was due
             to its answer, at 256 / at 16, for both servers
Pairs are measured one after the other, and who is first changes; a figure is a median with its spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support_openenv import KEY, Upstream
from websockets.asyncio.client import ClientConnection, connect

FEW, MANY = 16, 256
STEP = json.dumps({"type": "step", "data": {"message": "the quick brown fox"}})


class Measured(NamedTuple):
    """Steps per second, and the 50th and 99th percentile of a step in milliseconds."""

    rate: float
    p50: float
    p99: float


async def drive(url: str, episodes: int, seconds: float, *, paced: bool) -> Measured:
    """Play `episodes` at once for a while; raises when a server answers anything but an observation."""
    sockets = await asyncio.gather(*(_begin(url) for _ in range(episodes)))
    began = asyncio.get_running_loop().time() + 0.1
    took: list[float] = []
    play = _paced if paced else _closed
    await asyncio.gather(*(play(s, began, seconds, took, Random(n).random()) for n, s in enumerate(sockets)))
    spent = asyncio.get_running_loop().time() - began
    await asyncio.gather(*(s.close() for s in sockets))
    took.sort()
    return Measured(len(took) / spent, 1e3 * took[len(took) // 2], 1e3 * took[int(0.99 * len(took))])


async def _begin(url: str) -> ClientConnection:
    socket = await connect(f"{url}/ws".replace("http", "ws", 1), additional_headers=KEY, open_timeout=120, proxy=None)
    await socket.send('{"type":"reset","data":{"seed":1}}')
    _checked(await socket.recv())
    return socket


def _checked(answer: str | bytes) -> None:
    if '"type":"observation"' not in str(answer)[:64]:
        raise RuntimeError(f"a server answered {str(answer)[:200]}")


async def _closed(socket: ClientConnection, began: float, seconds: float, took: list[float], _: float) -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(began - clock())
    while (sent := clock()) < began + seconds:
        await socket.send(STEP)
        _checked(await socket.recv())
        took.append(clock() - sent)


async def _paced(socket: ClientConnection, began: float, seconds: float, took: list[float], phase: float) -> None:
    clock = asyncio.get_running_loop().time
    for turn in range(int(seconds)):
        due = began + phase + turn
        await asyncio.sleep(due - clock())
        await socket.send(STEP)
        _checked(await socket.recv())
        took.append(clock() - due)


def main() -> None:
    """Measure and print; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = Upstream(folder, MANY, ours=folder / "env")
        try:
            theirs = Upstream(folder, MANY)
            try:
                urls = {"ours": f"{ours.url}/openenv/echo", "theirs": theirs.url}
                figures = closed(urls, args.pairs, args.seconds) | open_loop(urls, args.pairs, args.seconds)
            finally:
                theirs.stop()
        finally:
            ours.stop()
    for label, values in figures.items():
        print(f"{label:<44} {statistics.median(values):>9.2f}   ({min(values):.2f} to {max(values):.2f})")
    if args.json:
        args.json.write_text(json.dumps(figures))


def closed(urls: dict[str, str], pairs: int, seconds: float) -> dict[str, list[float]]:
    """Steps per second as fast as they go."""
    figures: dict[str, list[float]] = {}
    for episodes in (FEW, MANY):
        for number in range(pairs):
            found = _pair(urls, episodes, seconds, number, paced=False)
            figures.setdefault(f"closed, {episodes}: steps/s, ours / theirs", []).append(
                found["ours"].rate / found["theirs"].rate
            )
            for who, measured in found.items():
                figures.setdefault(f"closed, {episodes}: steps/s, {who}", []).append(measured.rate)
                figures.setdefault(f"closed, {episodes}: p99 of a step, ms, {who}", []).append(measured.p99)
    return figures


def open_loop(urls: dict[str, str], pairs: int, seconds: float) -> dict[str, list[float]]:
    """Time of a step when each episode takes one per second."""
    figures: dict[str, list[float]] = {}
    for number in range(pairs):
        few = _pair(urls, FEW, seconds, number, paced=True)
        many = _pair(urls, MANY, seconds, number, paced=True)
        for who in urls:
            figures.setdefault(f"open: p99 at {MANY} / at {FEW}, {who}", []).append(many[who].p99 / few[who].p99)
            figures.setdefault(f"open, {FEW}: p99 of a step, ms, {who}", []).append(few[who].p99)
            figures.setdefault(f"open, {MANY}: p99 of a step, ms, {who}", []).append(many[who].p99)
    return figures


def _pair(urls: dict[str, str], episodes: int, seconds: float, number: int, *, paced: bool) -> dict[str, Measured]:
    order = sorted(urls, reverse=number % 2 == 1)
    found = {}
    for who in order:
        found[who] = asyncio.run(drive(urls[who], episodes, seconds, paced=paced))
        time.sleep(0.2)  # sessions of the run before are closed
    return found


if __name__ == "__main__":
    main()
