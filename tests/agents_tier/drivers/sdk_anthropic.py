"""The anthropic SDK as a program: URL KEY MODEL TASK. Exits with an error where an answer is not right."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from shell import bash

TOOL = {
    "name": "bash", "description": "Run.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}  # fmt: skip


def loop(client: Any, model: str, task: str, *, stream: bool) -> list[Any]:
    """A loop of tools until the end; returns the messages."""
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(3):
        request: Any = {
            "model": model, "max_tokens": 4096, "messages": messages, "tools": [TOOL], "system": "You work in a shell.",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }  # fmt: skip
        if stream:
            with client.messages.stream(**request) as events:
                made = events.get_final_message()
        else:
            made = client.messages.create(**request)
        assert made.usage.input_tokens > 0
        assert [b for b in made.content if b.type == "thinking" and b.signature], made
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]}
        )
        calls = [block for block in made.content if block.type == "tool_use"]
        assert made.stop_reason == ("tool_use" if calls else "end_turn")
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": bash(c.input["command"])} for c in calls]
        if results:
            messages.append({"role": "user", "content": results})
    assert made.content[-1].text.strip().startswith("All done"), made
    return messages


def edges(client: Any, model: str, messages: list[Any]) -> None:
    """What no agent program sends, but the dialect has."""
    one: Any = {"model": model, "messages": [{"role": "user", "content": "Say something."}]}
    short = client.messages.create(**one, max_tokens=3, extra_body={"temperature": 0.25})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3), short
    counted = client.messages.count_tokens(**one)
    assert counted.input_tokens == short.usage.input_tokens
    stopped = client.messages.create(**one, max_tokens=200, stop_sequences=["to do"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "to do"), stopped
    assert stopped.content[-1].text.strip() == "Nothing", stopped
    asked = {"model": model, "messages": messages[:1], "max_tokens": 4096, "tools": [TOOL]}
    needed = client.messages.create(**asked, tool_choice={"type": "any"})
    assert any(block.type == "tool_use" and block.name == "bash" for block in needed.content), needed
    try:
        client.messages.create(**one | {"messages": [{"role": "user", "content": "long " * 250_000}]}, max_tokens=8)
    except anthropic.BadRequestError as error:
        body: Any = error.body
    else:
        raise AssertionError("an over-long prompt was taken")
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error"), body
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model


def main(url: str, key: str, model: str, task: str) -> None:
    """Play the dialect with either way of sending a key, and be refused with a wrong one."""
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        messages = loop(client, model, f"{task} plain", stream=False)
        edges(client, model, messages)
    root = url.partition("/s/")[0]
    with anthropic.Anthropic(base_url=root, auth_token=key, max_retries=0) as client:
        loop(client, model, f"{task} streamed", stream=True)
    with anthropic.Anthropic(base_url=root, api_key=key[:-1] + "x", max_retries=0) as client:
        try:
            client.models.list()
        except anthropic.AuthenticationError:
            return
    raise AssertionError("a wrong key was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
