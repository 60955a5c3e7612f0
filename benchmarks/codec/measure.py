"""Exact sizes: what every codec and layout makes of one pair of states, and of states that no difference suits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sync.codec import CODECS, Patch, apply_delta, decode_delta, diff, encode_delta
from sync.tensors import Bits, State, TensorSpec, state_bytes, unsigned

from . import bounds
from .peers import PEERS
from .states import Pair


def sizes(pair: Pair) -> dict[str, Any]:
    """Facts, bounds, bytes and bits per change of one pair, by codec and by other systems' layout.

    Every payload is decoded into a copy of the old state, which must become the new one bit by bit (AssertionError).
    """
    patch = diff(pair.old, pair.new, pair.schema)
    found, facts = bounds.measure(pair.old, patch, pair.schema)
    coded: dict[str, bytes] = {}
    state = {name: array.copy() for name, array in pair.old.items()}
    for codec in CODECS:
        restore(state, pair.old)
        coded[codec] = encode_delta(pair.old, pair.new, codec, pair.schema)
        apply_delta(state, coded[codec], pair.schema)
        _require_same(codec, state, pair.new)
    for layout, peer in PEERS.items():
        restore(state, pair.old)
        coded[layout] = peer.encode(pair.old, patch)
        peer.decode(coded[layout], state)
        _require_same(layout, state, pair.new)
    changed = max(facts.changed, 1)
    return {
        "case": pair.name, "tensors": len(pair.schema), "full_bytes": state_bytes(pair.schema),
        **facts._asdict(), "density": facts.changed / max(facts.elements, 1),
        "bound_bits": found._asdict(),
        "bytes": {name: len(data) for name, data in coded.items()},
        "bits_per_change": {name: 8 * len(data) / changed for name, data in coded.items()},
        "patch_bytes_per_change": _patch_bytes(pair, patch, coded["fast"]),
    }  # fmt: skip


def _patch_bytes(pair: Pair, patch: Patch, payload: bytes) -> float:
    """Bytes of a decoded patch (indices and new bits) per change, of the tensors not sent whole."""
    size = changes = 0
    for name, (index, new) in decode_delta(payload, pair.old, pair.schema).items():
        if index is not None:
            size += index.nbytes + new.nbytes
            changes += len(patch[name].index)
    return size / max(changes, 1)


def restore(state: State, old: State) -> None:
    """Copy `old` over a state in place."""
    for name, array in old.items():
        np.copyto(state[name], array)


def _require_same(what: str, state: State, new: State) -> None:
    odd = [name for name in new if not np.array_equal(state[name], new[name])]
    assert not odd, f"{what} did not give the new state: {odd[0]!r}"


def worst_cases(elements: int = 4_000_000) -> list[dict[str, Any]]:
    """Bytes beyond the full state where a difference does not pay: random bits, 30 % or all of them drawn anew, and
    states of one to a hundred elements that change entirely. Exact; every round trip is checked."""
    rng = np.random.default_rng(0)
    found = []
    for dtype in ("BF16", "F32"):
        for count, share in ((elements, 0.3), (elements, 1.0), (1, 1.0), (3, 1.0), (100, 1.0)):
            schema = {"w": TensorSpec(dtype, (count,))}
            old, drawn = (_random_bits(rng, schema["w"]) for _ in range(2))
            new = np.where(rng.random(count) < share, drawn, old)
            found += [
                {"dtype": dtype, "elements": count, "share": share, "codec": codec, "full": old.nbytes, "bytes": size}
                for codec, size in _coded_sizes(old, new, schema).items()
            ]
    return found


def _random_bits(rng: np.random.Generator, spec: TensorSpec) -> Bits:
    return np.frombuffer(rng.bytes(spec.nbytes), unsigned(spec.width))


def _coded_sizes(old: Bits, new: Bits, schema: Mapping[str, TensorSpec]) -> dict[str, int]:
    coded = {}
    for codec in CODECS:
        data = encode_delta({"w": old}, {"w": new}, codec, schema)
        state = {"w": old.copy()}
        apply_delta(state, data, schema)
        _require_same(codec, state, {"w": new})
        coded[codec] = len(data)
    return coded
