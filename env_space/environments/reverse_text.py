"""Write a row of letters backwards in one answer."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import user
from .letters import LETTERS, Letters

LENGTHS = {"short": 4, "long": 8}


class ReverseText(Letters):
    """The letters backwards; rewards as of `Letters`."""

    name: ClassVar[str] = "reverse-text"

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """short: four letters; long: eight."""
        return tuple(LENGTHS)

    def reset(self, task: str, rng: Random) -> list[Message]:
        """Draw letters of a..p; raises ValueError for an unknown task key."""
        if task not in LENGTHS:
            raise ValueError(f"unknown reverse-text task {task!r}; known: {', '.join(LENGTHS)}")
        letters = rng.choices(LETTERS, k=LENGTHS[task])
        self._expected, self._answer = "".join(reversed(letters)), ""
        return [user("reverse " + " ".join(letters))]
