"""Rice codes in groups: numbers of one group share the parameter k that costs the fewest bits.

A number v is its quotient v >> k in unary (that many zeros, then a one) and its k low bits; a quotient of 24 or more is
24 zeros and v in 64 bits. Bits fill 32-bit little-endian words from the low end; the last word is cut to its bytes.
R. F. Rice: Some practical universal noiseless coding techniques, JPL 79-22, 1979.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..errors import InvalidPatch
from ..kernels import compiled

ESCAPE = 24
MOST_K = 32
_ONE, _WORD, _LOW = np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)
_ESCAPE64 = np.uint64(ESCAPE)


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(typingctx: Any, x: Any) -> Any:  # noqa: ARG001 - numba looks at the names
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, False))  # noqa: FBT003

    return types.uint64(types.uint64), codegen


@compiled
def choose(values: NDArray[Any], offsets: NDArray[Any], ks: NDArray[Any]) -> Any:
    """Fill `ks` with the best parameter of each group values[offsets[g] : offsets[g + 1]]; returns the bits in all."""
    total = np.uint64(0)
    for g in range(len(ks)):
        first, last = offsets[g], offsets[g + 1]
        if first == last:
            ks[g] = 0
            continue
        mean = 0.0
        for i in range(first, last):
            mean += float(values[i])
        mean = mean / (last - first) * 0.6931471805599453  # the best k is near log2 of the median
        near = 0
        while near < MOST_K - 1 and mean >= 2.0:
            mean /= 2.0
            near += 1
        best = np.uint64(0xFFFFFFFFFFFFFFFF)
        for k in range(max(near - 1, 0), min(near + 2, MOST_K + 1)):
            bits = np.uint64(0)
            shift = np.uint64(k)
            for i in range(first, last):
                quotient = np.uint64(values[i]) >> shift
                bits += quotient + shift + _ONE if quotient < _ESCAPE64 else _ESCAPE64 + np.uint64(64)
            if bits < best:
                best, ks[g] = bits, k
        total += best
    return total


@compiled
def _write(values: NDArray[Any], offsets: NDArray[Any], ks: NDArray[Any], words: NDArray[Any]) -> Any:
    acc = filled = np.uint64(0)
    at = 0
    for g in range(len(ks)):
        k = np.uint64(ks[g])
        mask = (_ONE << k) - _ONE
        for i in range(offsets[g], offsets[g + 1]):
            value = np.uint64(values[i])
            quotient = value >> k
            if quotient < _ESCAPE64:
                acc |= _ONE << (filled + quotient)
                filled += quotient + _ONE
                while filled >= _WORD:
                    words[at] = acc & _LOW
                    at += 1
                    acc >>= _WORD
                    filled -= _WORD
                acc |= (value & mask) << filled
                filled += k
            else:
                filled += _ESCAPE64
                for part in (value & _LOW, value >> _WORD):
                    while filled >= _WORD:
                        words[at] = acc & _LOW
                        at += 1
                        acc >>= _WORD
                        filled -= _WORD
                    acc |= part << filled
                    filled += _WORD
            while filled >= _WORD:
                words[at] = acc & _LOW
                at += 1
                acc >>= _WORD
                filled -= _WORD
    if filled > 0:
        words[at] = acc & _LOW
    return np.uint64(at) * _WORD + filled


@compiled
def _read(words: NDArray[Any], bits: Any, offsets: NDArray[Any], ks: NDArray[Any], out: NDArray[Any], most: Any) -> Any:
    """Fill `out`; returns False unless exactly `bits` (zeros up to a byte) hold it and no value is above `most`.
    Behind `bits`, `words` has two words to spare."""
    acc = filled = used = np.uint64(0)
    at = 0
    end = len(words)
    for g in range(len(ks)):
        k = np.uint64(ks[g])
        mask = (_ONE << k) - _ONE
        for i in range(offsets[g], offsets[g + 1]):
            if filled < _WORD:
                if at >= end:
                    return False
                acc |= np.uint64(words[at]) << filled
                at += 1
                filled += _WORD
            quotient = _trailing_zeros(acc)
            if quotient < _ESCAPE64:
                acc >>= quotient + _ONE
                filled -= quotient + _ONE
                used += quotient + _ONE + k
                if filled < k:
                    if at >= end:
                        return False
                    acc |= np.uint64(words[at]) << filled
                    at += 1
                    filled += _WORD
                value = (quotient << k) | (acc & mask)
                acc >>= k
                filled -= k
            else:
                acc >>= _ESCAPE64
                filled -= _ESCAPE64
                value = np.uint64(0)
                for part in range(2):
                    if filled < _WORD:
                        if at >= end:
                            return False
                        acc |= np.uint64(words[at]) << filled
                        at += 1
                        filled += _WORD
                    value |= (acc & _LOW) << np.uint64(32 * part)
                    acc >>= _WORD
                    filled -= _WORD
                used += _ESCAPE64 + np.uint64(64)
            if value > most:
                return False
            out[i] = value
    return used <= bits and bits - used < np.uint64(8) and acc == 0


def write(values: NDArray[Any], offsets: NDArray[np.int64]) -> tuple[NDArray[np.uint8], bytes]:
    """(parameter of each group, the bits) of unsigned or non-negative integers in groups values[offsets[g]:…]."""
    ks = np.zeros(len(offsets) - 1, np.uint8)
    words = np.zeros(int(choose(values, offsets, ks)) // 32 + 2, "<u4")
    bits = int(_write(values, offsets, ks, words))
    return ks, words.view(np.uint8)[: -(-bits // 8)].tobytes()


def read(
    raw: memoryview | bytes,
    ks: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    kind: type[np.unsignedinteger[Any]],
    most: int,
) -> NDArray[Any]:
    """Inverse of `write`: offsets[-1] numbers of at most `most`. Raises InvalidPatch when `raw` is not exactly them."""
    count = int(offsets[-1])
    if len(raw) * 8 < count or (len(ks) and int(ks.max()) > MOST_K):
        raise InvalidPatch(f"a stream of {len(raw)} bytes cannot hold {count} Rice codes")
    words = np.zeros(-(-len(raw) // 4) + 2, "<u4")
    words.view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    out = np.empty(count, kind)
    if not _read(words, np.uint64(8 * len(raw)), offsets, ks, out, np.uint64(most)):
        raise InvalidPatch(f"a stream of {len(raw)} bytes is not {count} Rice codes of at most {most}")
    return out
