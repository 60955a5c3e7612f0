"""An adapter inside vLLM: each version is loaded by vLLM itself, from a folder, and what it then holds is compared.

vLLM has one slot for adapters here, and every call names it. New values take the slot's place between two steps
(`load_inplace`), so calls under way go on with them; their requests do not say `load_inplace`, or vLLM would read the
disk at every step. It multiplies B with the adapter's scaling when it loads it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sync.engine import TensorPatch
from sync.errors import ConfigError, EngineFailed
from sync.layout import ADAPTER, ADAPTER_CONFIG
from sync.safetensors_io import MappedCheckpoint, write_checkpoint
from sync.tensors import Bits

from .adapter import open_adapter, read_config, settings_of
from .vllm_core import Core
from .weights import Weights, compute_dtype, to_tensor

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The greatest ranks that vLLM may be started for."""


class LiveAdapter(Weights):
    """As `Weights`, the tensors being those of an adapter inside vLLM. `start` makes the core on the base, for adapters
    of a rank.

    Raises ConfigError when vLLM does not take the base or the adapter, or does not hold the adapter exactly;
    CorruptObject when the folder holds none.
    """

    def __init__(self, folder: Path, base: Path, start: Callable[[Path, int], Core]) -> None:
        from transformers import AutoConfig

        mapped = open_adapter(folder)
        self.config_text, self.schema = read_config(folder), mapped.schema
        self.config = AutoConfig.from_pretrained(base)
        self.core = start(base, greatest_rank(settings_of(folder)))
        try:
            self.compute = self.core.dtype
            compute_dtype(str(self.compute).removeprefix("torch."), "cpu", self.schema)
            self._place = tempfile.TemporaryDirectory(prefix="deltawire-adapter-")
            self._state: dict[str, Bits] = {}
            self.fill(mapped)
            self._require_held()
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
        """Every tensor: `adapter`."""
        return dict.fromkeys(self.schema, "adapter")

    def same_shape(self, folder: Path) -> bool:
        """As of `Weights`, of the adapter."""
        return read_config(folder) == self.config_text and open_adapter(folder).schema == self.schema

    def refill(self, folder: Path) -> None:
        """As of `Weights`, of the adapter."""
        self.fill(open_adapter(folder))

    def fill(self, mapped: MappedCheckpoint) -> None:
        """Have vLLM load what is in the folder."""
        self._state = {name: np.array(mapped.state[name]) for name in self.schema}
        self._load()

    def apply(self, patches: Mapping[str, TensorPatch]) -> None:
        """Have vLLM load the adapter with these patches; checks all of them first and raises InvalidPatch."""
        for name, (index, values) in patches.items():
            self._check(name, index, values)
        for name, (index, values) in patches.items():
            self._state[name].reshape(-1)[slice(None) if index is None else index] = values.reshape(-1)
        self._load()

    def _load(self) -> None:
        folder = Path(self._place.name)
        write_checkpoint(folder, self._state, self.schema, file=ADAPTER)
        (folder / ADAPTER_CONFIG).write_bytes(self.config_text)
        self.core.call("adapt", str(folder))
        self.core.adapter = str(folder)

    def read(self, name: str, index: np.ndarray[Any, Any] | None) -> Bits:
        """Bits at flat positions (None: all). Raises InvalidPatch for an unknown name or position, EngineFailed where
        vLLM holds something else than its own scaling makes of what was loaded."""
        self._check_name(name)
        self._check_index(name, index)
        if why := self._differs(name):
            raise EngineFailed(f"{name!r}: {why}")
        found: Bits = self._state[name].reshape(-1)[slice(None) if index is None else index].copy()
        return found

    def _require_held(self) -> None:
        for name in self.schema:
            if why := self._differs(name):
                raise ConfigError(f"vLLM does not serve adapter tensor {name!r} ({why}); serve it with engine = torch")

    def _differs(self, name: str) -> str:
        """Why vLLM does not compute with what was loaded, or the empty string."""
        held, scaling = self.core.call("adapted", name, self.schema[name].shape)[0]
        if held is None:
            return "it has no place for it"
        wanted = to_tensor(self._state[name].reshape(-1), self.schema[name].dtype, self.compute)
        if ".lora_B" in name:
            wanted *= scaling
        return "" if torch.equal(wanted, held.reshape(-1)) else "it holds other values"

    def doubt(self) -> None:
        """Nothing is remembered as verified."""

    def close(self) -> None:
        """Give the model's memory back."""
        if hasattr(self, "_place"):
            self._place.cleanup()
        self.core.close()


def greatest_rank(settings: Mapping[str, Any]) -> int:
    """What vLLM must be started for to take an adapter of this configuration; raises ConfigError above its limit."""
    patterns = settings.get("rank_pattern") or {}
    rank = max([int(settings.get("r", 8)), *map(int, patterns.values())])
    if rank > RANKS[-1]:
        raise ConfigError(f"the adapter has rank {rank}; vLLM takes at most {RANKS[-1]}")
    return next(most for most in RANKS if most >= rank)
