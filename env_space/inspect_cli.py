"""`deltawire inspect`: the inspector's page here, over a live Space there or over a saved folder."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any

from sync import settings
from sync.serving import bind, serve, until_stopped, url_of, write_ready_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("what", metavar="DIR|URL", help="the --folder of an environment Space, read only, or the URL of a live one")
    add("--host", default="127.0.0.1", help="where the page answers (default 127.0.0.1)")
    add("--port", type=int, default=0, help="its port (default: a free one)")
    add("--ready-file", type=Path, default=None, metavar="FILE", help="write {pid, url} there once the page answers")


def run(args: argparse.Namespace) -> int:
    """Print the page's URL and serve it until SIGINT or SIGTERM, then return 0.

    For a live Space the token is DELTAWIRE_TOKEN; the page's own key is drawn here and is in the URL that is printed.
    Raises ConfigError where the folder or the token is of no use.
    """
    remote = args.what.startswith(("http://", "https://"))
    token = settings.token_from_environment() if remote else ""
    from .archived import folder_app, remote_app

    key = secrets.token_urlsafe(16)
    with until_stopped(), bind(args.host, args.port) as listener:
        url = url_of(listener)
        app: Any = remote_app(args.what, token, key) if remote else folder_app(Path(args.what), url, key)
        print(f"{url}/?key={key}", flush=True)
        if args.ready_file is not None:
            write_ready_file(args.ready_file, url=url)
        serve(app, listener)
    return 0
