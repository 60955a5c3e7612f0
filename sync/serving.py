"""Run an ASGI app on a port that is ours before anyone is told of it. Used by both Spaces; uvicorn is loaded on use."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .asgi import App
from .errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket (port 0: the OS chooses). Raises ConfigError naming a free way out."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port with --port, or --port 0 to let "
            "the system choose"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The http:// URL under which a bound socket answers on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{host}:{port}"


def write_ready_file(path: Path, **facts: Any) -> None:
    """Write `facts` as JSON at once (temporary name, then rename), so that a waiting parent never reads half."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"pid": os.getpid(), **facts}))
    part.replace(path)


@contextmanager
def until_stopped() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM mean a clean end: what runs is unwound, and the block is left without an error.

    Use it in the main thread around everything that has to be closed. uvicorn shuts down on either signal and then
    raises it again for whoever handled it before: this is that handler.
    """

    def stop(*_: object) -> NoReturn:
        raise SystemExit(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as end:
        if end.code != 0:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    app: App, listener: socket.socket, *, max_connections: int = 512, read_seconds: float = 60.0,
    max_frame_bytes: int = 1 << 20,
) -> None:  # fmt: skip
    """Serve `app` on a bound socket until SIGINT or SIGTERM; open connections get 3 seconds to end.

    For `max_connections` and `read_seconds` see `sync.connections.bounded`. A WebSocket whose frame is larger than
    max_frame_bytes is closed.
    """
    import uvicorn

    from .connections import bounded

    config = uvicorn.Config(
        app, http=bounded(max_connections, read_seconds), log_level="warning", access_log=False,
        timeout_graceful_shutdown=3, timeout_keep_alive=75, ws="auto", ws_max_size=max_frame_bytes,
        ws_per_message_deflate=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])
