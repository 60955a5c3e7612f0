"""The command line: `deltawire COMMAND`. Each command lives in its package and is loaded when it is used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command lives, which extra brings what it imports, and what it does."""

    module: str
    extra: str
    text: str


COMMANDS = {
    "demo": Command("trainer_node.demo", "all", "train a tiny policy end to end on this machine, in a few minutes"),
    "inference": Command("inference_space.cli", "inference", "serve the newest weights of a run"),
    "router": Command("inference_space.router.cli", "inference", "put one URL in front of several inference Spaces"),
    "lint-template": Command("inference_space.lint", "inference", "check that a chat template lets conversations grow"),
    "env": Command("env_space.cli", "env", "run episodes and serve rollouts"),
    "inspect": Command("env_space.inspect_cli", "env", "show the rollouts of a live Space or of a saved folder"),
    "train": Command("trainer_node.cli", "trainer", "train on rollouts and publish weights"),
    "hub": Command("sync.devhub.cli", "hub", "serve a local Hub"),
    "log": Command("sync.tools.log", "", "list the live versions of a run, newest first"),
    "show": Command("sync.tools.show", "", "print a head, a version's manifest, or another object of a run"),
    "status": Command("sync.tools.status", "", "say who writes and who reads a run, and what it weighs"),
    "verify": Command("sync.tools.verify", "", "read and compare every object of a run, and replay its versions"),
    "checkout": Command("sync.tools.checkout", "", "write one version as a checkpoint folder"),
    "rollback": Command("sync.tools.rollback", "", "publish the state of an old version as the next one"),
    "gc": Command("sync.tools.gc", "", "delete what nothing reaches, in a run whose writer is gone"),
    "close": Command("sync.tools.close", "", "say in the head that the writer publishes nothing more"),
    "bench": Command("benchmarks.codec.cli", "bench", "measure what a delta costs (in a source checkout)"),
    "doctor": Command("sync.tools.doctor", "", "measure a bucket, and say which settle time and grace to set"),
}
PACKAGES = ("sync", "trainer_node", "inference_space", "env_space")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, and return its exit status.

    Errors that Deltawire raises on purpose, and packages that are not installed, become one line on standard error and
    status 2.
    """
    from sync.errors import DeltawireError

    words = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(words[0]) if words else None
    if words[:1] == ["bench"] and not _find_benchmarks():
        print("deltawire bench: the benchmarks are part of the source checkout, not of the package", file=sys.stderr)
        return 2
    try:
        return _run(words)
    except DeltawireError as error:
        print(f"deltawire {words[0]}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if command is None or missing in PACKAGES:
            raise
        hint = f"pip install 'deltawire[{command.extra}]'" if command.extra else "pip install deltawire"
        print(f"deltawire {words[0]}: needs the package {missing}, which is not installed: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _find_benchmarks() -> bool:
    root = Path(__file__).resolve().parent
    if (root / "benchmarks" / "codec" / "cli.py").exists():
        sys.path.insert(0, str(root))
        return True
    return False


def _run(words: Sequence[str]) -> int:
    about = "Reinforcement learning of language models without a cluster."
    parser = argparse.ArgumentParser(prog="deltawire", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.text, description=command.text)
        if words[:1] == [name]:
            importlib.import_module(command.module).add_arguments(sub)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        text = f"deltawire {args.command}: unrecognized arguments: {' '.join(unknown)}; see deltawire {args.command} -h"
        parser.exit(2, text + "\n")
    return int(importlib.import_module(COMMANDS[args.command].module).run(args))


if __name__ == "__main__":
    sys.exit(main())
