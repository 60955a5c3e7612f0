"""openai-agents with one tool: URL KEY MODEL TASK chat|responses."""

from __future__ import annotations

import asyncio
import sys

import agents  # type: ignore[import-not-found]
from openai import AsyncOpenAI
from shell import bash


async def main(url: str, key: str, model: str, task: str, dialect: str) -> None:
    """Run the task once as it is and once streamed, two conversations."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    agent = agents.Agent(
        name="worker", instructions="You work in a shell.", tools=[agents.function_tool(bash)],
        model=kinds[dialect](model=model, openai_client=client),
    )  # fmt: skip
    done = await agents.Runner.run(agent, task)
    print(done.final_output)
    streamed = agents.Runner.run_streamed(agent, f"{task} (streamed)")
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
