"""Tensors as bits: dtypes of safetensors, schemas, and flat unsigned views of numpy arrays.

A *state* maps canonical tensor names to numpy arrays. A *schema* maps the same names to (safetensors dtype, shape).
numpy has no bfloat16, so uint16 stands for BF16 unless a schema says otherwise; other numpy dtypes mean themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .canonical import canonical_json
from .errors import InvalidRequest, SchemaChanged

Bits: TypeAlias = NDArray[Any]
State: TypeAlias = Mapping[str, NDArray[Any]]

WIDTH: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
EXPONENT_SHIFT: dict[str, int] = {
    "BF16": 7, "F16": 10, "F32": 23, "F64": 52, "F8_E4M3": 3, "F8_E5M2": 2,
}  # fmt: skip
"""Mantissa bits of the floating dtypes: `(bits << 1) >> (shift + 1)` is the biased exponent."""

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FROM_NUMPY: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "BF16", "int16": "I16", "float16": "F16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip


class TensorSpec(NamedTuple):
    """dtype in safetensors' spelling, and the shape of the unsharded checkpoint tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements (1 for a 0-d tensor)."""
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes per element."""
        return WIDTH[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.width


Schema: TypeAlias = Mapping[str, TensorSpec]


def unsigned(width: int) -> type[np.unsignedinteger[Any]]:
    """The numpy unsigned type of `width` bytes."""
    return _UNSIGNED[width]


def schema_of(state: State, schema: Mapping[str, tuple[str, tuple[int, ...]]] | None = None) -> dict[str, TensorSpec]:
    """The schema of a state: the one given (checked against names, shapes and widths), or read off the arrays.

    Raises SchemaChanged when the state does not fit the given schema, InvalidRequest for a dtype nobody can carry.
    """
    if schema is not None:
        wanted = {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in schema.items()}
        require_fit(state, wanted)
        return wanted
    found = {}
    for name, array in state.items():
        dtype = _FROM_NUMPY.get(str(array.dtype))
        if dtype is None:
            raise InvalidRequest(f"tensor {name!r} has numpy dtype {array.dtype}, which safetensors cannot carry")
        found[name] = TensorSpec(dtype, array.shape)
    return found


def require_fit(state: State, schema: Schema) -> None:
    """Raise SchemaChanged naming the first tensor whose presence, shape or dtype differs (unsigned arrays are bits of
    any dtype of their width)."""
    if state.keys() != schema.keys():
        odd = sorted(state.keys() ^ schema.keys())
        raise SchemaChanged(f"tensor names differ from the base's, first {odd[0]!r} of {len(odd)}; publish an anchor")
    for name, spec in schema.items():
        array = state[name]
        meant = array.dtype.kind == "u" or _FROM_NUMPY.get(str(array.dtype)) == spec.dtype
        if spec.dtype not in WIDTH or array.dtype.itemsize != spec.width or array.shape != spec.shape or not meant:
            raise SchemaChanged(
                f"tensor {name!r} is {array.dtype}{list(array.shape)}, the base has {spec.dtype}{list(spec.shape)}; "
                "publish an anchor"
            )


def bits(array: NDArray[Any]) -> Bits:
    """A flat unsigned view of a C-contiguous array (a copy of any other array), without changing a bit."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(unsigned(array.dtype.itemsize))


def schema_digest(schema: Schema) -> str:
    """sha256 (hex) of the canonical JSON of a schema."""
    return hashlib.sha256(canonical_json({n: [s.dtype, list(s.shape)] for n, s in schema.items()})).hexdigest()


def state_bytes(schema: Schema) -> int:
    """Bytes of all tensors together: what a full copy weighs."""
    return sum(spec.nbytes for spec in schema.values())
