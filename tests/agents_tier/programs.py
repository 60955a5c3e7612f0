"""How each agent program is started: unchanged, offline, in an empty folder, with a HOME of its own.

Programs from PyPI live in `.venv-agents`, those from npm in `.node-agents` (`make test-agents` installs both).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODE = ROOT / ".node-agents" / "node_modules" / ".bin"
PYTHON = ROOT / ".venv-agents" / "bin"
DRIVERS = Path(__file__).with_name("drivers")
MODEL = "policy"


@dataclass(frozen=True)
class Place:
    """Where one program runs: `url` is the session's base URL, `work` its folder, `home` its HOME."""

    url: str
    key: str
    work: Path
    home: Path

    @classmethod
    def make(cls, url: str, key: str, root: Path) -> Place:
        """A place below `root`, with both folders."""
        place = cls(url, key, root / "work", root / "home")
        place.work.mkdir()
        place.home.mkdir()
        return place


@dataclass(frozen=True)
class Command:
    """What to start, and the environment on top of the bare one."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    out: str

    def __str__(self) -> str:
        """For assertion messages: the code and the end of what was printed."""
        return f"exit {self.code}: {self.out[-3000:]}"


Start = Callable[[Place, str], Command]


@dataclass(frozen=True)
class Program:
    """One program speaking one dialect. `again` goes on with the same conversation, None where it cannot."""

    name: str
    binary: Path
    start: Start
    again: Start | None = None

    def __str__(self) -> str:
        """The test id."""
        return self.name


def run(command: Command, place: Place, seconds: float = 90) -> Ended:
    """Run to its end; the whole process group is killed at the deadline."""
    env = {
        "PATH": f"{NODE}:{PYTHON}:{os.environ['PATH']}", "HOME": str(place.home), "LANG": "C.UTF-8", "TERM": "dumb",
        "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with subprocess.Popen(
        command.argv, cwd=place.work, env=env | command.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as child:  # fmt: skip
        try:
            out, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, _ = child.communicate()
            out += f"\n(killed after {seconds:g} s)"
    return Ended(child.returncode, out)


def _pi(api: str, base: str, *flags: str) -> Start:
    def start(place: Place, task: str) -> Command:
        model = {"id": MODEL, "reasoning": True, "contextWindow": 32000, "maxTokens": 4096}
        provider = {"baseUrl": place.url + base, "api": api, "apiKey": "GW_KEY", "models": [model]}
        settings = place.home / ".pi" / "agent" / "models.json"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps({"providers": {"gw": provider}}))
        env = {"GW_KEY": place.key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
        return Command([str(NODE / "pi"), "--provider", "gw", "--model", MODEL, *flags, "-p", task], env)

    return start


_CODEX = """model_provider = "gw"
check_for_update_on_startup = false
{more}
[analytics]
enabled = false
[features]
{features}
[model_providers.gw]
name = "gw"
base_url = "{url}/v1"
env_key = "GW_KEY"
wire_api = "responses"
"""


def codex(*words: str, more: str = "", features: str = "") -> Start:
    """`codex exec`; `words` come before the task, `more` and `features` into its settings."""

    def start(place: Place, task: str) -> Command:
        folder = place.home / "codex"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(_CODEX.format(url=place.url, more=more, features=features))
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "-m", MODEL]
        return Command(
            [str(NODE / "codex"), "exec", *words, *flags, task], {"CODEX_HOME": str(folder), "GW_KEY": place.key}
        )

    return start


def claude(*flags: str) -> Start:
    """Claude Code, without a terminal."""

    def start(place: Place, task: str) -> Command:
        env = {
            "ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_AUTH_TOKEN": place.key, "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "CLAUDE_CODE_SUBAGENT_MODEL": MODEL, "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
        }  # fmt: skip
        argv = [str(NODE / "claude"), *flags, "-p", task, "--dangerously-skip-permissions", "--output-format", "json"]
        return Command(argv, env)

    return start


def _mini(model: str, *flags: str) -> Start:
    def start(place: Place, task: str) -> Command:
        env = {
            "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": place.key, "OPENAI_API_BASE": place.url + "/v1",
            "ANTHROPIC_API_KEY": place.key, "ANTHROPIC_API_BASE": place.url,
        }  # fmt: skip
        head = [str(PYTHON / "mini"), "-y", "--exit-immediately", "-m", model]
        return Command([*head, "-t", task, "-o", str(place.home / "t.json"), *flags], env)

    return start


def driver(script: str, *words: str) -> Start:
    """A library, driven by `drivers/<script>.py URL KEY MODEL TASK WORDS…`."""

    def start(place: Place, task: str) -> Command:
        argv = [str(PYTHON / "python"), str(DRIVERS / f"{script}.py"), place.url, place.key, MODEL, task, *words]
        return Command(argv, {"OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1"})

    return start


def _python(name: str, script: str, *words: str) -> Program:
    return Program(name, PYTHON / "python", driver(script, *words))


CODEX = Program("codex", NODE / "codex", codex(), codex("resume", "--last"))
CLAUDE = Program("claude", NODE / "claude", claude(), claude("-c"))
PI = [
    Program(f"pi-{name}", NODE / "pi", _pi(api, base), _pi(api, base, "-c"))
    for name, api, base in (
        ("chat", "openai-completions", "/v1"),
        ("responses", "openai-responses", "/v1"),
        ("messages", "anthropic-messages", ""),
    )
]
MINI = [
    Program("mini-chat", PYTHON / "mini", _mini(f"openai/{MODEL}")),
    Program(
        "mini-text", PYTHON / "mini",
        _mini(f"openai/{MODEL}", "-c", "mini_textbased.yaml", "--model-class", "litellm_textbased"),
    ),
    Program("mini-responses", PYTHON / "mini", _mini(f"openai/{MODEL}", "--model-class", "litellm_response")),
    Program("mini-messages", PYTHON / "mini", _mini(f"anthropic/{MODEL}")),
]  # fmt: skip
LIBRARIES = [
    _python("openai-agents-chat", "openai_agents", "chat"),
    _python("openai-agents-responses", "openai_agents", "responses"),
    _python("pydantic-ai-chat", "pydantic_agent", "chat"),
    _python("pydantic-ai-responses", "pydantic_agent", "responses"),
    _python("pydantic-ai-messages", "pydantic_agent", "messages"),
]
SDKS = [
    _python("openai-chat", "sdk_openai", "chat"),
    _python("openai-responses", "sdk_openai", "responses"),
    _python("anthropic", "sdk_anthropic"),
]
SMOLAGENTS = [_python("smolagents-code", "smol_agent", "code"), _python("smolagents-tools", "smol_agent", "tools")]
