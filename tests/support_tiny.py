"""A tiny policy for tests: a Qwen3 checkpoint of two layers, with the demo's tokenizer and sharp, uneven logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_CORPUS = ("Guess a number between 1 and 99.", "higher", "lower", "I think it is 42.", "the quick brown fox")


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A tokenizer of about 300 tokens whose end token closes an assistant turn."""
    from trainer_node.model import tiny_tokenizer

    tokenizer = tiny_tokenizer(_CORPUS, vocabulary=320)
    tokenizer.chat_template = template
    return tokenizer


def make_checkpoint(folder: Path, seed: int = 0, *, tied: bool = True, **changes: Any) -> Path:
    """Write a checkpoint folder: config, tokenizer, bf16 model.safetensors drawn from `seed`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    config = Qwen3Config(**(settings | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
