"""Sort five letters in one answer."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import user
from .letters import LETTERS, Letters

LENGTH = 5


class Sort(Letters):
    """Five letters in order; rewards as of `Letters`."""

    name: ClassVar[str] = "sort"

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """distinct: five different letters; repeats: at least one letter occurs twice."""
        return ("distinct", "repeats")

    def reset(self, task: str, rng: Random) -> list[Message]:
        """Draw five letters of a..p; raises ValueError for an unknown task key."""
        if task not in self.tasks():
            raise ValueError(f"unknown sort task {task!r}; known: {', '.join(self.tasks())}")
        letters = rng.sample(LETTERS, LENGTH)
        if task == "repeats":
            letters = rng.choices(LETTERS, k=LENGTH - 1)
            letters.insert(rng.randrange(LENGTH), rng.choice(letters))
        self._expected, self._answer = "".join(sorted(letters)), ""
        return [user("sort " + " ".join(letters))]
