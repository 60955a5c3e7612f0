"""Write the golden chain of the present format version: `python tests/golden/make.py FOLDER`, with tests/ on the path.

What is written once is committed and stays readable for ever; a new format version gets a folder of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from support.runs import Time, publish, publisher, stamp
from support.states import State, nudged, small_state

from sync import ArtifactPublisher, DirectoryStore, Identity
from sync.canonical import sha256_hex
from sync.events import emitter
from sync.heads import newest, read_head
from sync.pins import ReaderPin
from sync.schema.artifacts import Curriculum
from sync.term import TermOptions


def sha_of(state: State) -> dict[str, str]:
    """sha256 of every tensor's bytes."""
    return {name: sha256_hex(np.ascontiguousarray(array).tobytes()) for name, array in state.items()}


def write(folder: Path) -> dict[str, dict[str, str]]:
    """Three terms (codecs fast, raw, tight), spans, anchors, a changed schema, a rewind, a pin, an artifact channel."""
    store, time = DirectoryStore(folder, create=True, writable=True), Time()
    said: dict[str, dict[str, str]] = {}
    state = small_state(5)
    states = [state]
    first = publisher(store, time, anchor_share=1.5, largest_span=8, keep_anchors=9)
    said[str(first.open(state, stamp(0)))] = sha_of(state)
    for n in range(1, 10):
        state = nudged(state, n, share=0.15) if n != 4 else state
        states.append(state)
        said[str(publish(first, state, n))] = sha_of(state)
    first.close()
    second = publisher(store, time, codec="raw", largest_span=8, anchor_share=1.5, keep_anchors=9)
    said[str(second.open(states[6], stamp(10)))] = sha_of(states[6])  # a rewind
    for n in range(11, 18):
        state = nudged(states[6], n) | ({"more": np.arange(9, dtype=np.float32)} if n > 13 else {})
        said[str(publish(second, state, n))] = sha_of(state)
    ((key, _),) = newest(store.list("heads/"))["weights"]
    ReaderPin(store, "weights", 600.0, "golden", time.clock, emitter("golden", "none")).write(
        read_head(store, key), Identity(2, 12)
    )
    second.close()
    third = publisher(store, time, codec="tight", largest_span=8, anchor_share=1.5, keep_anchors=9)
    said[str(third.open(state, stamp(18)))] = sha_of(state)
    for n in range(19, 22):
        state = nudged(state, n, share=0.15)
        said[str(publish(third, state, n))] = sha_of(state)
    third.close()
    artifacts = ArtifactPublisher(store, "curriculum", options=TermOptions(catchup_every=2), clock=time.clock)
    artifacts.open()
    for n in range(4):
        artifacts.publish(Curriculum(environment=f"guess-{n}"), measured_against=Identity(1, n), step=n)
    artifacts.close()
    return said


if __name__ == "__main__":
    out = Path(sys.argv[1])
    expected = write(out / "run")
    (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
