"""Which terms a process claimed itself: what a restart in the same folder may go on from."""

from __future__ import annotations

import json
from pathlib import Path

_KEPT = 64


class OwnTerms:
    """The writer ids of the last terms that a process claimed, kept in its folder: those it may go on from without a
    takeover. An id is kept before its claim is written, so a kill between the two locks nobody out.

    folder None: nothing is kept.
    """

    def __init__(self, folder: Path | None, channel: str) -> None:
        self._path = None if folder is None else folder / f"terms-{channel}.json"

    def read(self) -> tuple[str, ...]:
        """The writer ids, newest last."""
        try:
            return () if self._path is None else tuple(map(str, json.loads(self._path.read_bytes())["writers"]))
        except (OSError, ValueError, KeyError, TypeError):
            return ()

    def add(self, writer: str) -> None:
        """Keep one more."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps({"writers": [*self.read(), writer][-_KEPT:]}))
            part.replace(self._path)
