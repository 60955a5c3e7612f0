"""What a follower needs of an engine: load, pause, scatter, read back, resume. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .schema.base import Identity
from .tensors import Bits

TensorPatch = tuple[NDArray[np.integer[Any]] | None, Bits]
"""Flat indices (strictly increasing; None: the whole tensor) and the bits to stand there."""


class EngineSink(Protocol):
    """The side of an engine that the follower drives, from the follower's thread."""

    def load(self, folder: Path, identity: Identity) -> None:
        """Load an ordinary checkpoint folder and stay paused. Must not alias the files' memory afterwards."""
        ...

    def pause(self) -> None:
        """Return when no forward pass is running; calls in flight wait."""
        ...

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """Scatter in place while paused. Raises before the first write when a name or index is unknown."""
        ...

    def read(self, name: str, index: NDArray[np.integer[Any]] | None) -> Bits:
        """The bits that the engine holds at flat `index` (None: the whole tensor, flat)."""
        ...

    def resume(self) -> None:
        """Go on serving."""
        ...
