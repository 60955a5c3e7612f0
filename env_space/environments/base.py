"""What an environment is: one instance per episode, text in, messages out, a reward or none at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import ClassVar, NamedTuple

from sync.schema.calls import Message


class Turn(NamedTuple):
    """What the environment says to one answer of the policy. After `done` nothing more is asked."""

    messages: tuple[Message, ...]
    done: bool


class Environment(ABC):
    """One episode. The service calls `reset` once, `step` per answer, then `reward` and `success`.

    The same task and an equally seeded `rng` give the same instance. Anything that a method raises ends the episode
    with status env_error and no reward. `inline` environments take microseconds and run on the event loop; others run
    in a bounded pool of threads, one method at a time, and may be abandoned at a deadline.
    """

    name: ClassVar[str]
    max_turns: ClassVar[int] = 1
    inline: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def tasks(cls) -> tuple[str, ...]:
        """Stable task keys, at least one; a curriculum weighs them."""

    @abstractmethod
    def reset(self, task: str, rng: Random) -> list[Message]:
        """Draw the instance of `task` and return the opening messages."""

    @abstractmethod
    def step(self, text: str) -> Turn:
        """Take one answer of the policy."""

    @abstractmethod
    def reward(self) -> dict[str, float] | None:
        """`{"reward": total, …named parts}` for the episode so far, or None where the reward is unknown."""

    @abstractmethod
    def success(self) -> bool:
        """True when the task was solved."""

    @abstractmethod
    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        """A whole conversation by a noisy expert, ending with an assistant message, for a supervised warm start."""


def user(text: str) -> Message:
    """A user message."""
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    """An assistant message."""
    return Message(role="assistant", content=text)
