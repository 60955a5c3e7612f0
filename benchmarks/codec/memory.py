"""Peak memory of encoding and applying, in a process of its own. Linux only: it reads /proc."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from sync.codec import apply_delta, diff, encode_delta
from sync.pieces import layout_of
from sync.tensors import Bits, TensorSpec

from .states import read_pair

Out = TypeVar("Out")
WIDER = 3


def measure(folder: Path, codec: str, copies: int = 1) -> dict[str, int]:
    """Bytes: how far the resident set rises at most above where it was, in a fresh process with one thread.

    encode: `encode_delta` of two states in memory, all of whose pages were touched, and the payload it returns. apply:
    `apply_delta` of that payload to a third state in memory. Beside them what they may cost: changed (elements),
    payload, segment (bytes of the largest segment's elements). copies: the state is this many times as large, and only
    the first part changes. The kernels are compiled before. {} where the kernel offers no peak to reset.
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", __name__, str(folder), codec, str(copies)]
    environ = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=environ)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def _child(folder: Path, codec: str, copies: int) -> dict[str, int]:
    pair = read_pair(folder, folder.name)
    old, new, target = dict[str, Bits](), dict[str, Bits](), dict[str, Bits]()
    schema: dict[str, TensorSpec] = {}
    for n in range(copies):
        for name, spec in pair.schema.items():
            here = f"{n}.{name}"
            schema[here] = spec
            old[here], target[here] = pair.old[name].copy(), pair.old[name].copy()
            new[here] = (pair.old if n else pair.new)[name].copy()
    del pair
    _compile(codec)
    try:
        encode, payload = _peak(lambda: encode_delta(old, new, codec, schema, threads=1))
        apply, _ = _peak(lambda: apply_delta(target, payload, schema, threads=1))
    except OSError:
        return {}
    changed = sum(len(one.index) for one in diff(old, new, schema, threads=1).values())
    assert all(np.array_equal(target[name], new[name]) for name in new)
    segment = max(part.size * schema[part.pieces[0].name].width for part in layout_of(schema).segments)
    return {"encode": encode, "apply": apply, "changed": changed, "payload": len(payload), "segment": segment}


def _compile(codec: str) -> None:
    """Every path of a codec once on a few elements: what the compiler takes is not the codec's."""
    rng = np.random.default_rng(0)
    old = {"w": rng.integers(0, 1 << 15, 100_000, np.uint16)}
    new = {"w": old["w"] + (rng.random(100_000) < 0.02).astype(np.uint16)}
    apply_delta(old, encode_delta(old, new, codec, threads=1), threads=1)


def _peak(work: Callable[[], Out]) -> tuple[int, Out]:
    """How far the resident set rises during work. Raises OSError where the kernel cannot tell."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _highest()
    result = work()
    return _highest() - before, result


def _highest() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no peak of the resident set in /proc")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("codec")
    parser.add_argument("copies", type=int)
    args = parser.parse_args()
    print(json.dumps(_child(args.folder, args.codec, args.copies)))
