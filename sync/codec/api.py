"""The codec for whole states: encode two, decode one, apply in place."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..tensors import Bits, State, TensorSpec, bits, schema_of, unsigned
from .patch import diff, patched
from .payload import decode, encode

Indexed = tuple[NDArray[np.integer[Any]] | None, Bits]
AnySchema = Mapping[str, tuple[str, tuple[int, ...]]]


def encode_delta(
    old: State, new: State, codec: str = "fast", schema: AnySchema | None = None, ties: Mapping[str, str] | None = None
) -> bytes:
    """Encode what changed from `old` to `new` (name → array) as a payload.

    schema: name → (safetensors dtype, shape), default read off `old`. ties: alias → canonical name; aliases are not
    sent. Raises SchemaChanged when the two states differ in names, shapes or dtypes.
    """
    specs = _canonical(schema_of(old, schema), ties)
    before, after = _only(old, specs, ties), _only(new, specs, ties)
    schema_of(after, specs)
    patch = diff(before, after, specs)
    return encode(patch, specs, codec, lambda name: patched(bits(before[name]), patch[name]), before).data


def decode_delta(payload: bytes, base: State | None, schema: AnySchema | None = None) -> dict[str, Indexed]:
    """Decode a payload to {name: (flat indices, new bits)}; a tensor sent whole gives (None, all its bits).

    base may be None for a `raw` payload when a schema is given. Raises SchemaChanged, BaseMismatch or InvalidPatch.
    """
    if base is None:
        if schema is None:
            raise InvalidRequest("without a base state the schema must be given")
        return decode(payload, {n: TensorSpec(d, tuple(s)) for n, (d, s) in schema.items()}, None).patches
    return decode(payload, schema_of(base, schema), base).patches


def apply_delta(state: MutableMapping[str, NDArray[Any]], payload: bytes, schema: AnySchema | None = None) -> None:
    """Apply a payload to `state` in place. Everything is validated before the first write; same errors as decode.

    The arrays must be C-contiguous and writable, else InvalidRequest.
    """
    patches = decode(payload, schema_of(state, schema), state).patches
    for name in patches:
        if not (state[name].flags.c_contiguous and state[name].flags.writeable):
            raise InvalidRequest(f"tensor {name!r} must be a writable C-contiguous array to be patched in place")
    for name, (index, values) in patches.items():
        scatter(state[name], index, values)


def scatter(array: NDArray[Any], index: NDArray[np.integer[Any]] | None, values: Bits) -> None:
    """Write bits at flat indices (None: everywhere) into a C-contiguous array."""
    flat = array.reshape(-1).view(unsigned(array.dtype.itemsize))
    if index is None:
        flat[:] = values
    else:
        flat[index] = values


def _canonical(specs: dict[str, TensorSpec], ties: Mapping[str, str] | None) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if not ties or name not in ties}


def _only(state: State, specs: Mapping[str, TensorSpec], ties: Mapping[str, str] | None) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in state.items() if name in specs or not ties or name not in ties}
