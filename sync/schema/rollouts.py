"""HTTP bodies of an environment Space: runs, leases, rollouts, status. See also `sync/chains.py` for assembly."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import IdentityText, Wire
from .calls import Ids, Message, Temperature, VersionSpan

RolloutStatus = Literal["done", "truncated", "timeout", "env_error", "agent_error", "no_reward"]
MAX_ENVIRONMENT = 512
"""Characters of an environment's name, which may be a URL."""
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class HarnessVersions(Wire):
    """The artifact versions that a group pinned at its creation (None: that channel has no version)."""

    curriculum: IdentityText | None = None
    guidance: IdentityText | None = None
    rubric: IdentityText | None = None


class Chain(Wire):
    """Token ids of calls whose prompt extends the one before, with per-token truth; all lists have one length.

    mask: 1 = sampled by the policy and trainable, 0 = context. logprobs: the engine's own, 0.0 where mask is 0.
    weight_versions: spans over positions of `ids` that were sampled.
    """

    ids: Ids
    mask: tuple[Literal[0, 1], ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[VersionSpan, ...]

    @model_validator(mode="after")
    def _same_length(self) -> Chain:
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(
                f"ids, mask and logprobs differ in length: {len(self.ids)}, {len(self.mask)}, {len(self.logprobs)}"
            )
        covered = 0
        for span in self.weight_versions:
            if span.start >= span.end or span.end > len(self.ids) or span.start < covered:
                raise ValueError(f"weight version span {span.start}..{span.end} is empty, overlaps or leaves the ids")
            covered = span.end
        if sum(self.mask) > sum(s.end - s.start for s in self.weight_versions):
            raise ValueError("a trained token has no weights version")
        return self


class Rollout(Wire):
    """One episode: its chains, its reward (None is unknown, never 0), and everything it was made with."""

    id: Name
    run: Name
    group: Name
    index: int = Field(ge=0)
    task: str
    environment: str
    status: RolloutStatus
    reward: float | None
    rewards: dict[str, float] = {}
    success: bool | None = None
    chains: tuple[Chain, ...] = ()
    messages: tuple[Message, ...] = ()
    findings: tuple[str, ...] = ()
    harness: HarnessVersions = HarnessVersions()
    version_min: IdentityText | None = None
    version_max: IdentityText | None = None
    seconds: dict[str, float] = {}
    created_at: float = 0.0

    @property
    def trainable_tokens(self) -> int:
        """Tokens with mask 1 over all chains."""
        return sum(sum(chain.mask) for chain in self.chains)

    @property
    def usable(self) -> bool:
        """True when it has a reward and at least one trainable token."""
        return self.reward is not None and self.trainable_tokens > 0


class Group(Wire):
    """The rollouts of one task, delivered together. `usable` rollouts enter advantages, the others are counted."""

    id: Name
    run: Name
    task: str
    harness: HarnessVersions = HarnessVersions()
    rollouts: tuple[Rollout, ...]


class RunRequest(Wire):
    """What to roll: an environment, a policy, and how much at once. Posting the same name and body again is a no-op.

    `purpose` training rolls groups for ever; evaluation rolls `tasks` fixed tasks (drawn from `seed`, without
    curriculum) once each and then is complete. `artifacts` is a run URL whose curriculum channel is followed.
    `ready_groups` bounds what waits for the trainer: beyond it nothing new is started (backpressure).
    """

    name: Name
    environment: str = Field(min_length=1, max_length=MAX_ENVIRONMENT)
    policy_url: str = Field(min_length=1, max_length=2_048, pattern=r"^https?://")
    purpose: Literal["training", "evaluation"] = "training"
    group_size: int = Field(default=8, ge=1, le=1_024)
    concurrent_groups: int = Field(default=32, ge=1, le=4_096)
    ready_groups: int = Field(default=64, ge=1, le=65_536)
    tasks: int | None = Field(default=None, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    temperature: Temperature = 1.0
    max_tokens: int = Field(default=16, ge=1, le=65_536)
    artifacts: str | None = Field(default=None, max_length=2_048)

    @model_validator(mode="after")
    def _evaluation_is_bounded(self) -> RunRequest:
        if self.purpose == "evaluation" and self.tasks is None:
            raise ValueError("an evaluation run needs `tasks`, the number of fixed tasks")
        return self


class RunInfo(Wire):
    """One run's counters. rollouts_* count rollouts, groups_* groups; `complete` is for evaluations only."""

    name: Name
    environment: str
    purpose: str
    complete: bool = False
    groups_started: int = 0
    groups_active: int = 0
    groups_ready: int = 0
    groups_leased: int = 0
    groups_acked: int = 0
    groups_dropped: int = 0
    rollouts_done: int = 0
    infrastructure_failures: int = 0
    redelivered: int = 0
    curriculum: IdentityText | None = None
    last_error: str = ""


class LeaseResponse(Wire):
    """Whole groups leased to the caller until `seconds` from now; unacked groups then come again, same ids."""

    boot_id: str
    lease: str | None
    seconds: float
    groups: tuple[Group, ...]
    complete: bool = False


class AckRequest(Wire):
    """Group ids that need not come again. Unknown and already acked ids are ignored and counted."""

    groups: Annotated[tuple[Name, ...], Field(min_length=1, max_length=65_536)]


class RenewRequest(Wire):
    """Group ids whose lease shall start anew."""

    groups: Annotated[tuple[Name, ...], Field(min_length=1, max_length=65_536)]


class AckResponse(Wire):
    """How many of the named groups were changed, and how many were unknown or already acked."""

    changed: int
    ignored: int


class RolloutSummary(Wire):
    """A line of the rollout list; `tokens` counts trainable tokens over all chains."""

    id: Name
    run: Name
    group: Name
    task: str
    environment: str
    status: RolloutStatus
    reward: float | None
    success: bool | None
    version_min: IdentityText | None
    version_max: IdentityText | None
    tokens: int
    created_at: float


class RolloutPage(Wire):
    """Newest first; `total` counts all stored rollouts that match."""

    total: int
    rollouts: tuple[RolloutSummary, ...]


class ServiceStatus(Wire):
    """The environment Space at a glance. A new boot_id means a restart; `restored` rollouts survived on disk."""

    boot_id: str
    started_at: float
    environments: tuple[str, ...]
    runs: tuple[RunInfo, ...]
    restored_rollouts: int = 0
    stage_active: dict[str, int] = {}
    stage_seconds: dict[str, float] = {}
    backpressure: bool = False
    calls: int = 0
    output_tokens: int = 0
    policy_wait_seconds: float = 0.0
    refused_requests: int = 0
