"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from sync.settings import Settings

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port_is_fine = parts.port != 0
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise ValueError("must be a URL like https://space-1.example")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("may hold a scheme, a host, a port and a path only; the token comes from the environment")
    return text.rstrip("/")


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(urls)) < len(urls):
        raise ValueError("names a replica twice")
    return urls


Url = Annotated[str, AfterValidator(_url)]


class RouterConfig(Settings):
    """What `deltawire router` can be told. The token comes from the environment; the replicas share it."""

    replicas: Annotated[
        tuple[Url, ...], Field(min_length=1, max_length=256), AfterValidator(_distinct), BeforeValidator(_listed)
    ]
    """URLs of the inference Spaces, with commas between them; sessions belong to a URL, so keep them as they are"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(default=0, ge=0, le=65535)
    """port to listen on; 0 lets the system choose"""
    max_lag: int = Field(default=8, ge=0)
    """versions that a replica may be behind the newest head that any of them knows; beyond it calls go elsewhere"""
    prefix: Positive = 256
    """calls that share this many first token ids (or four times as many characters) go to the same replica"""
    max_chains: int = Field(default=65_536, ge=0, le=16_777_216)
    """answers that are remembered, so that a conversation's next call goes where the last one was"""
    poll_seconds: Seconds = 1.0
    """how often each replica is asked for its state"""
    poll_timeout_seconds: Seconds = 5.0
    """deadline of such a question; a replica that misses it gets no new calls until it answers one"""
    backoff_seconds: Seconds = 15.0
    """longest pause between questions to a replica that does not answer"""
    hold_seconds: float = Field(default=5.0, ge=0, le=3_600)
    """how long a call waits where replicas live but none may take it (new weights, too far behind); then 503"""
    connect_seconds: Seconds = 5.0
    """deadline for a connection to a replica"""
    request_seconds: Seconds = 330.0
    """deadline for the head of an answer, retries included, and for every pause within a streamed one"""
    max_body_bytes: Positive = 16 * 1024 * 1024
    """largest request body"""
    max_answer_bytes: Positive = 256 * 1024 * 1024
    """largest answer of a replica to /v1/generate, /v1/score and /v1/sessions"""
    max_connections: Positive = 512
    """connections of clients open at once; beyond it one that waits for a request is closed for a new one"""
    replica_connections: Positive = 512
    """connections to one replica open at once"""
    read_seconds: Seconds = 60.0
    """deadline for a request to arrive whole"""
    log: Literal["text", "json", "none"] = "text"
    """form of the log lines on standard error"""
    ready_file: Path | None = None
    """write {pid, url} here as JSON once the port answers"""
