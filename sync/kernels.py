"""Hot loops, compiled by numba on first use and cached on disk. Loaded on use: importing numba takes a moment.

All run without the interpreter lock. Integers are kept unsigned throughout: numba turns a mix of signed and unsigned
64-bit integers into floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

_G = np.uint64(0x9E3779B97F4A7C15)
_M = np.uint64(0xD6E8FEB86659FD93)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a kernel without the interpreter lock, cached where there is a folder to cache in."""
    try:
        kernel = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in: it is compiled anew in every process
        return njit(nogil=True)(function)  # type: ignore[no-any-return]
    _name_by_content(kernel._cache._cache_file)
    return kernel  # type: ignore[no-any-return]


def _name_by_content(file: Any) -> None:
    """Name the files of a kernel's cache by signature and source, and write each before the index names it.

    numba numbers them, and the index first: of two processes that compile different signatures of one kernel at the
    same time, or after an upgrade, one may find the other's machine code, or the old version's, under its own."""

    def save(key: Any, data: Any) -> None:
        digest = hashlib.sha256(repr((file._source_stamp, key)).encode()).digest()
        name = file._data_name_pattern.format(number=int.from_bytes(digest[:12], "big"))
        file._save_data(name, data)
        file._save_index({**file._load_index(), key: name})

    file.save = save


@intrinsic  # type: ignore[untyped-decorator]
def elements(typingctx: Any, address: Any, size: Any, like: Any) -> Any:  # noqa: ARG001 - numba looks at the names
    """The `size` elements of `like`'s dtype at `address` (uint64), aligned or not, as a flat array. The caller keeps
    the memory alive."""
    kind = types.Array(like.dtype, 1, "C", aligned=False)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_data_type(like.dtype)
        width = context.get_constant(types.intp, context.get_abi_sizeof(item))
        array = context.make_array(kind)(context, builder)
        count = context.cast(builder, args[1], signature.args[1], types.intp)
        data = builder.inttoptr(args[0], item.as_pointer())
        populate_array(array, data=data, shape=[count], strides=[width], itemsize=width, meminfo=None)
        return array._getvalue()

    return kind(types.uint64, types.int64, like), codegen


@compiled
def address(array: NDArray[Any]) -> Any:
    """Where an array's memory begins. numpy's own ways take a few microseconds."""
    return np.uint64(array.ctypes.data)


@njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _finalize(x: Any) -> Any:
    x ^= x >> _S30
    x *= _C1
    x ^= x >> _S27
    x *= _C2
    return x ^ (x >> _S31)


@compiled
def dense_sums(start: Any, values: NDArray[Any], key_a: Any, key_b: Any) -> Any:
    """(sum a, sum b) of the mixes of `values` at flat indices start, start + 1, …"""
    a = b = np.uint64(0)
    where = np.uint64(start) * _G
    for i in range(len(values)):
        bits = np.uint64(values[i]) * _M
        a += _finalize(_finalize(where + key_a) + bits)
        b += _finalize(_finalize(where + key_b) + bits)
        where += _G
    return a, b


@compiled
def sparse_sums(index: NDArray[Any], values: NDArray[Any], key_a: Any, key_b: Any) -> Any:
    """(sum a, sum b) of the mixes of `values` at flat `index`."""
    a = b = np.uint64(0)
    for i in range(len(values)):
        where, bits = np.uint64(index[i]) * _G, np.uint64(values[i]) * _M
        a += _finalize(_finalize(where + key_a) + bits)
        b += _finalize(_finalize(where + key_b) + bits)
    return a, b


@compiled
def change_sums(index: NDArray[Any], old: NDArray[Any], new: NDArray[Any], key_a: Any, key_b: Any) -> Any:
    """(sum a of old, sum b of old, sum a of new, sum b of new) of the mixes at flat `index`, in one pass."""
    old_a = old_b = new_a = new_b = np.uint64(0)
    for i in range(len(index)):
        where = np.uint64(index[i]) * _G
        at_a, at_b = _finalize(where + key_a), _finalize(where + key_b)
        before, after = np.uint64(old[i]) * _M, np.uint64(new[i]) * _M
        old_a += _finalize(at_a + before)
        old_b += _finalize(at_b + before)
        new_a += _finalize(at_a + after)
        new_b += _finalize(at_b + after)
    return old_a, old_b, new_a, new_b


@compiled
def change_sums_of(
    index: NDArray[Any], old: NDArray[Any], new: NDArray[Any], cuts: NDArray[Any], keys: NDArray[Any], out: NDArray[Any]
) -> None:  # fmt: skip
    """`change_sums` from cuts[row] to cuts[row + 1], with that row's keys, to `out` [rows, 4]."""
    for row in range(len(out)):
        here = slice(cuts[row], cuts[row + 1])
        out[row, 0], out[row, 1], out[row, 2], out[row, 3] = change_sums(
            index[here], old[here], new[here], keys[row, 0], keys[row, 1]
        )


@compiled
def gather(flat: NDArray[Any], index: NDArray[Any], start: int, out: NDArray[Any]) -> None:
    """out = flat at index - start, which the caller knows to be in range."""
    for j in range(len(index)):
        out[j] = flat[np.uint64(index[j] - start)]


@compiled
def read(
    addresses: NDArray[Any], sizes: NDArray[Any], index: NDArray[Any], cuts: NDArray[Any], out: NDArray[Any]
) -> None:  # fmt: skip
    """Fill `out` with what is at index[cuts[k] : cuts[k + 1]] in the k-th tensor, which has sizes[k] elements at
    addresses[k]. The caller knows the indices to be in range."""
    for k in range(len(addresses)):
        here = slice(cuts[k], cuts[k + 1])
        gather(elements(addresses[k], sizes[k], out), index[here], 0, out[here])


def _finder(per: int) -> Callable[..., Any]:
    @compiled
    def find(
        old_words: NDArray[Any], new_words: NDArray[Any], old: NDArray[Any], new: NDArray[Any], start: int,
        index: NDArray[Any], before: NDArray[Any], after: NDArray[Any],
    ) -> Any:  # fmt: skip
        at = 0
        for w in range(len(old_words)):
            if old_words[w] != new_words[w]:
                for i in range(per * w, per * w + per):
                    index[at], before[at], after[at] = start + i, old[i], new[i]
                    at += old[i] != new[i]
        for i in range(per * len(old_words), len(old)):
            index[at], before[at], after[at] = start + i, old[i], new[i]
            at += old[i] != new[i]
        return at

    return find


find_changes = {per: _finder(per) for per in (1, 2, 4, 8)}
"""Elements per word → fill `index` with start + the places where `old` and `new` differ, `before` and `after` with
what they are there, and return how many.

The words are the same memory in wider elements, so that most of what is equal is passed in few steps; what they do not
cover is compared one by one. There must be room for all and one more. One kernel per ratio: it is unrolled.
"""


@compiled
def merge(
    index1: NDArray[Any], old1: NDArray[Any], new1: NDArray[Any], index2: NDArray[Any], old2: NDArray[Any],
    new2: NDArray[Any], index: NDArray[Any], old: NDArray[Any], new: NDArray[Any],
) -> Any:  # fmt: skip
    """Fill index, old, new with the union of two patches, first old and last new, without what returned to its old
    bits; returns how many. Both indices rise; the outputs need room for all of both."""
    i = j = at = 0
    while i < len(index1) or j < len(index2):
        from1 = i < len(index1) and (j >= len(index2) or index1[i] <= index2[j])
        from2 = j < len(index2) and (i >= len(index1) or index2[j] <= index1[i])
        index[at] = index1[i] if from1 else index2[j]
        old[at] = old1[i] if from1 else old2[j]
        new[at] = new2[j] if from2 else new1[i]
        i += from1
        j += from2
        at += old[at] != new[at]
    return at


@compiled
def scatter(flat: NDArray[Any], index: NDArray[Any], values: NDArray[Any]) -> None:
    """flat at index = values; the caller knows the indices to be in range."""
    for j in range(len(index)):
        flat[np.uint64(index[j])] = values[j]


@compiled
def put(flat: NDArray[Any], index: NDArray[Any], values: NDArray[Any]) -> Any:
    """`scatter`; False, writing nothing, when an index is out of range."""
    low = high = 0
    for j in range(len(index)):
        low, high = min(low, index[j]), max(high, index[j])
    if len(index) and (low < 0 or high >= len(flat)):
        return False
    scatter(flat, index, values)
    return True


@compiled
def write(
    addresses: NDArray[Any], sizes: NDArray[Any], index: NDArray[Any], cuts: NDArray[Any], values: NDArray[Any]
) -> None:  # fmt: skip
    """Inverse of `read`."""
    for k in range(len(addresses)):
        here = slice(cuts[k], cuts[k + 1])
        scatter(elements(addresses[k], sizes[k], values), index[here], values[here])


@compiled
def shift(index: NDArray[Any], cuts: NDArray[Any], offsets: NDArray[Any]) -> None:
    """Add offsets[k] to index[cuts[k] : cuts[k + 1]]."""
    for k in range(len(offsets)):
        for j in range(cuts[k], cuts[k + 1]):
            index[j] += offsets[k]
