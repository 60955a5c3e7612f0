"""The script: from a prompt's text to what the policy says next, in the words of whatever program asks.

A marker `[[script NAME FLAVOUR at N]]` in a task starts it: step N one call, N+1 two parallel calls, then the end.
Flavours: `plain`; `broken` (the first call's JSON lacks its last three characters); `agents` (the two parallel calls
start subagents, each with a marker of its own); `slow` (the engine takes its time).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

END = "<|im_end|>"
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_MARKER = re.compile(r"\[\[script ([\w.-]+) (plain|broken|agents|slow) at (\d+)\]\]")
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_COMMANDS = ("command", "cmd")
_SUBAGENTS = ("Agent", "Task", "spawn_agent")
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def marker(script: str, flavour: str = "plain", step: int = 0) -> str:
    """What a task must hold for `script` to be played from `step` on."""
    return f"[[script {script} {flavour} at {step}]]"


@dataclass(frozen=True)
class Prompt:
    """What a prompt says about where its program is. `opening` is what the answer must go on from."""

    script: str
    flavour: str
    step: int
    tools: dict[str, dict[str, Any]]
    opening: str
    text: str
    asks_summary: bool

    @classmethod
    def read(cls, text: str) -> Prompt:
        """Read a whole prompt, which ends inside an assistant's turn."""
        turns: list[tuple[str, str]] = _TURN.findall(text)
        *past, (_, opening) = turns
        found = None
        since, spoke = 0, False
        for role, content in past:  # an answer that broke off stands directly before the one that went on
            if role != "assistant":
                since += spoke
                if hits := _MARKER.findall(content):
                    found, since = hits[-1], 0
            spoke = role == "assistant"
        script, flavour, start = found or ("", "plain", "0")
        role, last = past[-1] if past else ("", "")
        asks = found is not None and role == "user" and not _MARKER.search(last)
        asks = asks and bool(re.search("summar|handoff", last, re.IGNORECASE))
        listed = _TOOLS.search(past[0][1]) if past else None
        tools = [json.loads(line).get("function", {}) for line in listed[1].splitlines()] if listed else []
        return cls(
            script, flavour, int(start) + since, {t["name"]: t for t in tools}, opening, text,
            asks and "<tool_response>" not in last,
        )  # fmt: skip


def reply(prompt: Prompt) -> str:
    """The rest of the assistant's turn, without its end token."""
    said = _turn(prompt)
    begun = prompt.opening.rpartition("</think>")[2].lstrip()
    if begun:
        return _behind(said[said.find(begun[0]) :], begun)
    if prompt.opening.strip():
        return said
    return f"<think>\nStep {prompt.step} of “{prompt.script}”.\n</think>\n\n{said}"


def _behind(text: str, opening: str) -> str:
    """What follows in `text` behind `opening`, whitespace aside."""
    at = 0
    for wanted in "".join(opening.split()):
        while text[at].isspace():
            at += 1
        assert text[at] == wanted, f"{text[:80]!r} does not go on from {opening!r}"
        at += 1
    return text[at:]


def _turn(prompt: Prompt) -> str:
    if not prompt.script:
        return "Nothing to do."
    if prompt.asks_summary:
        rest = marker(prompt.script, prompt.flavour, prompt.step)
        return f"<analysis>Short.</analysis>\n<summary>Much was done; the rest is {rest}.</summary>"
    if "```mswea_bash_command" in prompt.text:
        return f"THOUGHT: step {prompt.step}\n\n```mswea_bash_command\n{_shell(prompt, _files(prompt.step))}\n```"
    if "<code>" in prompt.text and "final_answer" in prompt.text and "final_answer" not in prompt.tools:
        return f"Thought: step {prompt.step}\n<code>\n{_python(prompt)}\n</code>"
    return _native(prompt)


def _files(step: int) -> tuple[str, ...]:
    return (("one.txt",), ("two.txt", "three.txt"))[step] if step < 2 else ()


def _shell(prompt: Prompt, files: tuple[str, ...]) -> str:
    if not files:
        return f"echo {_SUBMIT}"
    return " && ".join(f"printf 'hé {prompt.script}' > {prompt.script}-{name}" for name in files)


def _python(prompt: Prompt) -> str:
    files = _files(prompt.step)
    if not files:
        return 'final_answer("All done.")'
    return "\n".join(f"print(bash(command={_shell(prompt, (name,))!r}))" for name in files)


def _native(prompt: Prompt) -> str:
    """Text and calls in the Hermes form that Qwen3's template teaches."""
    shell = next((t for t in prompt.tools.values() if _command_of(t)), None)
    files = _files(prompt.step)
    if shell is None:
        return f" All done, {prompt.script}: hé. "
    if prompt.flavour == "agents" and prompt.step == 1:
        return f" Two helpers.\n{_calls(_subagents(prompt))}"
    if prompt.flavour == "agents" and (waiting := _waiting(prompt)):
        return f" Waiting. \n{_calls([('wait_agent', odd_json({'targets': waiting, 'timeout_ms': 20000}))])}"
    if not files:
        return _end(prompt, shell["name"]) if _needs_call(prompt) else f" All done, {prompt.script}: hé. "
    calls = [(shell["name"], _arguments(shell, _shell(prompt, (name,)))) for name in files]
    if prompt.flavour == "broken" and prompt.step == 0:
        calls = [(name, arguments[:-3]) for name, arguments in calls]
    return f" Step {prompt.step} now. \n{_calls(calls)}"


def _needs_call(prompt: Prompt) -> bool:
    return _SUBMIT in prompt.text or "final_answer" in prompt.tools


def _end(prompt: Prompt, shell: str) -> str:
    if "final_answer" in prompt.tools:
        return _calls([("final_answer", odd_json({"answer": "All done."}))])
    return f"Submitting.\n{_calls([(shell, odd_json({'command': _shell(prompt, ())}))])}"


def _subagents(prompt: Prompt) -> list[tuple[str, str]]:
    name = next(n for n in prompt.tools if n in _SUBAGENTS)
    known = prompt.tools[name]["parameters"]["properties"]
    found = []
    for part in ("a", "b"):
        task = f"Do this part: {marker(f'{prompt.script}.{part}')}"
        values = {
            "description": f"Part {part}", "prompt": task, "message": task, "subagent_type": "general-purpose",
            "task_name": f"part_{part}",
        }  # fmt: skip
        found.append((name, odd_json({k: v for k, v in values.items() if k in known})))
    return found


def _waiting(prompt: Prompt) -> list[str]:
    """Subagents that were started and have not reported: for programs whose subagents run on by themselves."""
    if "wait_agent" not in prompt.tools:
        return []
    started = re.findall(r'\\?"agent_id\\?": ?\\?"([\w-]+)', prompt.text)
    return [agent for agent in started if not re.search(rf'{agent}\\?": ?{{\\?"completed', prompt.text)]


def _command_of(tool: dict[str, Any]) -> str | None:
    known = tool.get("parameters", {}).get("properties", {})
    return next((name for name in _COMMANDS if name in known), None)


def _arguments(tool: dict[str, Any], command: str) -> str:
    key = _command_of(tool)
    assert key is not None
    known = tool["parameters"]["properties"]
    values: dict[str, Any] = {key: ["bash", "-c", command] if known[key].get("type") == "array" else command}
    if known.get("timeout", {}).get("type") == "number":
        values["timeout"] = 10.0 if tool["name"] == "bash" else 10000.0
    if "description" in known:
        values["description"] = "Write a file"
    return odd_json(values)


def odd_json(values: dict[str, Any]) -> str:
    """Valid JSON that no library writes: spaces in odd places, escapes that are not needed, 10.0 for 10."""
    return "{ " + " ,".join(f"{json.dumps(k)} : {json.dumps(v)}" for k, v in values.items()) + " }"


def _calls(calls: list[tuple[str, str]]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)
