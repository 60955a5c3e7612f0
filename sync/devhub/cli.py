"""`deltawire hub serve`: a Hub on this machine, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..serving import bind, until_stopped, url_of, write_ready_file

if TYPE_CHECKING:
    from .app import Hub, Options
    from .auth import Caller
    from .faults import Faults

MAX_CONNECTIONS = 1024
READ_SECONDS = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand `serve` with its flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "Serve buckets, repositories and Spaces to unmodified Hugging Face clients; they need HF_ENDPOINT alone."
    serve = actions.add_parser("serve", help="serve a Hub until stopped", description=about)
    add = serve.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="where everything is kept; created when missing")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8080, help="port to listen on; 0: any free one (default 8080)")
    add("--token", action="append", default=[], metavar="NAME:ROLE:VALUE",
        help="a user's token with the role read, write or admin; may repeat. Better set $DELTAWIRE_HUB_TOKENS (same "
        "form, separated by commas): flags are visible to other users. None: everybody may do everything")  # fmt: skip
    add("--public-url", metavar="URL", help="the endpoint as clients reach it, e.g. behind a TLS proxy")
    add("--page-size", type=int, default=1000, metavar="N", help="entries per page of a listing (default 1000)")
    add("--cdn", action="store_true", help="serve contents by redirect from a second port, as the real Hub does")
    add("--no-grants", action="store_true", help="refuse upload grants, as older servers do")
    add("--control", action="store_true", help="serve /_faults and /_log to admins on this machine")
    add("--fault", action="append", default=[], metavar="SPEC",
        help="misbehave, e.g. 'latency=0.05' or 'error_after=503;path=/batch$;count=1'; may repeat")  # fmt: skip
    add("--ready-file", type=Path, metavar="FILE", help="write the URL and the process id here once listening")
    add("--json", action="store_true", help="print the start as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the Hub with the arguments that `add_arguments` declared; returns the exit status.

    Raises ConfigError when it cannot start: data folder in use, port taken, a token or a fault that cannot be read.
    """
    with until_stopped():
        _run(args)
    return 0


@contextmanager
def open_hub(folder: Path, options: Options, tokens: dict[str, Caller], faults: Faults) -> Iterator[Hub]:
    """Open the data folder and everything in it; closes it at the end. One process at a time.

    Raises ConfigError when the folder is in use or cannot be written.
    """
    from . import buckets, repos, spaces
    from .app import Hub
    from .auth import Auth
    from .blobs import Blobs
    from .database import Database
    from .requestlog import RequestLog
    from .xet.cas import Cas

    with ExitStack() as stack:
        stack.enter_context(_locked(folder))
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        (folder / "tmp").mkdir()
        db = Database(folder / "hub.sqlite3", [buckets.SCHEMA, repos.SCHEMA, spaces.SCHEMA])
        stack.callback(db.close)
        cas = Cas(folder / "xet")
        stack.callback(cas.close)
        kept = buckets.Buckets(db, cas.size, history_seconds=options.history_seconds)
        auth, blobs = Auth(folder, tokens), Blobs(folder / "blobs", folder / "tmp")
        yield Hub(folder, db, cas, blobs, auth, faults, RequestLog(), kept, options)


def _run(args: argparse.Namespace) -> None:
    """Serve until SystemExit."""
    from .auth import parse_tokens
    from .faults import Faults, parse_fault

    tokens = parse_tokens(args.token, os.environ)
    faults = Faults([parse_fault(text) for text in args.fault])
    _check(args)
    with ExitStack() as stack:
        listeners = [stack.enter_context(bind(args.host, args.port))]
        if args.cdn:
            listeners.append(stack.enter_context(bind(args.host, 0)))
        hub = stack.enter_context(open_hub(args.data, _options(args, listeners), tokens, faults))
        url = args.public_url or url_of(listeners[0])

        def announce() -> None:
            _print_start(args, url, open_mode=hub.auth.open)
            if args.ready_file is not None:
                write_ready_file(args.ready_file, url=url)

        _serve(hub, listeners, announce)


def _options(args: argparse.Namespace, listeners: list[socket.socket]) -> Options:
    from .app import Options

    return Options(
        page_size=args.page_size,
        cdn_port=listeners[1].getsockname()[1] if args.cdn else None,
        grants=not args.no_grants,
        control=args.control,
        public_url=args.public_url,
    )


def _check(args: argparse.Namespace) -> None:
    if args.page_size < 1:
        raise ConfigError(f"--page-size is {args.page_size}, expected at least 1")
    if args.public_url is not None:
        args.public_url = args.public_url.rstrip("/")
        if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?", args.public_url):
            raise ConfigError(f"--public-url is {args.public_url!r}, expected http://HOST or https://HOST")
    if args.ready_file is not None and not args.ready_file.parent.is_dir():
        raise ConfigError(f"--ready-file {args.ready_file}: its folder does not exist; create it first")


def _serve(hub: Hub, listeners: list[socket.socket], announce: Callable[[], None]) -> None:
    """Serve on all listeners until SIGINT or SIGTERM."""
    import uvicorn

    from ..connections import bounded
    from .app import build

    app = build(hub, announce)
    config = uvicorn.Config(
        app, http=bounded(MAX_CONNECTIONS, READ_SECONDS), log_level="warning", access_log=False, lifespan="on",
        timeout_graceful_shutdown=3, timeout_keep_alive=75, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    hub.stopping = lambda: server.should_exit
    server.run(sockets=listeners)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the data folder for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # Space secrets are kept here, and private files
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"--data {folder}: cannot be written ({error.strerror}); choose another") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--data {folder} is in use by another Hub; stop that one, or give this one another folder"
            ) from None
        yield
    finally:
        os.close(lock)


def _print_start(args: argparse.Namespace, url: str, *, open_mode: bool) -> None:
    if args.json:
        line = json.dumps({"event": "listening", "url": url, "data": str(args.data), "open": open_mode})
    else:
        line = f"Hub at {url}, data in {args.data}. For clients: export HF_ENDPOINT={url}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    from .origin import is_loopback

    if open_mode and not is_loopback(args.host):
        sys.stderr.write(
            f"deltawire hub: listening on {args.host} without tokens: whoever reaches it may read and change "
            "everything; set $DELTAWIRE_HUB_TOKENS\n"
        )
