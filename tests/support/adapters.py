"""Random LoRA adapters over tiny checkpoints, as PEFT saves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sync import Publisher, Stamp, Store
from sync.layout import ADAPTER_CONFIG
from sync.safetensors_io import MappedCheckpoint


def make_adapter(base: Path, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """An adapter in bfloat16 whose effect is not small; settings of peft.LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        wrapped = get_peft_model(model, LoraConfig(**(chosen | settings)), autocast_adapter_dtype=False)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = (torch.randn(parameter.shape) * 0.15).to(torch.bfloat16)
        wrapped.save_pretrained(str(folder))
    return folder


def adapter_state(folder: Path) -> dict[str, Any]:
    """The bits of an adapter's folder."""
    return {name: array.copy() for name, array in MappedCheckpoint(folder).state.items()}


@contextmanager
def publishing_adapter(store: Store, folder: Path) -> Iterator[Publisher]:
    """A publisher of the adapter channel that has committed `folder` as its first version."""
    publisher = Publisher(
        store, channel="adapter", side_files={ADAPTER_CONFIG: (folder / ADAPTER_CONFIG).read_bytes()}
    )  # fmt: skip
    try:
        publisher.open(adapter_state(folder), Stamp(step=0, sync=0))
        yield publisher
    finally:
        publisher.close()


def forced(base: Path, folder: Path, ids: Sequence[int], start: int) -> list[float]:
    """Teacher forcing by transformers and PEFT alone, in float32: logprobs of ids[start:]."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder).float().eval()
    wanted = torch.tensor(list(ids))
    with torch.inference_mode():
        logits = model(wanted[None]).logits[0, :-1]
        found: list[float] = torch.log_softmax(logits, -1).gather(1, wanted[1:, None])[start - 1 :, 0].tolist()
    return found
