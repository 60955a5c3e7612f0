"""Apply mutated payloads with the real codec and say what is wrong with what it did."""

from __future__ import annotations

import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self
from unittest.mock import patch

from sync.codec import apply_delta, decode, reading, scatter
from sync.digest import Sums, moved, state_sums
from sync.errors import BaseMismatch, DeltawireError, InvalidPatch, SchemaChanged
from sync.safetensors_io import parse_header
from sync.tensors import state_bytes

from . import inner, oracle
from .outer import KINDS
from .samples import Sample, sample

__all__ = ["PER_SEED", "Tally", "Watch", "inner", "play"]

PER_SEED = 150
HANGS = 60.0
"""Seconds after which one payload counts as hanging. Kernels are compiled on first use, which takes seconds."""
TYPED = (InvalidPatch, BaseMismatch, SchemaChanged)
_MEASURED = ("frames", "table fields", "table rows", "header fields", "header text", "gap bytes told", "class rows")


class Wrong(Exception):
    """What the codec did is wrong."""


@dataclass
class Tally:
    """What ran: mutations by kind, of these with the sums recomputed, outcomes by kind or error class, failures."""

    mutations: Counter[str] = field(default_factory=Counter)
    sealed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    failures: list[str] = field(default_factory=list)

    def missing(self) -> list[str]:
        """Kinds of mutation that did not run."""
        return [name for name in KINDS if not self.mutations[name]]


class Watch:
    """Ends the process when one payload takes longer than `limit` seconds, saying which: a kernel that never returns
    can be ended in no other way."""

    def __init__(self, limit: float = HANGS) -> None:
        self._limit, self._what, self._since = limit, "", time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begins(self, what: str) -> None:
        """A payload, in words."""
        self._what, self._since = what, time.monotonic()

    def _look(self) -> None:
        while not self._stop.wait(1):
            if time.monotonic() - self._since > self._limit:
                print(f"HANGS: {self._what} for more than {self._limit:.0f} s", file=sys.stderr, flush=True)
                os._exit(3)


def play(seed: int, tally: Tally, watch: Watch | None = None, payloads: int = PER_SEED) -> None:
    """Draw the sample of a seed, mutate its payload `payloads` times, and count what came of it."""
    rng = Random(seed)
    names = [name for name, kind in KINDS.items() for _ in range(1 + (kind.make.__module__ == inner.__name__))]
    with sample(seed) as drawn, _sums_told() as told:
        done = 0
        while done < payloads:
            name = rng.choice(names)
            made = KINDS[name].make(rng, drawn)
            number = rng.random()
            if made is None or made == drawn.payload:
                continue
            done += 1
            tally.mutations[name] += 1
            if watch is not None:
                watch.begins(f"seed {seed}, payload {done} ({name})")
            told.clear()
            for sealed in (False, True):
                bad = made if not sealed else _sealed(made, drawn) if told else None
                if bad is None:
                    continue
                tally.sealed[name] += sealed
                try:
                    _judge(bad, drawn, tally, name, sealed=sealed, extra=number < 0.05)
                except Wrong as wrong:
                    tally.failures.append(f"seed {seed}, payload {done} ({name}{', sealed' * sealed}): {wrong}")
                    drawn.buffer[:] = drawn.before


@contextmanager
def _sums_told() -> Iterator[list[str]]:
    """Lists what was refused for its sums."""
    check, told = reading._compare, list[str]()

    def compare(*arguments: Any) -> None:
        try:
            check(*arguments)
        except DeltawireError as error:
            told.append(str(error))
            raise

    with patch.object(reading, "_compare", compare):
        yield told


def _sealed(payload: bytes, sample: Sample) -> bytes | None:
    """The payload with the sums that it would have to declare, so that everything before them must refuse it if
    anything does; None when something does."""
    found: list[tuple[Sums, Sums]] = []

    def note(entry: Any, removed: Sums | None, added: Sums) -> None:
        assert removed is not None
        found.append((removed, added))

    try:
        with patch.object(reading, "_compare", note):
            decode(payload, sample.schema, sample.state, threads=1)
    except DeltawireError:
        return None
    except Exception:  # noqa: BLE001 - the same happens, and is reported, without the hook
        return None
    entry = parse_header(payload, "sealed")[1].get("sums")
    if entry is None:
        return None
    told = b"".join(n.to_bytes(8, "little") for pair in found for sums in pair for n in sums)
    return payload[: entry.start] + told + payload[entry.end :]


def _judge(bad: bytes, sample: Sample, tally: Tally, name: str, *, sealed: bool, extra: bool) -> None:
    measure = extra or name in _MEASURED
    error = _applied(bad, sample, tally, measure=measure)
    after = bytes(sample.buffer)
    if error is not None:
        tally.refused[type(error).__name__] += 1
        if after != sample.before:
            raise Wrong(f"the state changed although {error!r} was raised")
        if not isinstance(error, TYPED):
            raise Wrong(f"an error that is none of the format's: {error!r}")
        if sealed:
            raise Wrong(f"refused with the sums that it was decoded to: {error!r}")
        return
    sample.buffer[:] = sample.before
    tally.accepted[name] += 1
    try:
        said = sample.said(bad)
    except oracle.Refused as refused:
        raise Wrong(f"accepted, though it breaks the format ({refused})") from None
    if said != after:
        raise Wrong("accepted, and something else was written than it says")
    if KINDS[name].same and not sealed and after != sample.after:
        raise Wrong("accepted, though it says something else than the payload that it was made from")
    if extra:
        _change_adds_up(bad, sample, after)
        _without_base(bad, sample, after)


def _applied(bad: bytes, sample: Sample, tally: Tally, *, measure: bool) -> BaseException | None:
    """Apply to the sample's buffer; the error. Measured payloads may not take more memory than 40 bytes per byte of
    theirs, 16 per byte of the state and 1 MiB."""
    limit = 40 * len(bad) + 16 * state_bytes(sample.schema) + (1 << 20)
    error, peak = _traced(bad, sample) if measure else (_plain(bad, sample), 0)
    if peak > limit:  # a kernel may have been compiled meanwhile
        sample.buffer[:] = sample.before
        error, peak = _traced(bad, sample)
    tally.measured += measure
    if peak > limit:
        raise Wrong(f"took {peak:,} bytes of memory for a payload of {len(bad):,}, at most {limit:,} are its due")
    return error


def _plain(bad: bytes, sample: Sample) -> BaseException | None:
    try:
        apply_delta(sample.state, bad, sample.schema, threads=1)
    except Exception as error:  # noqa: BLE001 - judged by the caller
        return error
    return None


def _traced(bad: bytes, sample: Sample) -> tuple[BaseException | None, int]:
    tracemalloc.start()
    try:
        return _plain(bad, sample), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _without_base(payload: bytes, sample: Sample, after: bytes) -> None:
    """A payload that is accepted does the same without a base, or asks for one."""
    try:
        patches = decode(payload, sample.schema, None, threads=1).patches
    except BaseMismatch:
        return
    for name, (index, values) in patches.items():
        scatter(sample.state[name], index, values)
    found, sample.buffer[:] = bytes(sample.buffer), sample.before
    if found != after:
        raise Wrong("without a base something else is read")


def _change_adds_up(payload: bytes, sample: Sample, after: bytes) -> None:
    """What a payload says it adds to the digest is what the digest moves by; two threads find the same."""
    before = state_sums(sample.state, sample.schema, threads=1)
    change = decode(payload, sample.schema, sample.state, threads=2).change
    sample.buffer[:] = after
    now = state_sums(sample.state, sample.schema, threads=1)
    sample.buffer[:] = sample.before
    if moved(before, change) != now:
        raise Wrong("the digest moves by something else than decode says")
