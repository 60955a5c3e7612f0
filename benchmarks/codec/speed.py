"""Times as ratios of two things done one after the other, many times: the machine's own drift touches both."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sync.codec import CODECS, apply_delta, diff, encode_delta
from sync.digest import change_sums, state_digest
from sync.tensors import Bits, state_bytes
from sync.threads import in_order

from .measure import restore
from .states import Pair

Work = Callable[[], object]
FREE = 1.7
"""What two threads of hashing must gain for a second processor to count as free."""
_ATTEMPTS = 6


class Spread(NamedTuple):
    """The median, the lowest and the highest of so many rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of one value per round."""
        return cls(statistics.median(values), min(values), max(values), len(values))


class Speeds:
    """Measures one pair of states. Whatever is timed finds the target as the old state; restoring it is not timed."""

    def __init__(self, pair: Pair, rounds: int) -> None:
        self.pair, self.rounds = pair, rounds
        self.target: dict[str, Bits] = {name: array.copy() for name, array in pair.old.items()}
        self.payloads = {codec: encode_delta(pair.old, pair.new, codec, pair.schema) for codec in CODECS}
        self.patch = diff(pair.old, pair.new, pair.schema)

    def measure(self) -> dict[str, Any]:
        """The figures of this pair.

        ratios: name → Spread. "<codec> encode|apply, <n> thread(s)", the digest, `.copy()`: time of copying the state
        into another in place with numpy, over the time of the work (1 is the speed of that copy). "…, 2 threads / 1":
        time of one thread over that of two, see `_scaling`. "incremental digest": its time over that of decoding and
        applying. gigabytes_per_second: name → bytes of the full state over the median time.
        """
        ratios: dict[str, Spread] = {}
        rates: dict[str, float] = {}
        full = state_bytes(self.pair.schema)

        def against_copy(name: str, work: Work) -> None:
            ratios[name], copy, mine = self._interleaved(self._copy, work)
            rates[name], rates["numpy copy in place"] = full / mine / 1e9, full / copy / 1e9

        for codec in CODECS:
            for what, work in (("encode", self._encode), ("apply", self._apply)):
                for threads in (1, 2):
                    against_copy(f"{codec} {what}, {threads} thread{'s' * (threads > 1)}", work(codec, threads))
                ratios[f"{codec} {what}, 2 threads / 1"] = self._scaling(work(codec, 1), work(codec, 2))
        for codec in CODECS:
            ratios[f"incremental digest / {codec} apply"], *_ = self._interleaved(self._sums, self._apply(codec, 1))
        for threads in (1, 2):
            against_copy(f"full digest, {threads} thread{'s' * (threads > 1)}", self._digest(threads))
        ratios["full digest, 2 threads / 1"] = self._scaling(self._digest(1), self._digest(2))
        against_copy("numpy .copy()", lambda: [array.copy() for array in self.pair.old.values()])
        return {
            "case": self.pair.name,
            "ratios": {name: spread._asdict() for name, spread in ratios.items()},
            "gigabytes_per_second": rates,
        }

    def _interleaved(self, first: Work, second: Work) -> tuple[Spread, float, float]:
        """The ratio first/second over the rounds, and both median times (seconds). Who begins changes every round."""
        self._timed(first), self._timed(second)
        times: list[tuple[float, float]] = []
        for n in range(self.rounds):
            if n % 2:
                other = self._timed(second)
                times.append((self._timed(first), other))
            else:
                one = self._timed(first)
                times.append((one, self._timed(second)))
        ratio = Spread.of([one / other for one, other in times])
        return ratio, statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

    def _scaling(self, one: Work, two: Work) -> Spread:
        """Time of one thread over that of two, of the rounds in which a second processor was free: hashing gained
        enough from a second thread just before and just after (FREE). `rounds` is how many there were, of six times as
        many as asked for; when none, the spread is that of the others."""
        counted, others = list[float](), list[float]()
        for n in range(_ATTEMPTS * self.rounds):
            before = _gain_of_hashing()
            first, second = (one, two) if n % 2 else (two, one)
            times = (self._timed(first), self._timed(second))
            ratio = times[0] / times[1] if n % 2 else times[1] / times[0]
            (counted if min(before, _gain_of_hashing()) >= FREE else others).append(ratio)
            if len(counted) == self.rounds:
                break
        return Spread.of(counted or others)._replace(rounds=len(counted))

    def _timed(self, work: Work) -> float:
        restore(self.target, self.pair.old)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _copy(self) -> None:
        for name, array in self.pair.new.items():
            np.copyto(self.target[name], array)

    def _encode(self, codec: str, threads: int) -> Work:
        pair = self.pair
        return lambda: encode_delta(pair.old, pair.new, codec, pair.schema, threads=threads)

    def _apply(self, codec: str, threads: int) -> Work:
        return lambda: apply_delta(self.target, self.payloads[codec], self.pair.schema, threads=threads)

    def _digest(self, threads: int) -> Work:
        return lambda: state_digest(self.pair.old, self.pair.schema, threads=threads)

    def _sums(self) -> None:
        """The digest's whole work on a delta, old and new values in hand: one pass over the changes."""
        for name, one in self.patch.items():
            change_sums(name, one.index, one.old, one.new)


_HASHED = bytes(16_000_000)


def _gain_of_hashing() -> float:
    """Time of one thread over that of two, to hash 16 MB twice: near 2 where a second processor is free."""
    times = []
    for threads in (1, 2):
        start = time.perf_counter()
        list(in_order(lambda _: hashlib.sha256(_HASHED).digest(), range(2), threads))
        times.append(time.perf_counter() - start)
    return times[0] / times[1]
