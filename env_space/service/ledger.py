"""Which groups wait for the trainer and which it holds. In memory, of one run; the store keeps what outlives us."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable


class Ledger:
    """READY and leased groups in the order they became READY. `clock` gives seconds that never go back.

    A lease that lapses makes its group READY again in its old place. Leases do not outlive the process.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._places = 0
        self._ready: list[tuple[int, str]] = []
        self._leased: dict[str, tuple[float, int]] = {}
        self._delivered: set[str] = set()

    @property
    def ready(self) -> int:
        """Groups that can be leased now."""
        self._lapse()
        return len(self._ready)

    @property
    def leased(self) -> int:
        """Groups that are leased now."""
        self._lapse()
        return len(self._leased)

    def add(self, group: str) -> None:
        """A group became READY."""
        self._places += 1
        heapq.heappush(self._ready, (self._places, group))

    def lease(self, limit: int, seconds: float) -> tuple[list[str], int]:
        """Up to `limit` groups, oldest first, leased for `seconds`; and how many of them were delivered before."""
        self._lapse()
        until = self._clock() + seconds
        groups: list[str] = []
        again = 0
        while self._ready and len(groups) < limit:
            place, group = heapq.heappop(self._ready)
            self._leased[group] = (until, place)
            again += group in self._delivered
            self._delivered.add(group)
            groups.append(group)
        return groups, again

    def held(self, groups: Iterable[str]) -> list[str]:
        """Those of `groups` that are READY or leased."""
        wanted = set(groups)
        return [group for group in wanted if group in self._leased] + [g for _, g in self._ready if g in wanted]

    def ack(self, groups: Iterable[str]) -> None:
        """Forget groups."""
        wanted = set(groups)
        for group in wanted:
            self._leased.pop(group, None)
        kept = [item for item in self._ready if item[1] not in wanted]
        if len(kept) < len(self._ready):
            self._ready = kept
            heapq.heapify(self._ready)
        self._delivered -= wanted

    def renew(self, groups: Iterable[str], seconds: float) -> int:
        """Let the leases of groups start anew; returns how many were leased."""
        self._lapse()
        until = self._clock() + seconds
        held = [group for group in set(groups) if group in self._leased]
        for group in held:
            self._leased[group] = (until, self._leased[group][1])
        return len(held)

    def release(self, groups: Iterable[str]) -> None:
        """Make leased groups READY again, as if their lease lapsed now."""
        for group in groups:
            if (lease := self._leased.pop(group, None)) is not None:
                heapq.heappush(self._ready, (lease[1], group))

    def next_lapse(self) -> float | None:
        """Seconds until the next lease lapses, or None."""
        self._lapse()
        ends = [until for until, _ in self._leased.values()]
        return min(ends) - self._clock() if ends else None

    def _lapse(self) -> None:
        now = self._clock()
        for group, (_, place) in [item for item in self._leased.items() if item[1][0] <= now]:
            del self._leased[group]
            heapq.heappush(self._ready, (place, group))
