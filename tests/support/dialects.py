"""Bodies as agent programs send them, answers to give, and how programs send an answer back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from inference_space.gateway import chat, messages, responses
from inference_space.gateway.turns import Answer, Asked, Tool, ToolCall, Turn

DIALECTS: dict[str, ModuleType] = {"chat": chat, "responses": responses, "messages": messages}
PINGED = 'data: {"type":"ping"}'
RECORD = "rec_" + "0a" * 16
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CALL = ToolCall("call_" + "1b" * 12, "bash", '{ "command" : "echo h\\u00e9" ,"timeout" : 10.0 }')
HI = {"role": "user", "content": "hi"}
SECOND = ToolCall("call_" + "2c" * 12, "bash", '{"command": "ls"}')


def asked(**more: Any) -> Asked:
    return Asked(**{"model": "m", "turns": (Turn("user", "hi"),), "tools": (Tool("bash", "Run.", SHELL),)} | more)


def answered(**more: Any) -> Answer:
    plain: dict[str, Any] = {
        "record": RECORD, "model": "m", "created": 1_700_000_000, "text": " I look. ", "reasoning": "First,\nlook.",
        "calls": (CALL, SECOND), "finish": "tool_calls", "prompt_tokens": 20, "output_ids": (5, 6, 7),
        "logprobs": (-0.5, -1.0, -0.25), "version": "v-1", "cached_tokens": 16,
    }  # fmt: skip
    return Answer(**plain | more)


CODEX_TOOLS = [
    {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": SHELL},
    {"type": "namespace", "name": "agents", "description": "Others.", "tools": [
        {"type": "function", "name": "spawn_agent", "description": "Start one.", "strict": False, "parameters": SHELL},
    ]},
    {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": False},
]  # fmt: skip

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "codex": ("responses", {
        "model": "m", "stream": True, "store": False, "include": ["reasoning.encrypted_content"], "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "k",
        "client_metadata": {"x": "y"}, "text": {"verbosity": "low"}, "service_tier": "auto", "tools": CODEX_TOOLS,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "more rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "task"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "think"}],
             "content": None, "encrypted_content": RECORD},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I go."}]},
            {"type": "function_call", "name": "exec_command", "arguments": '{ "a" : 1.0 }', "call_id": "call_a"},
            {"type": "function_call", "name": "spawn_agent", "namespace": "agents", "arguments": "{}",
             "call_id": "call_b"},
            {"type": "function_call_output", "call_id": "call_a", "output": "done"},
            {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "ok"}]},
        ],
    }),
    "claude": ("messages", {
        "model": "m", "stream": True, "max_tokens": 32000, "thinking": {"type": "adaptive"}, "betas": ["x"],
        "context_management": {"edits": []}, "output_config": {"effort": "high"}, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "billing"},
                   {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "Bash", "description": "Run.", "input_schema": SHELL, "eager_input_streaming": True},
                  {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "task", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "a reminder"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "think", "signature": RECORD},
                {"type": "text", "text": "I go."},
                {"type": "tool_use", "id": "call_a", "name": "Bash", "input": {"command": "é", "n": 10}},
                {"type": "tool_use", "id": "call_b", "name": "Bash", "input": {"__unparsedToolInput": {"raw": '{"c'}}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_b", "content": "bad input", "is_error": True},
                {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ]},
        ],
    }),
    "pi-chat": ("chat", {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "store": False,
        "max_completion_tokens": 4096, "reasoning_effort": "medium",
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": SHELL, "strict": False}}],
        "messages": [
            {"role": "developer", "content": "You help."},
            {"role": "user", "content": [{"type": "text", "text": "task"}]},
            {"role": "assistant", "content": None, "reasoning_content": "think", "tool_calls": [
                {"id": "call_a", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}},
            ]},
            {"role": "tool", "tool_call_id": "call_a", "content": "done"},
        ],
    }),
    "smolagents": ("chat", {
        "model": "m", "stop": ["Observation:", "Calling tools:", "</code>"], "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "final_answer", "description": "", "parameters": SHELL}}],
        "messages": [{"role": "system", "content": [{"type": "text", "text": "You help."}]},
                     {"role": "user", "content": [{"type": "text", "text": "New task:"}]},
                     {"role": "assistant", "content": [{"type": "text", "text": "Calling tools: [..]"}]}],
    }),
    "pydantic-ai": ("responses", {
        "model": "m", "stream": False, "input": [
            {"role": "system", "content": "one"}, {"role": "system", "content": "two"},
            {"role": "user", "content": "t"},
            {"role": "assistant", "content": "<think>\nthink\n</think>"},
            {"role": "assistant", "content": "I go."},
            {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "call_a"},
            {"type": "function_call_output", "call_id": "call_a", "output": "done"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SHELL, "strict": True, "description": None}],
        "tool_choice": "auto", "top_p": 1,
    }),
    "litellm": ("messages", {
        "model": "m", "max_tokens": 128000, "system": "You help.", "temperature": 0.0, "stop_sequences": ["END"],
        "tools": [{"name": "bash", "type": "custom", "input_schema": SHELL}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [{"role": "user", "content": "task"}],
    }),
}  # fmt: skip


def said(stream: Iterable[bytes]) -> list[dict[str, Any]]:
    """The data of a stream's events, [DONE] and pings left out."""
    lines = b"".join(stream).decode("ascii").split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {") and line != PINGED]


def echoed(dialect: str, body: dict[str, Any], *, redump: bool = False, plain: bool = False) -> list[dict[str, Any]]:
    """An answer as an agent sends it back: arguments verbatim or dumped anew, with or without ids and status."""

    def again(arguments: str) -> str:
        return json.dumps(json.loads(arguments), separators=(",", ":")) if redump else arguments

    if dialect == "chat":
        message = dict(body["choices"][0]["message"])
        if plain:
            message = {k: v for k, v in message.items() if v not in (None, "") or k == "role"}
        calls = message.get("tool_calls", [])
        renewed = [c | {"function": c["function"] | {"arguments": again(c["function"]["arguments"])}} for c in calls]
        return [message | ({"tool_calls": renewed} if calls else {})]
    if dialect == "messages":
        return [{"role": "assistant", "content": body["content"]}]
    items = [dict(item) for item in body["output"]]
    for item in items:
        if "arguments" in item:
            item["arguments"] = again(item["arguments"])
        if plain:
            item.pop("id")
            item.pop("status", None)
    return items


def gathered(stream: Iterable[bytes]) -> dict[str, Any]:
    """The message that the events of Anthropic's dialect add up to; the input of a call is parsed at its end."""
    message: dict[str, Any] = {}
    parts: list[str] = []
    for event in said(stream):
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            message["content"].append(event["content_block"])
            parts = []
        elif kind == "content_block_delta":
            delta = {k: v for k, v in event["delta"].items() if k != "type"}
            ((name, piece),) = delta.items()
            if name == "partial_json":
                parts.append(piece)
            else:
                message["content"][event["index"]][name] += piece
        elif kind == "content_block_stop" and parts:
            message["content"][event["index"]]["input"] = json.loads("".join(parts))
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message
