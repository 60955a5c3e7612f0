"""smolagents with one tool: URL KEY MODEL TASK code|tools."""

from __future__ import annotations

import sys

import smolagents  # type: ignore[import-not-found]
from shell import bash


def main(url: str, key: str, model: str, task: str, kind: str) -> None:
    """Run the task."""
    served = smolagents.OpenAIServerModel(model, api_base=f"{url}/v1", api_key=key)
    agent_type = {"code": smolagents.CodeAgent, "tools": smolagents.ToolCallingAgent}[kind]
    agent = agent_type(tools=[smolagents.tool(bash)], model=served, max_steps=5)
    print(agent.run(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
