"""The openai SDK as a program: URL KEY MODEL TASK chat|responses. Exits with an error where an answer is not right."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from openai import OpenAI
from shell import bash

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def refused(make: Any, **request: Any) -> openai.BadRequestError:
    """The 400 that `make` answers with."""
    try:
        make(**request)
    except openai.BadRequestError as error:
        found = error
    else:
        raise AssertionError(f"not refused: {sorted(request)}")
    assert found.body, found
    return found


def chat(client: Any, model: str, task: str) -> None:
    """Chat completions: a loop of tools, streamed and not, and the edges of the dialect."""
    tool: Any = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": f"{task} {stream}"}]
        for _ in range(3):
            message = (
                streamed_chat(client, model, messages, tool) if stream else plain_chat(client, model, messages, tool)
            )
            messages.append(message)
            for call in message.get("tool_calls") or []:
                output = bash(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        assert not messages[-1].get("tool_calls")
        assert messages[-1]["content"].strip().startswith("All done"), messages[-1]
    create = client.chat.completions.create
    one: Any = {"model": model, "messages": [{"role": "user", "content": "Say something."}]}
    short = create(**one, max_completion_tokens=3, temperature=0.25)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3), short
    logged = create(**one, logprobs=True).choices[0]
    assert all(entry.logprob <= 0 for entry in logged.logprobs.content)
    stopped = create(**one, stop=["to do"]).choices[0]
    assert (stopped.finish_reason, stopped.message.content.strip()) == ("stop", "Nothing"), stopped
    needed = create(**one | {"messages": messages[:1]}, tools=[tool], tool_choice="required").choices[0].message
    assert needed.tool_calls[0].function.name == "bash"
    assert json.loads(needed.tool_calls[0].function.arguments)["command"]
    refused(create, **one, n=2)
    refused(create, **one, response_format={"type": "json_object"})
    refused(create, model=model, messages=[{"role": "user", "content": "long " * 250_000}])
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model


def plain_chat(client: Any, model: str, messages: list[Any], tool: Any) -> Any:
    """One answer, at once."""
    answer = client.chat.completions.create(model=model, messages=messages, tools=[tool])
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.choices[0].finish_reason == "tool_calls") == bool(answer.choices[0].message.tool_calls)
    return answer.choices[0].message.model_dump(exclude_none=True)


def streamed_chat(client: Any, model: str, messages: list[Any], tool: Any) -> Any:
    """One answer, as the SDK's own accumulator sees the stream."""
    with client.chat.completions.stream(
        model=model, messages=messages, tools=[tool], stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert final.usage is not None
    found = final.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in found.get("tool_calls") or []:
        call["function"].pop("parsed_arguments", None)
    return found


def responses(client: Any, model: str, task: str) -> None:
    """Responses: a loop of tools, streamed and not, and the edges of the dialect."""
    tool: Any = {"type": "function", "name": "bash", "description": "Run.", "parameters": SCHEMA, "strict": False}
    for stream in (False, True):
        items: list[Any] = [{"role": "user", "content": f"{task} {stream}"}]
        for _ in range(3):
            request: Any = {"model": model, "input": items, "tools": [tool], "store": False}
            made = finished(client, request) if stream else client.responses.create(**request)
            assert made.status == "completed"
            assert made.usage.output_tokens > 0
            items += [item.model_dump(exclude_none=True) for item in made.output]
            for item in made.output:
                if item.type == "function_call":
                    output = bash(**json.loads(item.arguments))
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        assert made.output_text.strip().startswith("All done"), made
    create = client.responses.create
    short = create(model=model, input="Say something.", max_output_tokens=16, temperature=0.25)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens"), short
    named = {"type": "function", "name": "bash"}
    needed = create(model=model, input=items[:1], tools=[tool], tool_choice=named).output
    assert next(item.name for item in needed if item.type == "function_call") == "bash"
    refused(create, model=model, input="x", previous_response_id="resp_1")
    refused(create, model=model, input="long " * 250_000)


def finished(client: Any, request: dict[str, Any]) -> Any:
    """The final response of a stream, as the SDK's own accumulator sees it, equal to the last event's."""
    with client.responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] == "response.completed", kinds
    return final


def main(url: str, key: str, model: str, task: str, dialect: str) -> None:
    """Play one dialect, and be refused with a wrong key."""
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        {"chat": chat, "responses": responses}[dialect](client, model, task)
    root = url.partition("/s/")[0]
    with OpenAI(base_url=f"{root}/v1", api_key=key) as client:  # the key alone, no path
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Say something."}])
    with OpenAI(base_url=f"{root}/v1", api_key=key[:-1] + "x", max_retries=0) as client:
        try:
            client.models.list()
        except openai.AuthenticationError:
            return
    raise AssertionError("a wrong key was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
