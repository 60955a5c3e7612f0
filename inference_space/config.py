"""Settings of the inference Space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from sync.settings import Settings

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class InferenceConfig(Settings):
    """What `deltawire inference` can be told. The token comes from the environment."""

    run: str
    """URL of the run whose weights are followed: hf://buckets/NAMESPACE/BUCKET/RUN, file:///dir or a folder"""
    folder: Path
    """local folder for the mirror of the weights; a restart resumes from it"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(default=0, ge=0, le=65535)
    """port to listen on; 0 lets the system choose"""
    at: Annotated[str | None, BeforeValidator(lambda at: str(at) if isinstance(at, int) else at)] = Field(
        default=None, pattern=r"^\d+(@\d+)?$"
    )
    """a live version, as 12 or 12@2, to serve for ever; without it the newest is followed"""
    channel: Literal["weights", "adapter"] = "weights"
    """what is followed: the whole weights, or a LoRA adapter over a base model that stays as it is"""
    base: Path | None = None
    """channel = adapter: folder of the base model; without it the model that the adapter's configuration names"""
    engine: Literal["torch", "vllm"] = "torch"
    """what runs the model; vllm needs an environment that holds it"""
    poll_seconds: Seconds = 10.0
    """how often to look for a new version; a poke looks at once"""
    pin_seconds: float = Field(default=3600.0, ge=0, le=30 * 86_400)
    """how long the lease on what this follower still needs lives, renewed every third of it; 0 follows without one"""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9 ._/-]{0,64}$")
    """name of this follower in its lease, shown by `deltawire status`"""
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
    ping_seconds: Seconds = 5.0
    """a streamed answer is silent for this long at most; it opens then, and is kept alive"""
    max_sessions: Positive = 4096
    """sessions of agents open at once"""
    session_seconds: Seconds = 3600.0
    """a session that no call reaches for this long is dropped"""
    max_session_calls: Positive = 2048
    """calls of one session"""
    max_session_tokens: Positive = 16_777_216
    """tokens recorded of one session, over the prompts and outputs of all its calls"""
    pause_seconds: Seconds = 120.0
    """deadline for the engine to stop between two passes when weights change"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """what the model computes in; auto: torch: bfloat16 on CUDA for bf16 weights, else float32; vllm: as the weights"""
    threads: Positive = 1
    """CPU threads of one pass"""
    kv_policy: Literal["recompute", "drain", "salt"] = "recompute"
    """vllm, at new weights: keys of running calls are computed again (exact), or those calls end first, or keep them"""
    tensor_parallel: Positive = 1
    """vllm: processes that share each matrix"""
    kv_cache_gib: Positive = 1
    """vllm on a CPU: memory for keys and values, in GiB"""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N"""
    log: Literal["text", "json", "none"] = "text"
    """form of the log lines on standard error"""
    ready_file: Path | None = None
    """write {pid, url} here as JSON once the port answers"""
