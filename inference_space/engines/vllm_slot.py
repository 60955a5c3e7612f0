"""vLLM's one place for an adapter, as its worker sees it. With `vllm_adapter`, what knows of vLLM's LoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SLOT = 1
"""The adapter's number in vLLM."""


class Slot:
    """The place of one worker."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._scaling: Callable[[str], float] = lambda _: 1.0

    def load(self, folder: str) -> None:
        """Put the adapter of a folder in the slot's place."""
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_local_dir(folder, None)
        self._runner.add_lora(request(folder, load_inplace=True))
        self._scaling = lambda module: float(helper.get_rank_and_scaling(module)[1])

    def held(self, name: str, shape: Sequence[int]) -> tuple[Any, float]:
        """What a tensor's place holds (None: there is none), and what vLLM multiplied B with."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        manager = self._runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        module, first = parse_fine_tuned_lora_name(name, mapper and mapper.get_rename_mapper())
        place = _place(manager, module)
        if place is None:
            return None, 1.0
        layer, number = place
        stacked = (layer.lora_a_stacked if first else layer.lora_b_stacked)[number]
        rows, columns = shape
        return stacked[manager.lora_index_to_id.index(SLOT), 0, :rows, :columns].cpu(), self._scaling(module)


def request(folder: str, *, load_inplace: bool = False) -> Any:
    """vLLM's name for the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", SLOT, folder, load_inplace=load_inplace)


def _place(manager: Any, module: str) -> tuple[Any, int] | None:
    """The layer that a module of the adapter is a part of, and which."""
    if (layer := manager.modules.get(module)) is not None:
        return layer, 0
    parent, _, last = module.rpartition(".")
    for packed, parts in manager.packed_modules_mapping.items():
        if last in parts and (layer := manager.modules.get(f"{parent}.{packed}")) is not None:
            return layer, parts.index(last)
    return None
