"""The shipped environments, by name."""

from __future__ import annotations

from sync.errors import InvalidRequest

from .base import Environment, Turn
from .countdown import Countdown
from .guess import Guess
from .reverse_text import ReverseText
from .sort import Sort
from .wordle import Wordle

REMOTE = "openenv:"
"""What the name of an environment on an OpenEnv server begins with."""
ENVIRONMENTS: dict[str, type[Environment]] = {cls.name: cls for cls in (Countdown, Guess, ReverseText, Sort, Wordle)}


def environment(name: str) -> type[Environment]:
    """The environment class of that name, or of an OpenEnv server named `openenv:URL`; raises InvalidRequest listing
    the known ones."""
    if name.startswith(REMOTE):
        from ..openenv.client import remote

        return remote(name)
    found = ENVIRONMENTS.get(name)
    if found is None:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise InvalidRequest(f"environment: {name[:64]!r} is unknown; known: {known}", code="unknown_environment")
    return found


__all__ = ["ENVIRONMENTS", "REMOTE", "Environment", "Turn", "environment"]
