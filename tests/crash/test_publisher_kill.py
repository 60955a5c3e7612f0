"""A publisher in a process of its own, with its real threads and disk, is killed at any moment and started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs import assert_i1, assert_i4, assert_i5, head_of

from sync import DirectoryStore, Follower
from sync.tools.verify import verify

pytestmark = [pytest.mark.crash, pytest.mark.timeout(170)]

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 10
WRITER = """
import sys
from pathlib import Path
import numpy as np
from sync import DirectoryStore, Publisher, PublisherOptions, Stamp
from sync.term import TermOptions
bucket, work, takeover = sys.argv[1:]
term = TermOptions(catchup_every=3, collect_every=2, grace=0.0, keep_anchors=2)
options = PublisherOptions(anchor_share=0.5, largest_span=8, term=term)
store = DirectoryStore(Path(bucket), create=True, writable=True)
writer = Publisher(store, options=options, work=Path(work), side_files={"config.json": b"{}"})
rng = np.random.default_rng()
state = {n: rng.integers(0, 60_000, 4_000, dtype=np.uint16) for n in "abc"}
writer.open(state, Stamp(0, 0), takeover=takeover == "1")
print(writer.identity, flush=True)
n = 0
while True:
    n += 1
    for array in state.values():
        array[rng.integers(0, len(array), 40)] += 1
    if writer.offer(state, Stamp(n, n)) and n % 7 == 0:
        writer.wait()
        print(writer.identity, flush=True)
"""


def test_a_publisher_killed_at_any_moment_goes_on_and_leaves_a_whole_channel(tmp_path: Path) -> None:
    bucket, said = tmp_path / "bucket", []
    follower: Follower | None = None
    rng = random.Random(7)
    for round_ in range(ROUNDS):
        fresh = round_ in (4, 7)  # its folder was lost: another one, which must take over
        work = tmp_path / f"work-{sum(r <= round_ for r in (4, 7))}"
        command = [sys.executable, "-c", WRITER, str(bucket), str(work), str(int(fresh))]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as child:
            assert child.stdout is not None
            said.append(child.stdout.readline().strip())
            time.sleep(rng.random() * 0.8)
            child.send_signal(signal.SIGKILL)
        store = DirectoryStore(bucket)
        follower = follower or Follower(store, tmp_path / "mirror", None)
        follower.poll()
        head = head_of(store)
        assert follower._mirror.identity == head.identity
        assert follower._mirror.audit()
        assert_i1(store)
        assert_i4(store)
    assert follower is not None
    assert follower.status().digest_failures == follower.status().refused_objects == 0
    follower.close()
    assert [int(text.split("@")[1]) for text in said] == list(range(1, ROUNDS + 1))  # one epoch each, none locked out
    assert_i5(store, tmp_path)
    result = verify(store)
    assert result["ok"], result["problems"]
