"""Settings of the inference Space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sync.settings import Settings

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class InferenceConfig(Settings):
    """What `deltawire inference` can be told. The token comes from the environment."""

    run: str
    """URL of the run whose weights are followed: file:///dir or a folder"""
    folder: Path
    """local folder for the mirror of the weights; a restart resumes from it"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(default=0, ge=0, le=65535)
    """port to listen on; 0 lets the system choose"""
    engine: Literal["torch"] = "torch"
    """what runs the model"""
    poll_seconds: Seconds = 10.0
    """how often to look for a new version; a poke looks at once"""
    max_slots: Positive = 256
    """sequences that run at once; each keeps max_len positions of keys and values in memory"""
    max_len: int = Field(default=1024, ge=2)
    """most tokens of prompt and output of one call together"""
    max_queued: Positive = 4096
    """calls that may wait for a slot; more are answered 429"""
    prefill_tokens: Positive = 16384
    """most padded tokens of one prefill pass, which bounds its memory"""
    max_body_bytes: Positive = 16 * 1024 * 1024
    """largest request body"""
    max_connections: Positive = 512
    """connections open at once; beyond it one that waits for a request is closed for a new one"""
    read_seconds: Seconds = 60.0
    """deadline for a request to arrive whole"""
    request_seconds: Seconds = 300.0
    """deadline of one request; calls not finished by then are cancelled"""
    pause_seconds: Seconds = 120.0
    """deadline for the engine to stop between two passes when weights change"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """what the model computes in; auto: bfloat16 on CUDA when the checkpoint is bf16, else float32"""
    threads: Positive = 1
    """CPU threads of one pass"""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N"""
    log: Literal["text", "json", "none"] = "text"
    """form of the log lines on standard error"""
    ready_file: Path | None = None
    """write {pid, url} here as JSON once the port answers"""
