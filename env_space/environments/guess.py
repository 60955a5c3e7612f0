"""Guess a number from 1 to 7 in three guesses; binary search always finds it."""

from __future__ import annotations

import re
from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import Environment, Turn, assistant, user

LOW, HIGH, GUESSES = 1, 7, 3
NOISE = 0.6


class Guess(Environment):
    """Reward 1 when found; else 0.1 for each guess that agreed with all feedback before it.

    A turn that is not one digit from 1 to 7 ends the episode with reward -0.2 whatever came before.
    """

    name: ClassVar[str] = "guess"
    max_turns: ClassVar[int] = GUESSES
    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, secret: int) -> None:
        self._secret = secret
        self._low, self._high = LOW, HIGH
        self._guesses = self._consistent = 0
        self._found = self._malformed = False

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """One key per secret: secret-1 … secret-7."""
        return tuple(f"secret-{n}" for n in range(LOW, HIGH + 1))

    def reset(self, task: str, rng: Random) -> list[Message]:  # noqa: ARG002 - the task is the instance
        """The secret is in the task key; the opening is always the same. Raises ValueError for another key."""
        if task not in self.tasks():
            raise ValueError(f"unknown guess task {task!r}; known: {', '.join(self.tasks())}")
        self._begin(int(task.removeprefix("secret-")))
        return [user(f"guess {LOW}-{HIGH}")]

    def step(self, text: str) -> Turn:
        """Answer a guess with higher, lower or correct; done when found, malformed or out of guesses."""
        said = text.strip()
        if not re.fullmatch(rf"[{LOW}-{HIGH}]", said):
            self._malformed = True
            return Turn((user("malformed"),), done=True)
        guess = int(said)
        self._guesses += 1
        self._consistent += self._low <= guess <= self._high
        if guess == self._secret:
            self._found = True
            return Turn((user("correct"),), done=True)
        higher = guess < self._secret
        if higher:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return Turn((user("higher" if higher else "lower"),), done=self._guesses == GUESSES)

    def reward(self) -> dict[str, float]:
        """Parts: found (0 or 1), consistent (0.1 a guess), malformed (0 or -0.2)."""
        found, consistent = float(self._found), 0.1 * self._consistent
        malformed = -0.2 if self._malformed else 0.0
        total = malformed or found or consistent
        return {"reward": total, "found": found, "consistent": consistent, "malformed": malformed}

    def success(self) -> bool:
        """True when the secret was guessed."""
        return self._found

    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        """Binary search where each guess is replaced by a uniform one from 1..7 with probability 0.6."""
        messages = self.reset(task, rng)
        while True:
            middle = (self._low + self._high) // 2
            guess = str(rng.randint(LOW, HIGH) if rng.random() < NOISE else middle)
            turn = self.step(guess)
            messages.append(assistant(guess))
            if turn.done:
                return messages
            messages += turn.messages
