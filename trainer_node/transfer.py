"""TRL's weight transfer, as publishing: each sync offers the present weights to the publisher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from sync.base import Elsewhere
from sync.errors import InvalidRequest
from sync.publisher import Published, Publisher, Stamp
from sync.schema.base import Identity
from sync.schema.wire import Harness
from sync.tensors import State

from .device_state import DeviceCopy
from .model import published_bits


class WeightTransfer:
    """Object of TRL's WeightTransferProtocol. `syncs` equals the trainer's model_version; a sync that finds a publish
    in flight publishes nothing, and the next one carries its changes too.

    step_of and harness_of are asked at each offer. compare: where the difference to the last version is taken; auto
    means on the tensors' device when that is an accelerator, which then holds a copy of the last version.
    """

    def __init__(
        self, publisher: Publisher, step_of: Callable[[], int], harness_of: Callable[[], Harness], *,
        compare: Literal["auto", "host", "device"] = "auto",
    ) -> None:  # fmt: skip
        self._publisher, self._compare = publisher, compare
        self._copy: DeviceCopy | None = None
        self._frozen: dict[str, torch.Tensor] = {}
        self._frozen_bits: State = {}
        self._step_of, self._harness_of = step_of, harness_of
        self._lock = threading.Lock()
        self._sync_of: dict[Identity, int] = {}
        self._skipped_harness: dict[str, tuple[str, ...]] = {}
        self.syncs = 0
        self.skipped = 0
        self._last: State = {}

    def freeze(self, tensors: dict[str, torch.Tensor]) -> None:
        """Name the tensors of the checkpoint that TRL does not stream: frozen parameters and buffers."""
        self._frozen, self._frozen_bits = dict(tensors), published_bits(tensors)

    def publish_first(self, tensors: dict[str, torch.Tensor], *, takeover: bool) -> Identity:
        """Publish the starting state before training; TRL's cold sync, which comes later, then adds nothing."""
        stamp = Stamp(step=0, sync=1)
        identity = self._publisher.open(self._bits(tensors), stamp, takeover=takeover)
        self.committed(self._publisher.history[-1])
        return identity

    def committed(self, done: Published) -> None:
        """Note a version's sync count (the publisher's `on_commit`, called on its thread)."""
        with self._lock:
            self._sync_of[done.identity] = done.stamp.sync

    def sync_of(self, identity: Identity) -> int | None:
        """The sync count at which a version of this run was published; None for any other identity."""
        busy = self._publisher.busy  # read before the look: what is committed but not noted yet is in flight still
        with self._lock:
            found = self._sync_of.get(identity)
        if found is None and busy:
            # a follower can serve a version some milliseconds before its commit is noted here
            self._publisher.settled(5.0)
            with self._lock:
                found = self._sync_of.get(identity)
        return found

    def flush(self) -> Identity:
        """Wait for what is in flight and publish the last state if it was not."""
        if not self._last:
            self._publisher.wait()
            identity = self._publisher.identity
            assert identity is not None
            return identity
        return self._publisher.flush(self._last, Stamp(self._step_of(), self.syncs, self._harness()))

    # --- TRL's protocol

    def init_weight_transfer(self) -> None:
        """Nothing to set up: the publisher is open."""

    def pause(self) -> None:
        """Nothing to pause: followers pause themselves for the scatter alone."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Offer the streamed weights (fp32 masters, base-checkpoint names) as the next version."""
        tensors = dict(iterator)
        self.syncs += 1
        if self.syncs == 1:
            return  # the cold sync: publish_first has published this state
        if self._publisher.identity is None:
            raise InvalidRequest("publish_first must come before training")
        harness = self._harness()
        if self._publisher.offer(self._offered(tensors), Stamp(self._step_of(), self.syncs, harness)):
            self._skipped_harness, self._last = {}, {}
        else:
            self.skipped += 1
            self._skipped_harness, self._last = dict(harness), self._bits(tensors)

    def _offered(self, tensors: dict[str, torch.Tensor]) -> State | Elsewhere:
        device = next(iter(tensors.values())).device
        if self._compare == "host" or (self._compare == "auto" and device.type == "cpu"):
            return self._bits(tensors)
        if self._copy is None:
            self._copy = DeviceCopy(device)
        return self._copy.offer(tensors | self._frozen)

    def _bits(self, tensors: dict[str, torch.Tensor]) -> State:
        return {**published_bits(tensors), **self._frozen_bits}

    def resume(self) -> None:
        """Nothing to resume."""

    def destroy(self) -> None:
        """The run closes the publisher after its last flush."""

    def _harness(self) -> Harness:
        merged = {channel: set(versions) for channel, versions in self._skipped_harness.items()}
        for channel, versions in self._harness_of().items():
            merged.setdefault(channel, set()).update(versions)
        return {c: tuple(sorted(v, key=Identity.parse)) for c, v in merged.items()}
