"""A mirror for one use: the same steps and checks as a reader's, without its promise to survive a kill."""

from __future__ import annotations

from pathlib import Path

from ..codec import scatter
from ..digest import PieceSums, moved
from ..mirror import Mirror, Patches
from ..schema.base import Identity


class Scratch(Mirror):
    """Nothing is synced to the disk, so that a long chain replays as fast as it decodes.

    looking: a step is then checked in full, and nothing is written.
    """

    def __init__(self, folder: Path) -> None:
        self.looking = False
        super().__init__(folder)

    def apply(self, patches: Patches, identity: Identity, change: PieceSums) -> None:
        """Write one version's absolute values, checked by the caller."""
        if self.looking:
            return
        for name, (index, values) in patches.items():
            scatter(self.state[name], index, values)
        self.identity, self.sums, self._pieces = identity, moved(self.sums, change), self._pieces + change

    def flush(self) -> None:
        """Nothing is kept."""

    def settle(self) -> None:
        """Bring the state's files to the disk after all."""
        super().flush()
