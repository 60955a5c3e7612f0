"""The codec for whole states: encode two, decode one, apply in place."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..tensors import Bits, State, TensorSpec, schema_of, unsigned
from ..threads import grouped, in_order
from .payload import BATCH, empty, encode_states
from .reading import Part, decode, decode_parts

Indexed = tuple[NDArray[np.integer[Any]] | None, Bits]
AnySchema = Mapping[str, tuple[str, tuple[int, ...]]]
_ONE_OBJECT = 1 << 62


def encode_delta(
    old: State, new: State, codec: str = "fast", schema: AnySchema | None = None, ties: Mapping[str, str] | None = None,
    *, threads: int | None = None,
) -> bytes:  # fmt: skip
    """Encode what changed from `old` to `new` (name → array) as a payload.

    codec: raw, fast or tight. schema: name → (safetensors dtype, shape), default read off `old`. ties: alias →
    canonical name; aliases are not sent. threads: None is one per processor, at most 4; 1 starts none. Raises
    SchemaChanged when the two states differ in names, shapes or dtypes.
    """
    specs = _canonical(schema_of(old, schema), ties)
    before, after = _only(old, specs, ties), _only(new, specs, ties)
    schema_of(after, specs)
    objects = encode_states(before, after, specs, codec, limit=_ONE_OBJECT, threads=threads).objects
    return objects[0] if objects else empty(codec, specs)


def decode_delta(
    payload: bytes, base: State | None, schema: AnySchema | None = None, *, threads: int | None = None
) -> dict[str, Indexed]:
    """Decode a payload to {name: (flat indices, new bits)}; a tensor sent whole gives (None, all its bits).

    base may be None for a `raw` payload when a schema is given. Raises SchemaChanged, BaseMismatch or InvalidPatch.
    """
    if base is None:
        if schema is None:
            raise InvalidRequest("without a base state the schema must be given")
        return decode(payload, {n: TensorSpec(d, tuple(s)) for n, (d, s) in schema.items()}, None).patches
    return decode(payload, schema_of(base, schema), base, threads=threads).patches


def apply_delta(
    state: MutableMapping[str, NDArray[Any]], payload: bytes, schema: AnySchema | None = None, *,
    threads: int | None = None,
) -> None:  # fmt: skip
    """Apply a payload to `state` in place. Everything is validated before the first write; same errors as decode.

    The arrays must be C-contiguous and writable, else InvalidRequest.
    """
    parts = decode_parts(payload, schema_of(state, schema), state, threads=threads)
    for part in parts:
        for k in np.flatnonzero(np.diff(part.cuts)).tolist():
            name = part.segment.pieces[k].name
            flags = state[name].flags
            if not (flags.c_contiguous and flags.writeable):
                raise InvalidRequest(f"tensor {name!r} must be a writable C-contiguous array to be patched in place")

    def write(batch: list[Part]) -> None:
        for part in batch:
            _write(part)

    for _ in in_order(write, grouped(parts, [part.segment.size for part in parts], BATCH), threads):
        pass


def _write(part: Part) -> None:
    """Write a part to the tensors that it was read from."""
    from .. import kernels

    assert part.held is not None
    if part.places is not None:
        kernels.write(part.held.addresses, part.segment.tensors, part.places, part.cuts, part.new)
        return
    for k, piece in enumerate(part.segment.pieces):
        part.held.tensors[k][piece.start : piece.stop] = part.new[part.cuts[k] : part.cuts[k + 1]]


def scatter(array: NDArray[Any], index: NDArray[np.integer[Any]] | None, values: Bits) -> None:
    """Write bits at flat indices (None: everywhere) into a C-contiguous array. Raises IndexError, writing nothing, when
    an index is out of range, ValueError when there are not as many values."""
    from .. import kernels

    flat = array.reshape(-1).view(unsigned(array.dtype.itemsize))
    if len(flat if index is None else index) != len(values):
        raise ValueError(f"{len(flat if index is None else index)} places for {len(values)} values")
    if index is None:
        flat[:] = values
    elif not kernels.put(flat, index, values):
        raise IndexError(f"an index is outside of {len(flat)} elements")


def _canonical(specs: dict[str, TensorSpec], ties: Mapping[str, str] | None) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if not ties or name not in ties}


def _only(state: State, specs: Mapping[str, TensorSpec], ties: Mapping[str, str] | None) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in state.items() if name in specs or not ties or name not in ties}
