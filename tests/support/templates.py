"""Chat templates for tests: TRL's copies of real ones, read from where TRL is installed, and some of our own."""

from __future__ import annotations

import functools
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from support_tiny import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif -%}
{%- for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == 0 %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters and digits') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + ', "id": "'
    + call.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}
{{- ' ' + m.content + '</s>' }}
{%- else %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters and digits') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
FORGETS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.last %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops all reasoning but the newest."""
DATED = "<|im_start|>system\n{{ strftime_now('%H:%M:%S.%f') }}<|im_end|>\n" + CHATML
OWN = {"chatml": CHATML, "mistral": MISTRAL, "forgets": FORGETS, "dated": DATED}
_CONTROL = re.compile(
    r"<\|[a-z_]+\|>|<[a-z_]+\|>|<\|[a-z_]+>|</s>|</?tool_call>|</?think>|<(?:start|end)_of_turn>|\[/?[A-Z]+(?:_[A-Z]+)*\]"
)


def trl_template(name: str) -> str:
    """A template of the installed TRL; its whole package is not imported."""
    folder = Path(str(metadata.distribution("trl").locate_file("trl/chat_templates")))
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def tokenizer_for(name: str) -> Any:
    """A small tokenizer with the template of this name, whose control tokens are tokens. Not to be changed."""
    source = OWN.get(name) or trl_template(name)
    tokenizer = make_tokenizer(source)
    tokenizer.bos_token = "<|im_start|>" if name.startswith("llama3") else None
    tokenizer.add_tokens(sorted({*_CONTROL.findall(source), "<|im_start|>", "<|im_end|>"}))
    return tokenizer
