"""`deltawire bench codec`: sizes, speeds and memory of the codecs on real training, against their bars."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sync.codec import CODECS
from sync.errors import ConfigError

from . import memory, report
from .measure import sizes, worst_cases
from .speed import Speeds
from .states import find_pairs, read_pair

DEFAULT_DATA = Path("runs/bench-codec")
_BARRED = "steady-3e-06"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("what", choices=["codec"], help="what to measure")
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="pairs of checkpoints: DIR, or folders below it, with old.safetensors and new.safetensors or old/ "
        f"and new/; where there is nothing, two models are trained and written to it (2 GB; default {DEFAULT_DATA})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG files into DIR")
    parser.add_argument(
        "--rounds", type=int, default=9, help=f"interleaved rounds of each timing, at least {report.FEWEST}"
    )
    parser.add_argument("--quick", action="store_true", help="one round and little memory: decides nothing about speed")


def run(args: argparse.Namespace) -> int:
    """Capture if need be, measure, print; 0."""
    if args.rounds < report.FEWEST:
        raise ConfigError(f"--rounds {args.rounds}: fewer than {report.FEWEST} rounds have no spread worth the name")
    results = measure(_pairs(args.data), 1 if args.quick else args.rounds, quick=args.quick)
    if args.plots is not None:
        from .plots import draw

        results["plots"] = [str(path) for path in draw(results, args.plots)]
    print(json.dumps(results, indent=1) if args.json else report.text(results))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _pairs(data: Path | None) -> dict[str, Path]:
    """The pairs below the folder; what is missing in the default folder, or all in an empty one, is captured first."""
    folder = data or DEFAULT_DATA
    found = find_pairs(folder) if folder.is_dir() else {}
    if not found or data is None:
        if data is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} holds no pair old.safetensors, new.safetensors (or folders old, new)")
        from .capture import PLANS, capture

        if missing := tuple(name for name in PLANS if not (folder / name).is_dir()):
            capture(folder, _say, missing)
        found = find_pairs(folder)
    return found


def measure(pairs: Mapping[str, Path], rounds: int, *, quick: bool = False) -> dict[str, Any]:
    """All figures of all pairs.

    cases: `measure.sizes` of each. barred: the cases the bars are for: those of lr 3e-6 where there are any, else all.
    speeds, memory: of these (`speed.Speeds`, `memory.measure`). worst_cases: `measure.worst_cases`. bars: rows of
    `report.rows`.
    """
    started = time.monotonic()
    results: dict[str, Any] = {
        "machine": {"platform": platform.platform(), "processors": os.cpu_count(), "numpy": np.__version__},
        "rounds": rounds,
        "cases": [],
        "barred": [name for name in pairs if name.endswith(_BARRED)] or list(pairs),
        "speeds": [],
        "memory": [],
    }
    for name, folder in pairs.items():
        _say(f"{name}: sizes")
        pair = read_pair(folder, name)
        results["cases"].append(sizes(pair))
        if name in results["barred"]:
            _say(f"{name}: speeds")
            results["speeds"].append(Speeds(pair, rounds).measure())
            _say(f"{name}: memory")
            results["memory"] += _memory(name, folder, ("fast",) if quick else CODECS)
    _say("dense and tiny states")
    results["worst_cases"] = worst_cases(50_000) if quick else worst_cases()
    results["bars"] = [row._asdict() for row in report.rows(results)]
    results["seconds"] = time.monotonic() - started
    return results


def _memory(name: str, folder: Path, codecs: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for codec in codecs:
        usual, wider = (memory.measure(folder, codec, copies) for copies in (1, memory.WIDER))
        if usual and wider:
            found.append({"case": name, "codec": codec, "times": memory.WIDER, "usual": usual, "wider": wider})
    return found
