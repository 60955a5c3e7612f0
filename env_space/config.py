"""Settings of an environment Space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sync.settings import Settings

Slots = Annotated[int, Field(ge=1, le=65_536)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Pool(Settings):
    """One stage of an episode: how many may be in it, and for how long."""

    slots: Slots = 512
    """Episodes in this stage at once."""
    seconds: Seconds = 60.0
    """Deadline of one episode in this stage; time in which the policy is away does not count."""


class Stages(Settings):
    """The stages of an episode, in order."""

    init: Pool = Pool()
    ready: Pool = Pool(slots=1_024, seconds=900.0)
    run: Pool = Pool(seconds=600.0)
    post: Pool = Pool()
    score: Pool = Pool()


class PolicyLimits(Settings):
    """How the policy is called."""

    window_ms: float = Field(default=4.0, ge=0, le=1_000)
    """Milliseconds in which calls of concurrent episodes are gathered into one request."""
    max_batch: int = Field(default=256, ge=1, le=1_024)
    """Calls in one request."""
    max_requests: int = Field(default=16, ge=1, le=1_024)
    """Requests in flight per run."""
    call_seconds: Seconds = 120.0
    """Deadline of one request; then it is sent again."""
    backoff_seconds: Seconds = 2.0
    """Longest pause between attempts while the policy is away."""
    away_seconds: Seconds = 3_600.0
    """How long a request is sent again before its episodes are given up."""


class OpenEnvLimits(Settings):
    """Episodes over OpenEnv's protocol."""

    sessions: Slots = 256
    """Sessions at once, each with one episode."""
    waiting: Slots = 1_024
    """Sessions that may wait for one to end; beyond it they are refused. With `sessions` below `max_connections`."""
    wait_seconds: Seconds = 20.0
    """How long a session waits before it is refused."""
    lease_seconds: Seconds = 300.0
    """After this time without a message a session ends, and its socket is closed."""
    reset_seconds: Seconds = 60.0
    """Deadline of one reset."""
    step_seconds: Seconds = 60.0
    """Deadline of one step or tool call."""
    max_frame_bytes: int = Field(default=4 << 20, ge=1_024, le=16 << 20)
    """Largest frame of a socket, and largest answer."""


class EnvConfig(Settings):
    """An environment Space: where it listens, what it keeps, how much it does at once."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to listen on; 0 lets the system choose."""
    folder: Path = Path("runs/env")
    """Folder of the rollout database; a restart with the same folder loses nothing."""
    stages: Stages = Stages()
    policy: PolicyLimits = PolicyLimits()
    openenv: OpenEnvLimits = OpenEnvLimits()
    group_seconds: Seconds = 900.0
    """Deadline of a group; time in which the policy is away does not count."""
    lease_seconds: Seconds = 120.0
    """After this time without ack or renewal a leased group is delivered again."""
    keep_rollouts: int = Field(default=20_000, ge=0, le=10_000_000)
    """Acked rollouts kept for browsing; the oldest are deleted."""
    max_leased: Slots = 4_096
    """Groups of one run that may be leased; beyond it no new group starts."""
    max_runs: int = Field(default=64, ge=1, le=4_096)
    """Runs that may be rolled at once."""
    max_stored_runs: int = Field(default=4_096, ge=1, le=65_536)
    """Runs that the folder may hold, ended ones included."""
    max_waiting: int = Field(default=256, ge=1, le=65_536)
    """Lease requests that may wait at once."""
    threads: int = Field(default=16, ge=1, le=1_024)
    """Threads for environments that do not run on the event loop."""
    poll_seconds: Seconds = 2.0
    """Pause between looks at the curriculum channel."""
    max_body_bytes: int = Field(default=1 << 20, ge=1_024, le=1 << 30)
    """Largest request body."""
    max_connections: int = Field(default=2_048, ge=1, le=65_536)
    """Connections open at once; beyond it one that waits for a request is closed for a new one."""
    read_seconds: Seconds = 60.0
    """Deadline for a request to arrive whole."""
    inspector: bool = True
    """Serve the inspector page at /."""
    log: Literal["text", "json", "none"] = "text"
    """Form of the lines on standard error."""
    ready_file: Path | None = None
    """Written as JSON with the url once the port is bound."""
