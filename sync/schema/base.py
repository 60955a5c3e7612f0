"""The base of every wire model, and the identity type they share."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, StringConstraints

FORMAT = 1

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
WriterId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
ChannelName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
IdentityText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}@[0-9]{1,6}$")]


class Wire(BaseModel):
    """Frozen model that rejects unknown keys and never holds NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Identity(NamedTuple):
    """One version of a channel: ordered by (epoch, version), printed `12@2` for version 12 of epoch 2."""

    epoch: int
    version: int

    def __str__(self) -> str:
        """Print as `version@epoch`."""
        return f"{self.version}@{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Parse `version@epoch`; raises ValueError for anything else."""
        match = re.fullmatch(r"([0-9]{1,10})@([0-9]{1,6})", text)
        if match is None:
            raise ValueError(f"{text!r} is not an identity like 12@2 (version@epoch)")
        return cls(int(match[2]), int(match[1]))
