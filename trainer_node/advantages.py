"""Group advantages, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence

EPSILON = 1e-4


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within one group (DeepSeekMath, Shao et al. 2024, section 4.1.2).

    std is the sample standard deviation (n - 1), as TRL computes it; a group of one or without spread gives zeros.
    """
    n = len(rewards)
    if n < 2:
        return [0.0] * n
    mean = sum(rewards) / n
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
    return [(r - mean) / (std + EPSILON) for r in rewards]


def useful_pair_share(rewards: Sequence[float]) -> float:
    """Share of the pairs in a group whose rewards differ: what a group can teach (0 without any, 1 at the most)."""
    n = len(rewards)
    if n < 2:
        return 0.0
    pairs = n * (n - 1) // 2
    return sum(a != b for i, a in enumerate(rewards) for b in rewards[:i]) / pairs


def has_spread(rewards: Sequence[float]) -> bool:
    """True when not all rewards of a group are equal, so that advantages are not all zero."""
    return any(r != rewards[0] for r in rewards[1:])
