"""One answer of letters, judged place by place: what `sort` and `reverse-text` share."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import Environment, Turn, assistant

LETTERS, NOISE = "abcdefghijklmnop", 0.3


class Letters(Environment):
    """Reward 0.5 × share of letters in the right place, plus 0.5 when all are; an answer of another length has 0.

    Spaces in the answer do not count. `reset` sets what is expected.
    """

    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._expected = self._answer = ""

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
