"""The command line: `deltawire COMMAND`. Each command lives in its package and is loaded when it is used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": ("trainer_node.demo", "train a tiny policy end to end on this machine, in about four minutes"),
    "inference": ("inference_space.cli", "serve the newest weights of a run"),
    "env": ("env_space.cli", "run episodes and serve rollouts"),
    "train": ("trainer_node.cli", "train on rollouts and publish weights"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, and return its exit status.

    Errors that Deltawire raises on purpose become one line on standard error and status 2.
    """
    from sync.errors import DeltawireError

    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="deltawire", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if words[:1] == [name]:
            importlib.import_module(module).add_arguments(sub)
    args = parser.parse_args(words)
    try:
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except DeltawireError as error:
        print(f"deltawire {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
