"""What the inspector's own routes answer, as models; see `env_space/service/channels.py` for their meaning."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class TaskStats(BaseModel):
    """One task's stored rollouts; `reward` and `success` are None where no rollout knows them."""

    environment: str
    task: str
    rollouts: int
    rewarded: int
    reward: float | None
    success: float | None


class Summary(BaseModel):
    """Every task that has stored rollouts."""

    tasks: tuple[TaskStats, ...]


class EnvironmentInfo(BaseModel):
    """One environment that the Space can roll."""

    name: str
    about: str
    max_turns: int
    tasks: int


class Environments(BaseModel):
    """All of them."""

    environments: tuple[EnvironmentInfo, ...]


class Tasks(BaseModel):
    """The task keys of one environment."""

    environment: str
    tasks: tuple[str, ...]


class Window(BaseModel):
    """Some consecutive rollouts of a run: means, counts, and seconds per stage of a sample."""

    rollouts: int
    to: float
    reward: float | None
    statuses: dict[str, int]
    lag: float | None
    tokens: int
    seconds: dict[str, float]


class Series(BaseModel):
    """Windows per run, oldest first."""

    runs: dict[str, tuple[Window, ...]]


class VersionLine(BaseModel):
    """One version of a channel; what its manifest says is None or missing where that cannot be read (`error`)."""

    version: str
    kind: str
    bytes: int
    digest: str
    age: float | None = None
    step: int | None = None
    harness: dict[str, list[str]] = {}
    measured_against: str | None = None
    error: str = ""


class ChannelLine(BaseModel):
    """One channel of a run; `live` counts versions, `versions` holds the newest of them."""

    channel: str
    head: str | None
    writer: str
    closed: bool
    split: bool
    live: int
    versions: tuple[VersionLine, ...]


class Channels(BaseModel):
    """All channels of a run's bucket."""

    url: str
    channels: tuple[ChannelLine, ...]


class Artifact(BaseModel):
    """One version of an artifact channel, checked."""

    channel: str
    version: str
    document: dict[str, Any]


class GroupIds(BaseModel):
    """The rollouts of a group, in order."""

    rollouts: tuple[str, ...]
