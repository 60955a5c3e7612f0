"""Time and randomness as arguments, so that simulations and tests decide both."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """now: wall seconds (information only); monotonic: seconds for deadlines; sleep; token_hex(n): n random bytes."""

    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    token_hex: Callable[[int], str] = secrets.token_hex


REAL = Clock()
