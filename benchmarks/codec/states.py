"""Pairs of checkpoints on disk: where they are, and reading one into memory.

A pair is a folder with `old.safetensors` and `new.safetensors`, or with checkpoint folders `old/` and `new/` (any
number of `*.safetensors` files each, as `save_pretrained` writes them).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sync.errors import ConfigError
from sync.safetensors_io import MappedCheckpoint, MappedState
from sync.tensors import Bits, Schema, require_fit


class Pair(NamedTuple):
    """Two states of one schema, flat in memory of their own: a name for tables, the folder, and both states."""

    name: str
    folder: Path
    schema: Schema
    old: dict[str, Bits]
    new: dict[str, Bits]


def find_pairs(folder: Path) -> dict[str, Path]:
    """Name → folder of every pair at or below `folder`, by name. The name is the path below `folder`."""
    places = {path.parent for pattern in ("old.safetensors", "old") for path in folder.rglob(pattern)}
    found = {place for place in places if _side(place, "new").exists() and _side(place, "old").exists()}
    return {str(place.relative_to(folder)) if place != folder else place.name: place for place in sorted(found)}


def read_pair(folder: Path, name: str) -> Pair:
    """Read a pair into memory. Raises CorruptObject for a bad file, ConfigError when the two do not fit each other."""
    (old, schema), (new, other) = (_read(_side(folder, side)) for side in ("old", "new"))
    if schema != other:
        odd = sorted(n for n in schema.keys() | other.keys() if schema.get(n) != other.get(n))
        raise ConfigError(
            f"{name}: old and new differ in names, shapes or dtypes of {len(odd)} tensors, first {odd[0]!r}"
        )
    require_fit(old, schema)
    return Pair(name, folder, schema, old, new)


def _side(folder: Path, side: str) -> Path:
    file = folder / f"{side}.safetensors"
    return file if file.exists() else folder / side


def _read(path: Path) -> tuple[dict[str, Bits], Schema]:
    """Copies, so that no page of the file is mapped while memory or time is measured."""
    mapped = MappedCheckpoint(path) if path.is_dir() else MappedState(path)
    return {name: np.array(array) for name, array in mapped.state.items()}, mapped.schema
