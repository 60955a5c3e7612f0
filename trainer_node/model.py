"""The tiny policy of the demo, and the published form of any model: base-checkpoint names, bf16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sync.errors import ConfigError
from sync.layout import MANIFEST

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def tiny_tokenizer(corpus: Iterable[str], vocabulary: int = 470) -> Any:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, with a prefix-preserving chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(sorted(set(corpus)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(tokenizer: Any, seed: int) -> Any:
    """A Qwen3 of two layers and about 129 k parameters (hidden 64, tied embeddings), fp32, drawn from `seed`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1_024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def checkpoint_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint under its base name: trained, frozen and buffers; tied aliases once."""
    from transformers import PreTrainedModel

    assert isinstance(model, PreTrainedModel)
    aliases = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return {name: t.detach() for name, t in model.state_dict().items() if name not in aliases}


def published_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    """Cast fp32 masters to bf16 (round to nearest even), as uint16; other dtypes keep their bits."""
    out: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        value = tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        if value.dtype == torch.bfloat16:
            out[name] = value.contiguous().cpu().view(torch.int16).numpy().view(np.uint16)
        else:
            out[name] = value.contiguous().cpu().numpy()
    return out


def side_files(folder: Path) -> dict[str, bytes]:
    """Config, tokenizer and templates of a checkpoint folder (name → bytes), with the config's dtype set to bf16."""
    import json

    found = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in (".json", ".jinja", ".txt", ".model")
        and "index" not in path.name
        and path.name != MANIFEST  # of a folder that is a downloaded anchor
    }
    if "config.json" not in found:
        raise ConfigError(f"{folder}: no config.json; give --model a checkpoint folder, a Hub id, or tiny")
    config = json.loads(found["config.json"])
    config.pop("torch_dtype", None)
    found["config.json"] = json.dumps(config | {"dtype": "bfloat16"}, indent=2).encode()
    return found


def resolve(model: str) -> Path:
    """The local folder of a checkpoint: a folder as it is, a Hub id downloaded. Raises ConfigError when unreadable."""
    folder = Path(model)
    if folder.is_dir():
        return _readable(folder)
    if model.startswith((".", "/")):
        raise ConfigError(f"{model}: no such model folder; give --model a checkpoint folder, a Hub id, or tiny")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"model {model!r} is no folder and cannot be downloaded: {why}") from None
    return _readable(folder)


def _readable(folder: Path) -> Path:
    """Return `folder` when its config, tokenizer and tensor headers can be read; raises ConfigError otherwise."""
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig, AutoTokenizer

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no .safetensors file in this model folder")
    side_files(folder)
    try:
        AutoConfig.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
        for path in files:
            with safe_open(path, "pt"):
                pass
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{folder}: cannot be loaded ({why}); give --model a checkpoint folder, a Hub id, or tiny"
        ) from None
    return folder
