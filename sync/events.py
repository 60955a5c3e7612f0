"""One structured line per durable step: publish, apply, refuse, lease, restart."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from .schema.base import Identity

Emit = Callable[..., None]
_LOCK = threading.Lock()


def emitter(role: str, style: str = "text", stream: TextIO | None = None) -> Emit:
    """Return `emit(event, **facts)`, which writes one line to `stream` (standard error by default).

    style `json` gives {"time", "role", "event", …facts}, `text` the same for people, `none` nothing.
    """

    def emit(event: str, **facts: object) -> None:
        if style == "none":
            return
        facts = {k: str(v) if isinstance(v, Identity) else v for k, v in facts.items()}
        if style == "json":
            line = json.dumps({"time": round(time.time(), 3), "role": role, "event": event, **facts}, default=str)
        else:
            line = f"{role}: {event} " + " ".join(f"{k}={v}" for k, v in facts.items())
        with _LOCK:
            print(line.rstrip(), file=stream or sys.stderr, flush=True)

    return emit
