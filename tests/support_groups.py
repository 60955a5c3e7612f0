"""Delivered groups for tests of the trainer: rollouts whose tokens, masks and versions are written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sync.schema.calls import Message, VersionSpan
from sync.schema.rollouts import Chain, Group, HarnessVersions, Rollout


def chain(ids: Sequence[int], mask: Sequence[int], version: str = "0@1") -> Chain:
    """A chain whose sampled tokens are all of one version; the logprob of position i is -(i + 1) / 64."""
    spans: list[VersionSpan] = []
    for at, sampled in enumerate(mask):
        if sampled and spans and spans[-1].end == at:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=at + 1)
        elif sampled:
            spans.append(VersionSpan(version=version, start=at, end=at + 1))
    logprobs = [-(at + 1) / 64 if sampled else 0.0 for at, sampled in enumerate(mask)]
    return Chain.model_validate({"ids": ids, "mask": mask, "logprobs": logprobs, "weight_versions": spans})


def rollout(group: str, index: int, reward: float | None, *chains: Chain, **changes: Any) -> Rollout:
    """A finished rollout of task secret-1; by default one chain of two context and two sampled tokens."""
    values: dict[str, Any] = {
        "id": f"{group}.{index}",
        "run": "r",
        "group": group,
        "index": index,
        "task": "secret-1",
        "environment": "guess",
        "status": "done",
        "reward": reward,
        "success": None if reward is None else reward == 1.0,
        "chains": chains or (chain([5, 6, 7, 1], [0, 0, 1, 1]),),
        "messages": (Message(role="user", content="guess 1-7"), Message(role="assistant", content="4")),
    }
    return Rollout.model_validate(values | changes)


def group(name: str, rewards: Sequence[float | None], version: str = "0@1", curriculum: str | None = None) -> Group:
    """A group with one rollout per reward, each of one chain sampled with `version`."""
    made = chain([5, 6, 7, 1], [0, 0, 1, 1], version)
    harness = HarnessVersions(curriculum=curriculum)
    rollouts = tuple(rollout(name, i, reward, made, harness=harness) for i, reward in enumerate(rewards))
    return Group(id=name, run="r", task="secret-1", harness=harness, rollouts=rollouts)
