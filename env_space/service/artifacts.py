"""Follows the curriculum channel of a run's bucket in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sync.artifacts import ArtifactFollower
from sync.errors import DeltawireError
from sync.schema.artifacts import Curriculum
from sync.schema.base import Identity
from sync.stores import open_store

Found = Callable[[Identity, Curriculum], None]
Trouble = Callable[[str], None]


class CurriculumThread:
    """Polls the bucket at `url` every `seconds`; calls `found` with each new version, `trouble` with each error.

    `trouble` gets an empty text when the error is over.
    Both are called in its own thread. A bad newest version is trouble and leaves the last good one in use.
    """

    def __init__(self, url: str, seconds: float, found: Found, trouble: Trouble) -> None:
        self._url = url
        self._seconds = seconds
        self._found = found
        self._trouble = trouble
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"curriculum of {url}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after the poll it is in."""
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        seen: Identity | None = None
        broken = False
        follower: ArtifactFollower | None = None
        while not self._stop.is_set():
            try:
                follower = follower or ArtifactFollower(open_store(self._url), "curriculum")
                newest = follower.poll().get("curriculum")
            except DeltawireError as error:
                self._trouble(f"curriculum channel of {self._url}: {error}")
                broken = True
            else:
                if broken:
                    self._trouble("")
                    broken = False
                if newest is not None and newest[0] != seen and isinstance(newest[1], Curriculum):
                    seen = newest[0]
                    self._found(seen, newest[1])
            self._stop.wait(self._seconds)
