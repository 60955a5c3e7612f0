"""A share of the fuzzing with a fixed seed, and proof that it fails when a check is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import zstandard

from fuzz.judge import PER_SEED, Tally, play
from fuzz.outer import KINDS
from fuzz.run import report, run
from sync.codec import api, gaps, reading, varint
from sync.errors import InvalidPatch

pytestmark = pytest.mark.fuzz
PAYLOADS = 14_000


def test_mutated_payloads_are_refused_or_do_what_they_say() -> None:
    tally = run(20_000, payloads=PAYLOADS)
    assert tally.failures == []
    assert tally.missing() == []
    assert tally.mutations.total() >= PAYLOADS
    assert min(tally.mutations.values()) >= 10, report(tally, 1)
    assert tally.refused["InvalidPatch"] >= PAYLOADS / 2
    assert tally.refused["BaseMismatch"] >= PAYLOADS / 50
    assert tally.refused["SchemaChanged"] >= PAYLOADS / 200
    assert tally.refused.keys() == {"InvalidPatch", "BaseMismatch", "SchemaChanged"}
    assert tally.sealed.total() >= PAYLOADS / 30
    reached = [name for name in KINDS if tally.sealed[name]]
    assert len(reached) >= 18, reached  # kinds that get past all checks but the sums
    assert tally.measured >= PAYLOADS / 20


def test_a_seed_says_all_about_its_payloads() -> None:
    one, other = Tally(), Tally()
    play(77, one, payloads=60)
    play(78, Tally(), payloads=10)
    play(77, other, payloads=60)
    assert one == other
    assert one.mutations.total() == 60


def failures(says: str, most: int) -> list[str]:
    """Play seeds until a failure says that, at most so many."""
    tally = Tally()
    for seed in range(most):
        play(seed, tally)
        if any(says in failure for failure in tally.failures):
            break
    return tally.failures


def nothing(*_: Any, **__: Any) -> None:
    """No check at all."""


def range_of_gaps(raw: Any, shift: Any, low: Any, size: Any, index: Any) -> Any:
    """The kernel, allowed to go a few elements beyond the segment."""
    return KERNEL(raw, shift, low, size + 4, index)


KERNEL: Callable[..., Any] = gaps._read_gaps


def unpacked_whole(packed: bytes | memoryview, size: int) -> bytes | memoryview:
    """Whatever a frame holds."""
    if len(packed) == size:
        return packed
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    except zstandard.ZstdError:
        raise InvalidPatch("damaged") from None


def another_error(*_: Any) -> bytes:
    """What a library may raise."""
    raise ValueError("not ours")


def written_first(payload: Any, schema: Any, base: Any, **more: Any) -> Any:
    """A decoder that writes as it goes."""
    next(a for a in base.values() if a.size).reshape(-1)[:1] ^= 1
    return reading.decode_parts(payload, schema, base, **more)


@pytest.mark.parametrize(
    ("where", "name", "instead", "says"),
    [
        (reading, "_compare", nothing, "breaks the format (sums)"),
        (gaps, "_read_gaps", range_of_gaps, "beyond the segment"),
        (varint.Cursor, "finish", nothing, "left over in an entry"),
        (reading._Streams, "finish", nothing, "left over"),
        (gaps, "decompress", unpacked_whole, "bytes of memory"),
        (gaps, "decompress", another_error, "none of the format's"),
        (api, "decode_parts", written_first, "the state changed although"),
    ],
    ids=["sums", "range", "entry used up", "streams used up", "bombs", "typed", "nothing written"],
)
def test_a_missing_check_is_noticed(where: Any, name: str, instead: Any, says: str) -> None:
    assert failures(says, 2) == []
    with patch.object(where, name, instead):
        found = failures(says, 80)
    assert any(says in failure for failure in found), found
    assert all(failure.startswith("seed ") for failure in found)


def test_the_command_counts_replays_and_ends_what_hangs() -> None:
    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=150
        )

    once = python("-m", "fuzz.run", "--seed", "5", "--payloads", "1")
    assert once.returncode in (0, 2), once.stderr  # one seed need not meet every kind
    assert f"{PER_SEED} payloads mutated" in once.stdout
    assert "0 failures" in once.stdout
    hanging = (
        "import time; from fuzz.judge import Watch\nwith Watch(1) as watch:\n watch.begins('seed 5'); time.sleep(60)"
    )
    ended = python("-c", hanging)
    assert ended.returncode == 3
    assert "HANGS: seed 5" in ended.stderr
