"""A transformers model whose parameters are private copies of a checkpoint's bits, patched by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sync.engine import TensorPatch
from sync.errors import ConfigError, CorruptObject, InvalidPatch
from sync.safetensors_io import MappedCheckpoint
from sync.tensors import TensorSpec, unsigned

_NATIVE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_EXACT = {"BF16": (torch.float32, torch.bfloat16), "F16": (torch.float32,), "F32": (torch.float32,)}
_SIGNED = {2: torch.int16, 4: torch.int32}


def to_tensor(bits: np.ndarray[Any, Any], dtype: str, compute: torch.dtype) -> torch.Tensor:
    """A fresh tensor of type `compute` with the values of flat `bits` of the checkpoint dtype `dtype`."""
    if dtype == "BF16" and compute == torch.float32:
        return torch.from_numpy((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    signed = np.array(bits).view(np.int16 if dtype != "F32" else np.int32)
    return torch.from_numpy(signed).view(_NATIVE[dtype]).to(compute)


def to_bits(values: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    """The inverse of `to_tensor`, as unsigned numpy integers of the checkpoint dtype's width."""
    values = values.detach().cpu()
    if dtype == "BF16" and values.dtype == torch.float32:
        return (values.numpy().view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    native = values.to(_NATIVE[dtype])
    return native.view(_SIGNED[native.element_size()]).numpy().view(unsigned(native.element_size()))


class Weights:
    """The model of one checkpoint folder; `model` computes in dtype `compute`, its values are the published ones.

    Raises ConfigError when transformers cannot hold exactly these tensors under their checkpoint names,
    CorruptObject when the folder is not a checkpoint.
    """

    def __init__(self, folder: Path, *, dtype: str, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        mapped = _open(folder)
        self.config_text = (folder / "config.json").read_bytes()
        self.schema = mapped.schema
        self.compute = compute_dtype(dtype, device, self.schema)
        config = AutoConfig.from_pretrained(folder)
        _require_full_attention(config)
        self.config = config
        model = AutoModelForCausalLM.from_config(config, dtype=self.compute, attn_implementation="sdpa")
        self.model: Any = model.to(device).eval().requires_grad_(requires_grad=False)
        self._flat = _match(self.model, self.schema)
        self.fill(mapped)

    def same_shape(self, folder: Path) -> bool:
        """True when `refill` can take `folder`: same configuration, names, dtypes and shapes."""
        return _read_config(folder) == self.config_text and _open(folder).schema == self.schema

    def refill(self, folder: Path) -> None:
        """Overwrite every tensor with those of `folder`, see `same_shape`."""
        self.fill(_open(folder))

    def fill(self, mapped: MappedCheckpoint) -> None:
        """Copy every tensor's bits from a mapped checkpoint of this schema."""
        with torch.inference_mode():
            for name, flat in self._flat.items():
                flat.copy_(to_tensor(mapped.state[name].reshape(-1), self.schema[name].dtype, self.compute))

    def apply(self, patches: Mapping[str, TensorPatch]) -> None:
        """Scatter patches; checks all of them first and raises InvalidPatch with nothing written."""
        for name, (index, values) in patches.items():
            self._check(name, index, values)
        with torch.inference_mode():
            for name, (index, values) in patches.items():
                flat = self._flat[name]
                new = to_tensor(values.reshape(-1), self.schema[name].dtype, self.compute).to(flat.device)
                if index is None:
                    flat.copy_(new)
                else:
                    flat[torch.from_numpy(index.astype(np.int64)).to(flat.device)] = new

    def read(self, name: str, index: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        """Bits at flat positions (None: all). Raises InvalidPatch for an unknown name or position."""
        self._check_name(name)
        self._check_index(name, index)
        flat = self._flat[name]
        if index is not None:
            flat = flat[torch.from_numpy(index.astype(np.int64)).to(flat.device)]
        return to_bits(flat, self.schema[name].dtype)

    def _check(self, name: str, index: np.ndarray[Any, Any] | None, values: np.ndarray[Any, Any]) -> None:
        self._check_name(name)
        self._check_index(name, index)
        spec = self.schema[name]
        count = spec.size if index is None else index.size
        if values.size != count or values.dtype != unsigned(spec.width):
            raise InvalidPatch(
                f"tensor {name!r}: {values.size} values of {values.dtype}, expected {count} of "
                f"{np.dtype(unsigned(spec.width))} (bits of {spec.dtype})"
            )

    def _check_name(self, name: str) -> None:
        if name not in self.schema:
            raise InvalidPatch(f"tensor {name!r} is not in the checkpoint that the engine loaded; load an anchor")

    def _check_index(self, name: str, index: np.ndarray[Any, Any] | None) -> None:
        if index is None or not index.size:
            return
        if index.ndim != 1 or index[0] < 0 or index[-1] >= self.schema[name].size or (np.diff(index) <= 0).any():
            raise InvalidPatch(
                f"tensor {name!r}: indices must rise strictly within 0..{self.schema[name].size - 1}, found "
                f"{index.min()}..{index.max()}"
            )


def _read_config(folder: Path) -> bytes:
    try:
        return (folder / "config.json").read_bytes()
    except OSError as error:
        raise CorruptObject(
            f"config.json: the checkpoint folder has none that can be read ({error.strerror})"
        ) from None


def _open(folder: Path) -> MappedCheckpoint:
    _read_config(folder)
    try:
        return MappedCheckpoint(folder)
    except OSError as error:
        raise CorruptObject(f"the checkpoint's weights cannot be read ({error.strerror})") from None


def compute_dtype(setting: str, device: str, schema: Mapping[str, TensorSpec]) -> torch.dtype:
    """What to compute in so that every tensor is held exactly; raises ConfigError where `setting` cannot."""
    odd = sorted(name for name, spec in schema.items() if spec.dtype not in _EXACT)
    if odd:
        raise ConfigError(f"the torch engine holds BF16, F16 and F32 tensors; {odd[0]!r} is {schema[odd[0]].dtype}")
    exact16 = all(spec.dtype == "BF16" for spec in schema.values())
    if setting == "auto":
        return torch.bfloat16 if device.startswith("cuda") and exact16 else torch.float32
    compute: torch.dtype = getattr(torch, setting)
    lossy = sorted(name for name, spec in schema.items() if compute not in _EXACT[spec.dtype])
    if lossy:
        raise ConfigError(f"dtype = {setting} cannot hold {lossy[0]!r} ({schema[lossy[0]].dtype}) exactly; set float32")
    return compute


def _require_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "layer_types", None) is None and _window(config)):
        raise ConfigError(
            f"the torch engine serves models with full attention in every layer; {config.model_type} has "
            f"{', '.join(sorted(kinds - {'full_attention'})) or 'a sliding window'}"
        )


def _window(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def _match(model: Any, schema: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Map checkpoint names to flat views of the model's tensors, every parameter covered."""
    held = model.state_dict(keep_vars=True)
    flat: dict[str, torch.Tensor] = {}
    for name, spec in schema.items():
        if name not in held or tuple(held[name].shape) != spec.shape:
            shape = list(held[name].shape) if name in held else "nothing"
            raise ConfigError(
                f"checkpoint tensor {name!r} {list(spec.shape)} meets {shape} of that name in "
                f"{type(model).__name__}; the torch engine cannot serve this checkpoint"
            )
        flat[name] = held[name].detach().reshape(-1)
        if flat[name].data_ptr() != held[name].data_ptr():
            raise ConfigError(f"parameter {name!r} is not contiguous in {type(model).__name__}; cannot be patched")
    covered = {tensor.data_ptr() for tensor in flat.values()}
    missing = [name for name, p in model.named_parameters() if p.numel() and p.data_ptr() not in covered]
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[0]!r} and {len(missing) - 1} other parameters of the model")
    return flat


def end_ids(config: Any, tokenizer: Any, folder: Path) -> np.ndarray[Any, Any]:
    """The ids that end a sequence (int64): the tokenizer's end token, the model's and the generation config's."""
    from transformers import GenerationConfig

    found = {tokenizer.eos_token_id}
    sources = [config.get_text_config()]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder))
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found |= set(value) if isinstance(value, list) else {value}
    return np.array(sorted(i for i in found if i is not None), dtype=np.int64)
