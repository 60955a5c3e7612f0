"""Harness artifacts, schema version 1: curriculum, guidance, rubric. Each is one JSON document of its own channel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from ..errors import CorruptObject
from .base import Wire

TaskKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
ARTIFACT_CHANNELS = ("curriculum", "guidance", "rubric")


class CurriculumEntry(Wire):
    """How often one task is drawn, and the evidence: groups seen, useful-pair share, success share."""

    weight: Weight
    groups: int = Field(default=0, ge=0)
    useful_share: float | None = Field(default=None, ge=0, le=1)
    success: float | None = Field(default=None, ge=0, le=1)


class Curriculum(Wire):
    """p: sampling weights over the tasks of one environment. A task that is not listed has `default_weight`."""

    schema_version: Literal[1] = 1
    environment: str = Field(min_length=1, max_length=64)
    default_weight: Weight = 1.0
    tasks: Annotated[dict[TaskKey, CurriculumEntry], Field(max_length=100_000)] = {}


class GuidanceEntry(Wire):
    """A hint mounted into the prompt of one task ("*" for every task)."""

    id: str = Field(min_length=1, max_length=64)
    task: TaskKey
    text: str = Field(max_length=8_192)


class Guidance(Wire):
    """g: hints that rollouts may be given; empty means unguided."""

    schema_version: Literal[1] = 1
    environment: str = Field(min_length=1, max_length=64)
    entries: Annotated[tuple[GuidanceEntry, ...], Field(max_length=10_000)] = ()


class Criterion(Wire):
    """One line of a rubric: what is judged, how much it counts, and from where it counts as met."""

    id: str = Field(min_length=1, max_length=64)
    text: str = Field(max_length=8_192)
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    kind: Literal["anchor", "adaptive"] = "anchor"
    polarity: Literal["positive", "negative"] = "positive"
    bar: float = Field(default=0.5, ge=0, le=1)


class Rubric(Wire):
    """c: the criteria that turn an episode into a reward; no criteria means the environment's own reward."""

    schema_version: Literal[1] = 1
    environment: str = Field(min_length=1, max_length=64)
    criteria: Annotated[tuple[Criterion, ...], Field(max_length=1_000)] = ()


Artifact = Curriculum | Guidance | Rubric
_MODELS: dict[str, type[Artifact]] = {"curriculum": Curriculum, "guidance": Guidance, "rubric": Rubric}


def parse_artifact(channel: str, data: bytes, key: str) -> Artifact:
    """Parse the document of an artifact channel.

    Raises CorruptObject naming `key` when the document is malformed or of a schema version this build cannot read.
    """
    model = _MODELS.get(channel)
    if model is None:
        raise CorruptObject(f"{key}: {channel!r} is not an artifact channel; known: {', '.join(_MODELS)}")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(p) for p in first["loc"])
        raise CorruptObject(f"{key}: not a {channel} of schema version 1: {where}: {first['msg']}") from None
