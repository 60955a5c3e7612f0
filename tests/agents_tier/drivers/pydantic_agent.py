"""pydantic-ai with one tool: URL KEY MODEL TASK chat|responses|messages."""

from __future__ import annotations

import sys
from typing import Any

from pydantic_ai import Agent  # type: ignore[import-not-found]
from pydantic_ai.models.anthropic import AnthropicModel  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # type: ignore[import-not-found]
from pydantic_ai.providers.anthropic import AnthropicProvider  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]
from shell import bash


def make_model(url: str, key: str, model: str, dialect: str) -> Any:
    """The library's own model class for each dialect."""
    if dialect == "messages":
        return AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=key))
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[dialect]
    return kind(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def main(url: str, key: str, model: str, task: str, dialect: str) -> None:
    """Run the task, and a second one in the same conversation."""
    agent = Agent(
        make_model(url, key, model, dialect), system_prompt="You work in a shell.", instructions="Be short.",
        tools=[bash],
    )  # fmt: skip
    first = agent.run_sync(task)
    print(first.output)
    print(agent.run_sync(f"{task} once more", message_history=first.all_messages()).output)


if __name__ == "__main__":
    main(*sys.argv[1:])
