"""The fixed evaluation set, rolled by an environment Space on a policy whose version must not move meanwhile."""

from __future__ import annotations

import time
from typing import NamedTuple

from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.base import Identity
from sync.schema.rollouts import AckRequest, AckResponse, Group, LeaseResponse, Rollout, RunInfo, RunRequest

from .config import TrainConfig
from .peers import Peer


class Score(NamedTuple):
    """Means over the evaluation set; `unscored` episodes (no reward) are counted apart and are in no mean."""

    success: float
    reward: float
    episodes: int
    unscored: int
    version: str


def evaluate(peer: Peer, config: TrainConfig, name: str, expected: Identity) -> Score:
    """Roll the evaluation set once and score it.

    Raises PeerUnavailable when it is not complete within `peer_seconds`, InvalidRequest when any token was sampled with
    another weights version than `expected`.
    """
    request = RunRequest(
        name=name,
        environment=config.environment,
        policy_url=config.policy_url,
        purpose="evaluation",
        group_size=1,
        tasks=config.evaluation.episodes,
        seed=config.evaluation.seed,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        concurrent_groups=256,
        ready_groups=config.evaluation.episodes,
    )
    groups: dict[str, Group] = {}
    give_up = time.monotonic() + config.peer_seconds
    trouble = "none"
    while True:
        try:
            if _take(peer, request, groups):
                return _score([r for group in groups.values() for r in group.rollouts], str(expected))
        except PeerUnavailable as error:  # a Space that is started again goes on with the evaluation
            trouble = str(error)
            time.sleep(0.5)
        if time.monotonic() > give_up:
            raise PeerUnavailable(
                f"{peer.url}: evaluation {name} gave {len(groups)} of {config.evaluation.episodes} episodes within "
                f"{config.peer_seconds:.0f} s (setting peer_seconds); last trouble: {trouble}"
            )


def _take(peer: Peer, request: RunRequest, groups: dict[str, Group]) -> bool:
    """Post the run (a no-op when it is known), lease what is ready into `groups` by id, ack; True when complete."""
    peer.post("/v1/runs", request, RunInfo)
    answer = peer.get("/v1/rollouts", LeaseResponse, seconds=60.0, run=request.name, limit=64, wait=5)
    groups.update({group.id: group for group in answer.groups})
    if answer.groups:
        peer.post("/v1/rollouts/ack", AckRequest(groups=tuple(g.id for g in answer.groups)), AckResponse)
    return answer.complete and not answer.groups


def _score(rollouts: list[Rollout], expected: str) -> Score:
    for rollout in rollouts:
        versions = {span.version for chain in rollout.chains for span in chain.weight_versions}
        if versions - {expected}:
            raise InvalidRequest(
                f"evaluation rollout {rollout.id} used weights {sorted(versions)}, expected {expected}"
            )
    scored = [r for r in rollouts if r.reward is not None]
    if not scored:
        raise InvalidRequest("the evaluation gave no scored episode; look at the inspector for the findings")
    return Score(
        success=sum(bool(r.success) for r in scored) / len(scored),
        reward=sum(r.reward or 0.0 for r in scored) / len(scored),
        episodes=len(rollouts),
        unscored=len(rollouts) - len(scored),
        version=expected,
    )
