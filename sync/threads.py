"""Work on independent segments in a few threads, results in order. The kernels run without the interpreter lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")
MOST_THREADS = 4


def in_order(work: Callable[[In], Out], items: Sequence[In], threads: int | None) -> Iterator[Out]:
    """`work(item)` for every item, in order, with at most two results per thread waiting.

    threads: how many; None takes one per processor this process may use, at most 4; 1 starts none.
    """
    count = min(threads or min(MOST_THREADS, _processors()), len(items))
    if count <= 1:
        yield from map(work, items)
        return
    pool = _pool(count, os.getpid())
    waiting: deque[Future[Out]] = deque()
    try:
        for item in items:
            if len(waiting) >= 2 * count:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()
    finally:  # after an error nothing goes on behind the caller's back
        wait([future for future in waiting if not future.cancel()])


def grouped(items: Sequence[In], sizes: Sequence[int], least: int) -> list[list[In]]:
    """Consecutive items in lists that weigh at least `least` each, but for the last."""
    groups: list[list[In]] = []
    held = least
    for item, size in zip(items, sizes, strict=True):
        if held >= least:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size
    return groups


@lru_cache(maxsize=MOST_THREADS)
def _pool(count: int, process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked child has none of its parent's threads
    """Threads that stay: new ones would begin with cold memory at every call."""
    return ThreadPoolExecutor(count, "codec")


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
