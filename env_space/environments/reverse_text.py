"""Write a row of letters backwards in one answer."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import Environment, Turn, assistant, user

LETTERS, NOISE = "abcdefghijklmnop", 0.3
LENGTHS = {"short": 4, "long": 8}


class ReverseText(Environment):
    """Reward 0.5 × share of letters in the right place, plus 0.5 when all are; an answer of another length has 0.

    Spaces in the answer do not count.
    """

    name: ClassVar[str] = "reverse-text"
    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._expected = self._answer = ""

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

    def step(self, text: str) -> Turn:
        """Take the answer; always done."""
        self._answer = "".join(text.split())
        return Turn((), done=True)

    def reward(self) -> dict[str, float]:
        """Parts: places (at most 0.5), exact (0 or 0.5)."""
        places = 0.0
        if len(self._answer) == len(self._expected) > 0:
            same = sum(a == b for a, b in zip(self._answer, self._expected, strict=True))
            places = 0.5 * same / len(self._expected)
        exact = 0.5 * self.success()
        return {"reward": places + exact, "places": places, "exact": exact}

    def success(self) -> bool:
        """True when every letter is in place."""
        return self._answer == self._expected != ""

    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        """The right answer with each letter replaced by a uniform one with probability 0.3."""
        messages = self.reset(task, rng)
        noisy = [rng.choice(LETTERS) if rng.random() < NOISE else letter for letter in self._expected]
        return [*messages, assistant(" ".join(noisy))]
