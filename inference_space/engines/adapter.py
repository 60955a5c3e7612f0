"""An adapter (LoRA) over a base model that never changes: which base, and the torch engine's model of both.

An adapter version is what PEFT saves: its tensors under their saved names, and `adapter_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sync.errors import ConfigError, CorruptObject
from sync.layout import ADAPTER_CONFIG
from sync.safetensors_io import MappedCheckpoint

from .weights import Weights, compute_dtype

_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "bias": ("none", None),
}


class AdapterWeights(Weights):
    """As `Weights`, the tensors being those of an adapter, and the model its base wrapped by PEFT.

    base: the folder of the base model, held in the adapter's place as it is. Raises ConfigError when PEFT does not make
    exactly these tensors of the adapter's configuration over this base, CorruptObject when the folder holds no adapter.
    """

    def __init__(self, folder: Path, base: Path, *, dtype: str, device: str) -> None:
        from peft import LoraConfig, PeftModel, get_peft_model_state_dict

        mapped = open_adapter(folder)
        self.config_text, self.schema = read_config(folder), mapped.schema
        settings = settings_of(folder)
        below = Weights(base, dtype=dtype, device=device)
        self.config, self.compute = below.config, compute_dtype(dtype, device, self.schema)
        try:
            wrapped = PeftModel(below.model, LoraConfig(**_known(settings, LoraConfig)), autocast_adapter_dtype=False)
        except ValueError as error:  # targets that the base lacks, and whatever else PEFT finds
            raise ConfigError(f"PEFT cannot put this adapter on the base {base}: {error}") from error
        wrapped.to(device).eval().requires_grad_(requires_grad=False)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(self.compute)
        self.model = wrapped.get_base_model()
        self._flat = _flat(get_peft_model_state_dict(wrapped), mapped)
        self.fill(mapped)

    def same_shape(self, folder: Path) -> bool:
        """As of `Weights`, of the adapter."""
        return read_config(folder) == self.config_text and open_adapter(folder).schema == self.schema

    def refill(self, folder: Path) -> None:
        """As of `Weights`, of the adapter."""
        self.fill(open_adapter(folder))


def base_of(folder: Path, given: Path | None) -> Path:
    """The folder of an adapter's base model: `given`, else what the adapter's configuration names, a folder or a model
    repository of the Hub at its revision, which is downloaded. Raises ConfigError when there is none."""
    settings = settings_of(folder)
    name, revision = str(settings.get("base_model_name_or_path") or ""), settings.get("revision")
    place = given or Path(name)
    if (place / "config.json").is_file():
        return place
    if given is not None or not name:
        raise ConfigError(f"base = {given or name!r}: no model is there (no config.json); name the base model's folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"the adapter's base {name!r} is neither a folder here nor a model of the Hub ({error}); set base"
        ) from error


def settings_of(folder: Path) -> dict[str, Any]:
    """The adapter's configuration. Raises CorruptObject when it is not one, ConfigError for kinds no engine serves:
    other methods than LoRA, DoRA, biases, and modules that are saved whole."""
    try:
        found = json.loads(read_config(folder))
    except ValueError as error:
        raise CorruptObject(f"{ADAPTER_CONFIG}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise CorruptObject(f"{ADAPTER_CONFIG}: expected a JSON object, found {type(found).__name__}")
    if found.get("peft_type") != "LORA":
        raise ConfigError(f"{ADAPTER_CONFIG}: peft_type {found.get('peft_type')!r} is not served; LORA is")
    for name, plain in _REFUSED.items():
        if name in found and found[name] not in plain:
            raise ConfigError(
                f"{ADAPTER_CONFIG}: {name} = {found[name]!r} is not served; publish merged weights instead"
            )
    return found


def read_config(folder: Path) -> bytes:
    """The bytes of the adapter's configuration; raises CorruptObject when there are none."""
    try:
        return (folder / ADAPTER_CONFIG).read_bytes()
    except OSError as error:
        raise CorruptObject(f"{ADAPTER_CONFIG}: the adapter's folder has none to read ({error.strerror})") from None


def open_adapter(folder: Path) -> MappedCheckpoint:
    """The adapter's tensors; raises CorruptObject when they cannot be read."""
    read_config(folder)
    try:
        return MappedCheckpoint(folder)
    except OSError as error:
        raise CorruptObject(f"the adapter's weights cannot be read ({error.strerror})") from None


def _known(settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in settings.items() if name in fields and name != "peft_type"}


def _flat(held: Mapping[str, torch.Tensor], mapped: MappedCheckpoint) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    if missing := sorted(held.keys() - mapped.schema.keys()):
        raise ConfigError(f"the adapter lacks {missing[0]!r} and {len(missing) - 1} other tensors of its configuration")
    for name, spec in mapped.schema.items():
        tensor = held.get(name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            shape = "nothing" if tensor is None else list(tensor.shape)
            raise ConfigError(
                f"adapter tensor {name!r} {list(spec.shape)} meets {shape} of that name on this base; is it the base "
                "that the adapter was trained on?"
            )
        found[name] = tensor.detach().reshape(-1)
        if found[name].data_ptr() != tensor.data_ptr():
            raise ConfigError(f"adapter tensor {name!r} is not contiguous; it cannot be patched")
    return found
