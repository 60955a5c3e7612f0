"""Which task the next group rolls. Pure: seed, number and weights in, task key out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from sync.errors import InvalidRequest
from sync.schema.artifacts import Curriculum


def cumulative_weights(curriculum: Curriculum, environment: str, tasks: Sequence[str]) -> list[float]:
    """Running sums of the weights of `tasks`.

    Raises InvalidRequest when the curriculum is for another environment or gives every task the weight 0.
    """
    if curriculum.environment != environment:
        raise InvalidRequest(f"curriculum is for environment {curriculum.environment!r}, the run rolls {environment!r}")
    entries, default = curriculum.tasks, curriculum.default_weight
    sums = list(accumulate(entries[task].weight if task in entries else default for task in tasks))
    if sums[-1] <= 0:
        raise InvalidRequest("curriculum gives every task the weight 0; give at least one task a positive weight")
    return sums


def draw_task(tasks: Sequence[str], seed: int, number: int, cumulative: Sequence[float] | None) -> str:
    """The task of training group `number`: by weight, or uniformly without weights."""
    return Random(f"{seed}:{number}:task").choices(tasks, cum_weights=cumulative)[0]


def fixed_task(tasks: Sequence[str], seed: int, number: int) -> str:
    """The task of evaluation group `number`: every key comes once before any comes again."""
    round_number, at = divmod(number, len(tasks))
    order = list(tasks)
    Random(f"{seed}:{round_number}:order").shuffle(order)
    return order[at]
