"""Find a five-letter word in six guesses. The words are the project's own list (`words.txt`)."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from random import Random
from typing import ClassVar

from sync.schema.calls import Message

from .base import Environment, Turn, assistant, user

GUESSES, NOISE = 6, 0.3
TINY = 8
GREEN, YELLOW, GREY = "G", "Y", "-"


@cache
def words() -> tuple[str, ...]:
    """The list, in its order; the first eight are the words of the task `tiny`."""
    return tuple((files(__package__) / "words.txt").read_text().split())


def feedback(guess: str, secret: str) -> str:
    """One sign per letter: G in place, Y elsewhere, - not (again) there; a letter of the secret explains one sign."""
    signs = [GREEN if g == s else GREY for g, s in zip(guess, secret, strict=True)]
    left = [s for g, s in zip(guess, secret, strict=True) if g != s]
    for place, letter in enumerate(guess):
        if signs[place] == GREY and letter in left:
            signs[place] = YELLOW
            left.remove(letter)
    return "".join(signs)


class Wordle(Environment):
    """Reward 1 when found; else 0.1 for each letter in place in the best guess. A turn that is not five letters a..z
    ends the episode with reward -0.2. A word that is not on the list, and in task `hard` one that ignores what earlier
    feedback showed, costs a guess and shows nothing.
    """

    name: ClassVar[str] = "wordle"
    max_turns: ClassVar[int] = GUESSES
    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._begin("tiny", words()[:TINY], words()[0])

    def _begin(self, task: str, known: tuple[str, ...], secret: str) -> None:
        self._task, self._words, self._secret = task, known, secret
        self._told: list[tuple[str, str]] = []
        self._guesses = self._greens = 0
        self._found = self._malformed = False

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """tiny: one of eight words, which the opening lists; easy: one of all; hard: with hints that must be used."""
        return ("tiny", "easy", "hard")

    def reset(self, task: str, rng: Random) -> list[Message]:
        """Draw the secret. Raises ValueError for an unknown task key."""
        if task not in self.tasks():
            raise ValueError(f"unknown wordle task {task!r}; known: {', '.join(self.tasks())}")
        known = words()[:TINY] if task == "tiny" else words()
        self._begin(task, known, rng.choice(known))
        return [user(f"wordle {task}" + (f": {' '.join(known)}" if task == "tiny" else ""))]

    def step(self, text: str) -> Turn:
        """Answer a guess with its signs; done when found, malformed or out of guesses."""
        guess = text.strip().lower()
        if not re.fullmatch("[a-z]{5}", guess):
            self._malformed = True
            return Turn((user("malformed"),), done=True)
        self._guesses += 1
        last = self._guesses == GUESSES
        if guess not in self._words:
            return Turn((user("unknown word"),), done=last)
        if self._task == "hard" and (unused := unused_hint(guess, self._told)):
            return Turn((user(unused),), done=last)
        signs = feedback(guess, self._secret)
        self._told.append((guess, signs))
        self._greens = max(self._greens, signs.count(GREEN))
        self._found = guess == self._secret
        return Turn((user(signs),), done=self._found or last)

    def reward(self) -> dict[str, float]:
        """Parts: found (0 or 1), greens (0.1 a letter), malformed (0 or -0.2)."""
        found, greens = float(self._found), 0.1 * self._greens
        malformed = -0.2 if self._malformed else 0.0
        return {"reward": malformed or found or greens, "found": found, "greens": greens, "malformed": malformed}

    def success(self) -> bool:
        """True when the word was found."""
        return self._found

    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        """Guesses that agree with all feedback, each replaced with probability 0.3 by any word (in `hard` never)."""
        messages = self.reset(task, rng)
        while True:
            fits = [w for w in self._words if all(feedback(guess, w) == signs for guess, signs in self._told)]
            guess = rng.choice(self._words if task != "hard" and rng.random() < NOISE else fits)
            turn = self.step(guess)
            messages.append(assistant(guess))
            if turn.done:
                return messages
            messages += turn.messages


def unused_hint(guess: str, told: list[tuple[str, str]]) -> str:
    """What of the feedback so far a guess leaves unused, as the environment says it; empty where it uses all."""
    for before, signs in told:
        for place, (letter, sign) in enumerate(zip(before, signs, strict=True)):
            if sign == GREEN and guess[place] != letter:
                return f"letter {place + 1} must be {letter}"
        for letter in sorted(set(before)):
            shown = sum(sign != GREY for sign, own in zip(signs, before, strict=True) if own == letter)
            if guess.count(letter) < shown:
                return f"the guess must contain {letter}" + (f" {shown} times" if shown > 1 else "")
    return ""
