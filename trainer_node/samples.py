"""From delivered groups to TRL samples: checks, advantages, token classes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sync.errors import InvalidRequest
from sync.schema.base import Identity
from sync.schema.rollouts import Chain, Group, Rollout

from .advantages import grpo, has_spread, useful_pair_share
from .trl_adapter import RolloutSample

CONTEXT, ACTION = 0, 1
"""Token classes: context is never trained; action is a sampled token. Structured-call training adds further ones."""


@dataclass(slots=True)
class TokenSample(RolloutSample):  # type: ignore[misc]
    """TRL's sample with per-token truth: advantage (float32) and class (int64) of every position, and its group."""

    token_advantages: NDArray[np.float32] = None  # type: ignore[assignment]
    token_class: NDArray[np.int64] = None  # type: ignore[assignment]
    group: str = ""


class GroupFacts(NamedTuple):
    """What curriculum and batching need of a group."""

    spread: bool
    useful_share: float
    success: float


def inspect_group(group: Group, sync_of: Callable[[Identity], int | None], vocabulary: int) -> GroupFacts:
    """Check a delivered group. Raises InvalidRequest for unknown weights versions, ids outside the vocabulary, or
    nothing usable; the message names the rollout."""
    usable = _usable(group)
    if not usable:
        raise InvalidRequest(f"group {group.id} has no usable rollout")
    for rollout in usable:
        for chain in rollout.chains:
            highest = max(chain.ids, default=-1)
            if highest >= vocabulary:
                raise InvalidRequest(f"rollout {rollout.id}: token id {highest}, the vocabulary has {vocabulary}")
            for span in chain.weight_versions:
                if sync_of(Identity.parse(span.version)) is None:
                    raise InvalidRequest(
                        f"rollout {rollout.id}: weights version {span.version} is not an ancestor of this run's head"
                    )
    rewards = [r.reward for r in usable if r.reward is not None]
    success = sum(bool(r.success) for r in usable) / len(usable)
    return GroupFacts(has_spread(rewards), useful_pair_share(rewards), success)


def group_samples(group: Group, sync_of: Callable[[Identity], int | None]) -> list[TokenSample]:
    """One sample per chain of every usable rollout; all carry the sync count of the group's oldest version."""
    usable = _usable(group)
    rewards = [r.reward for r in usable if r.reward is not None]
    advantages = grpo(rewards)
    spread = float(np.std(rewards))
    oldest = min(sync_of(Identity.parse(s.version)) or 0 for r in usable for c in r.chains for s in c.weight_versions)
    samples = []
    for rollout, advantage in zip(usable, advantages, strict=True):
        metrics = {"reward": rollout.reward or 0.0, "reward_std": spread, "success": float(bool(rollout.success))}
        metrics |= {f"rewards/{name}": value for name, value in rollout.rewards.items() if name != "reward"}
        samples += [_sample(rollout, chain, advantage, oldest, metrics) for chain in rollout.chains if any(chain.mask)]
    return samples


def _usable(group: Group) -> list[Rollout]:
    return [r for r in group.rollouts if r.usable]


def _sample(rollout: Rollout, chain: Chain, advantage: float, version: int, metrics: dict[str, float]) -> TokenSample:
    mask = np.asarray(chain.mask, dtype=np.int64)
    messages = [m.model_dump() for m in rollout.messages]
    opening = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return TokenSample(
        prompt=messages[:opening],
        completion=messages[opening:],
        input_ids=np.asarray(chain.ids, dtype=np.int64),
        completion_mask=mask,
        old_log_probs=np.asarray(chain.logprobs, dtype=np.float32),
        advantage=advantage,
        model_version=version,
        group_id=zlib.crc32(rollout.group.encode()),
        metrics=metrics,
        enqueued_at=time.time(),
        token_advantages=(advantage * mask).astype(np.float32),
        token_class=mask * ACTION,
        group=rollout.group,
    )
