"""A checkpoint inside vLLM: found by following vLLM's own loader, then patched and read by name, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sync.engine import TensorPatch
from sync.errors import ConfigError, EngineFailed
from sync.safetensors_io import MappedCheckpoint
from sync.tensors import Bits, unsigned

from .vllm_core import Core
from .vllm_fallback import HOW, NOWHERE
from .vllm_lent import Lent
from .vllm_places import rises
from .weights import Weights, _open, _read_config

WAYS = ("plan", "patch", "dense")
LEND_BYTES = 256 << 20
"""Most bytes of patches that travel to worker processes at once (one tensor may exceed it)."""
Index = NDArray[np.integer[Any]]


class LiveWeights(Weights):
    """As `Weights`, the model being vLLM's. `start` makes the core that loads `folder`.

    ways: which may be used, best first: `plan` (with `trace`, see `vllm_plan`), `patch` and `dense` (see
    `vllm_fallback`); each tensor gets the first that works for it.
    Raises ConfigError when vLLM does not take the checkpoint, or none of these ways keeps a tensor exact; CorruptObject
    when the folder is not a checkpoint.
    """

    def __init__(self, folder: Path, start: Callable[[Path], Core], ways: Sequence[str] = WAYS) -> None:
        from transformers import AutoConfig

        self.config_text = _read_config(folder)
        files = _open(folder)
        self.schema = files.schema
        self.config = AutoConfig.from_pretrained(folder)
        self.core = start(folder)
        self.compute = self.core.dtype
        self._ways: dict[str, str] = {}
        self._verified: set[str] = set()
        self._how = HOW[0]
        self._shadow: dict[str, Bits] = {}
        self._shadow_lent: Lent | None = None
        try:
            if "plan" in ways:
                self._follow(files)
            self._fall_back(files, ways)
        except BaseException:
            self.close()
            raise

    @property
    def vocabulary(self) -> int:
        """Ids from 0 on that the model knows."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def device(self) -> str:
        """Where the parameters are."""
        return str(self.core.device)

    def ways(self) -> dict[str, str]:
        """How each checkpoint tensor is reached: `plan`, `trace`, `patch` or `dense`."""
        return dict(self._ways)

    # Which way for which tensor

    def _follow(self, files: MappedCheckpoint) -> None:
        """Keep what every rank could follow, and what stands there as it was loaded."""
        answers: list[dict[str, str]] = self.core.call("follow", self.schema)
        for name in self.schema:
            found = {ways.get(name, "") for ways in answers}
            if "" in found:
                continue
            values, seen = self._read(name, None)
            if seen.all() and np.array_equal(values, files.state[name].reshape(-1)):
                self._ways[name] = "trace" if "trace" in found else "plan"
            # else kernels want the parameter in another order, or no rank keeps some element
        self._warm_up()

    def _warm_up(self) -> None:
        """Have every worker compile what a patch needs before the first one pauses it."""
        nowhere = np.empty(0, np.int32)
        rises(nowhere)
        for name in {self.schema[name].dtype: name for name in self._ways}.values():
            self._send("write", {name: (nowhere, np.empty(0, unsigned(self.schema[name].width)))})
            self._read(name, nowhere)

    def _fall_back(self, files: MappedCheckpoint, ways: Sequence[str]) -> None:
        """Find a way for the rest."""
        rest = [name for name in self.schema if name not in self._ways]
        if not rest:
            return
        self._keep_shadow(files)
        for name in rest:
            if "patch" in ways and not self._differs(name):
                self._ways[name] = "patch"
            elif "dense" in ways:
                self._ways[name] = "dense"
            else:
                raise ConfigError(
                    f"checkpoint tensor {name!r} cannot be patched in vLLM in any of the ways {', '.join(ways)}; serve "
                    "this checkpoint with engine = torch"
                )
        if dense := self._named("dense"):
            self._choose_reload(dense[0])

    def _choose_reload(self, name: str) -> None:
        """Find out how the whole model can be loaded again over spoiled parameters."""
        before, why = self.core.call("fingerprint"), []
        for self._how in HOW:
            try:
                if not (changed := self._reload_changes(before)):
                    return
                why.append(f"{self._how}: {changed} differs from a fresh load")
            except EngineFailed as error:
                why.append(f"{self._how}: {error}")
        raise ConfigError(
            f"checkpoint tensor {name!r} cannot be followed into vLLM, and reloading the same checkpoint does not give "
            f"the same model ({'; '.join(why)}); serve it with engine = torch"
        )

    def _keep_shadow(self, files: MappedCheckpoint) -> None:
        arrays = [files.state[name].reshape(-1) for name in self.schema]
        own, handed, self._shadow_lent = self.core.lend(
            [np.array(a) for a in arrays] if self.core.ranks == 1 else arrays
        )
        self._shadow = dict(zip(self.schema, own, strict=True))
        self.core.call("shadow", self.schema, handed)

    # The follower's side

    def fill(self, mapped: MappedCheckpoint) -> None:
        """Overwrite every tensor: the dense reload, through the same places where known. Workers read the files."""
        self.doubt()
        if not self._shadow:
            self.core.call("fill", str(mapped.folder), list(self._ways))
            return
        for name, own in self._shadow.items():
            own[...] = mapped.state[name].reshape(-1)
        self._write({name: (None, own) for name, own in self._shadow.items()})

    def apply(self, patches: Mapping[str, TensorPatch]) -> None:
        """Scatter patches; checks all of them first and raises InvalidPatch with nothing written."""
        for name, (index, values) in patches.items():
            self._check(name, index, values)
        self.doubt()
        for name in self._shadow.keys() & patches.keys():
            index, values = patches[name]
            self._shadow[name][slice(None) if index is None else index] = values.reshape(-1)
        self._write(patches)

    def _write(self, patches: Mapping[str, TensorPatch]) -> None:
        """Put values in place, each tensor in its way. The shadow holds them already."""
        used = {self._ways[name] for name in patches}
        if "dense" in used:
            self._settle()
            return
        for what, ways in (("write", ("plan", "trace")), ("patch", ("patch",))):
            self._send(what, {name: patch for name, patch in patches.items() if self._ways[name] in ways})

    def _settle(self) -> None:
        """Bring the whole shadow into the model."""
        self.core.call("settle", self._how, self._named("plan", "trace"), self._named("patch"))

    def _named(self, *ways: str) -> list[str]:
        return [name for name, way in self._ways.items() if way in ways]

    def _send(self, what: str, patches: Mapping[str, TensorPatch]) -> None:
        """Hand patches to the workers, a limited number of bytes at a time."""
        layout: list[tuple[str, bool]] = []
        arrays: list[Bits] = []
        held = 0
        for name, (index, values) in patches.items():
            more = values.nbytes + (0 if index is None else index.nbytes)
            if layout and self.core.ranks > 1 and held + more > LEND_BYTES:
                self._hand_over(what, layout, arrays)
                layout, arrays, held = [], [], 0
            layout.append((name, index is not None))
            arrays += [values.reshape(-1)] if index is None else [index, values.reshape(-1)]
            held += more
        if layout:
            self._hand_over(what, layout, arrays)

    def _hand_over(self, what: str, layout: list[tuple[str, bool]], arrays: list[Bits]) -> None:
        _, handed, lent = self.core.lend(arrays)
        try:
            self.core.call(what, layout, handed)
        finally:
            _close(lent)

    def read(self, name: str, index: Index | None) -> Bits:
        """Bits at flat positions (None: all). Raises InvalidPatch for an unknown name or position, EngineFailed when
        ranks that keep the same element differ, or vLLM does not hold what the shadow says."""
        self._check_name(name)
        self._check_index(name, index)
        if self._ways[name] in ("plan", "trace"):
            return self._read(name, index)[0]
        if name not in self._verified:
            self._verify(name)
        found: Bits = self._shadow[name][slice(None) if index is None else index].copy()
        return found

    def _read(self, name: str, index: Index | None) -> tuple[Bits, NDArray[np.bool_]]:
        """The bits that the ranks keep, and which elements any of them keeps (with one rank: all)."""
        spec, ranks = self.schema[name], self.core.ranks
        size = spec.size if index is None else len(index)
        blank: list[Bits] = [np.empty(size, unsigned(spec.width)) for _ in range(ranks)]
        if ranks > 1:
            blank += [np.empty(size, np.bool_) for _ in range(ranks)]
        arrays, handed, lent = self.core.lend(blank if index is None else [*blank, index])
        try:
            self.core.call("read", name, handed, sparse=index is not None)
            if lent is None:
                return arrays[0], np.broadcast_to(np.True_, size)
            values, seen = arrays[0].copy(), arrays[ranks].copy()
            for rank in range(1, ranks):
                found, kept = arrays[rank], arrays[ranks + rank]
                both = kept & seen
                if not np.array_equal(found[both], values[both]):
                    raise EngineFailed(f"rank {rank} keeps other bits of {name!r} than a rank before it")
                values[kept] = found[kept]
                seen |= kept
        finally:
            _close(lent)
        return values, seen

    def _verify(self, name: str) -> None:
        """Compare what vLLM holds of a tensor without places with what its loader makes of the shadow."""
        if self._ways[name] == "patch":
            if why := self._differs(name):
                raise EngineFailed(f"{name!r}: {why}")
            self._verified.add(name)
        elif why := self._reload_changes():
            raise EngineFailed(f"{name!r}: a reload of the same bits changes the model ({why})")
        else:
            self._verified.update(self._named("dense"))

    def _differs(self, name: str) -> str:
        """Why the model does not hold what its loader makes of a tensor of the shadow, or the empty string."""
        found = set(self.core.call("matches", name))
        return "; ".join(sorted(found - {"", NOWHERE})) or ("" if "" in found else NOWHERE)

    def _reload_changes(self, before: Sequence[str] = ()) -> str:
        """Bring the shadow into a spoiled model; says on which ranks that gives another one than is there (or than that
        of the fingerprints `before`), or the empty string."""
        before = before or self.core.call("fingerprint")
        self.core.call("spoil")
        self._settle()
        after = self.core.call("fingerprint")
        changed = [str(rank) for rank, (one, two) in enumerate(zip(before, after, strict=True)) if one != two]
        return f"rank {', '.join(changed)} of {self.core.ranks}" if changed else ""

    def _check_index(self, name: str, index: Index | None) -> None:
        if index is None or (index.ndim == 1 and len(index) and index[0] >= 0 and rises(index)
                             and index[-1] < self.schema[name].size):  # fmt: skip
            return
        super()._check_index(name, index)

    def doubt(self) -> None:
        """From here on, what was verified may have changed."""
        self._verified.clear()

    def close(self) -> None:
        """Give the model's memory back."""
        self._shadow = {}
        _close(self._shadow_lent)
        self._shadow_lent = None
        self.core.close()


def _close(lent: Lent | None) -> None:
    if lent is not None:
        lent.close()
