"""Settings of the trainer. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from sync.errors import ConfigError
from sync.settings import Settings


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("expected a URL like http://host:port")
    return text


Url = Annotated[str, Field(max_length=2_048), AfterValidator(_url)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class WarmStart(Settings):
    """Supervised training of the tiny model on noisy demonstrations, before reinforcement learning."""

    steps: int = Field(default=300, ge=0)
    """optimizer steps (0: no warm start)"""
    batch: int = Field(default=64, ge=1)
    """conversations per step"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """AdamW's rate at the start; it falls linearly to 0"""
    conversations: int = Field(default=4_000, ge=1, le=10_000)
    """demonstrations asked of the environment"""


class Evaluation(Settings):
    """The fixed evaluation set, rolled on a frozen policy before and after training."""

    episodes: int = Field(default=256, ge=0, le=65_536)
    """fixed episodes (0: no evaluation)"""
    seed: Seed = 20_000
    """seed that fixes them"""


class Publishing(Settings):
    """How weights are published."""

    codec: Literal["raw", "fast", "tight"] = "fast"
    """delta codec: raw is read without a base, fast is small and cheap, tight is smallest and reads the whole state"""
    compare: Literal["auto", "host", "device"] = "auto"
    """where the difference is taken; auto: on the accelerator that trains, which then holds a copy of the weights"""
    every: int = Field(default=1, ge=1)
    """optimizer steps between two offers of a version"""
    anchor_share: float = Field(default=4.0, gt=0)
    """a new anchor when the deltas since the last outweigh this many full copies"""
    keep_anchors: int = Field(default=2, ge=1)
    """anchors (and what follows the oldest of them) that are kept for late readers"""
    largest_span: int = Field(default=1024, ge=0)
    """versions in the longest merged delta, a power of two; 0 makes none"""
    grace: float = Field(default=3600.0, ge=0)
    """seconds between announcing what will be deleted and deleting it"""
    settle: float | None = Field(default=None, ge=0)
    """seconds between a claim and the look for rivals; unset: what the store needs (`deltawire doctor` measures it)"""
    takeover: bool = False
    """claim the run although another writer published less than 10 minutes ago"""


class CurriculumSettings(Settings):
    """How the curriculum follows the groups' statistics."""

    every: int = Field(default=25, ge=0)
    """optimizer steps between two curriculum versions (0: none after the first)"""
    floor: float = Field(default=0.25, gt=0, le=1)
    """least sampling weight of any task"""


class Sparsity(Settings):
    """The second measured delta size, at a learning rate that large models train with."""

    steps: int = Field(default=10, ge=0)
    """optimizer steps after training, on the last batches, not published (0: skip)"""
    learning_rate: float = Field(default=1e-6, gt=0)
    """learning rate of these steps"""


def _urls(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


class TrainConfig(Settings):
    """Everything `deltawire train` needs."""

    run: str = Field(min_length=1)
    """run URL in the bucket: file:///dir or a folder"""
    environment: str = Field(default="guess", min_length=1, max_length=512)
    """environment to train on"""
    env_urls: Annotated[tuple[Url, ...], Field(min_length=1), BeforeValidator(_urls)]
    """environment Spaces to lease rollouts from"""
    policy_url: Url
    """inference Space that the environments call, and that is told of new versions"""
    model: str = "tiny"
    """`tiny` builds a small Qwen3 here; else a checkpoint folder or Hub id"""
    out: Path = Path("runs/train")
    """folder for the model, metrics and summary.json"""
    steps: int = Field(default=260, ge=1)
    """optimizer steps"""
    seed: Seed = 0
    """seed of model, warm start and sampling"""
    learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW's rate (at the start)"""
    schedule: Literal["constant", "tail"] = "tail"
    """constant, or constant with a linear fall to a tenth over the last third of `steps` (tail)"""
    groups_per_step: int = Field(default=28, ge=1)
    """groups in one optimizer step"""
    group_size: int = Field(default=8, ge=2, le=1_024)
    """rollouts of one task"""
    micro_batches: int = Field(default=1, ge=1)
    """gradient accumulation: parts that a step's rollouts are split into"""
    temperature: float = Field(default=1.0, ge=1e-3, le=100)
    """sampling temperature, the same in loss and engine"""
    max_tokens: int = Field(default=8, ge=1, le=65_536)
    """tokens the policy may sample per call"""
    max_staleness: int = Field(default=4, ge=1)
    """syncs that the oldest version in a group may lie behind"""
    concurrent_groups: int = Field(default=48, ge=1, le=4_096)
    """groups that the environment rolls at once"""
    ready_groups: int = Field(default=32, ge=1, le=65_536)
    """groups that may wait for the trainer"""
    oversample: float = Field(default=1.5, ge=1)
    """a step is filled with zero-spread groups when this many steps' worth of groups did not give enough others"""
    peer_seconds: float = Field(default=300.0, gt=0)
    """deadline for a Space to come up, and for rollouts to arrive"""
    report: Literal["trackio", "none"] = "trackio"
    """metrics sink"""
    log: Literal["text", "json", "none"] = "text"
    """form of the event lines"""
    threads: int = Field(default=1, ge=1)
    """torch threads"""
    warm_start: WarmStart = WarmStart()
    evaluation: Evaluation = Evaluation()
    publishing: Publishing = Publishing()
    curriculum: CurriculumSettings = CurriculumSettings()
    sparsity: Sparsity = Sparsity()


def make_folder(folder: Path) -> None:
    """Make the folder for results. Raises ConfigError when it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath(".writable").touch()
        folder.joinpath(".writable").unlink()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used for results ({error.strerror}); choose another --out") from None
