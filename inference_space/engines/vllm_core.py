"""vLLM inside this process: with `vllm_worker` and `vllm_fallback` all that imports it and touches its private parts.

Its engine core lives in this process and is stepped by us: no server of vLLM's exists, so none of its control routes
does, and a pause is simply not taking the next step. One worker lives here too; several (`tensor_parallel`) are child
processes. What touches the model runs in the workers, see `vllm_worker`: weights are patched where they stand.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sync.errors
from sync.errors import ConfigError, EngineFailed

from .vllm_lent import Array, Borrowed, Lent

PINNED = "0.32"


class Delta(NamedTuple):
    """What one step gave one call: new ids with their logprobs, `reason` once it ended (`stop`, `length`, or another
    word when vLLM gave up), and the prompt's logprobs (for ids[1:]) of a score when they are complete."""

    name: str
    ids: list[int]
    logprobs: list[float]
    reason: str | None
    prompt: list[float] | None


def prepare_environment(*, threads: int, kv_cache_gib: int) -> None:
    """Set what vLLM and its libraries read from the environment. Call before torch is imported.

    The engine core in this process; no thread is bound to a core; no plugin of other packages is loaded; workers meet
    over the loopback; nothing is reported to anyone. `kv_cache_gib` and `threads` are each worker's. Raises ConfigError
    where vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise _missing("it is not installed")
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_HOST_IP", "127.0.0.1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1"),
    ):
        os.environ.setdefault(name, value)


class Core:
    """One vLLM engine on one checkpoint folder. Use from one thread at a time.

    At most `slots` calls advance together, each of `max_len` tokens at most, `step_tokens` tokens in one step. With
    tensor_parallel above 1 that many child processes hold a part of the model each; they end with this process, however
    it ends. rpc_seconds: deadline for a call to the workers. lora_rank: 0, or the greatest rank of an `adapter`, the
    folder whose adapter calls name from then on (`vllm_adapter`). Raises ConfigError when vLLM is missing or does not
    take the checkpoint. lost: why the workers can answer no more calls, or the empty string.
    """

    def __init__(
        self, folder: Path, *, slots: int, max_len: int, step_tokens: int, dtype: str, tensor_parallel: int = 1,
        rpc_seconds: float = 120.0, lora_rank: int = 0,
    ) -> None:  # fmt: skip
        self.adapter = ""
        self.lost, self.ranks, self._rpc_seconds = "", tensor_parallel, rpc_seconds
        self._temperature = 1.0
        engine_class, arguments, params, output = _import()
        self._params, self._delta = params, output.DELTA
        try:
            self._engine: Any = engine_class.from_engine_args(
                arguments(
                    model=str(folder),
                    dtype=dtype,
                    load_format="safetensors",
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    use_tqdm_on_load=False,
                    enforce_eager=True,
                    async_scheduling=False,
                    disable_log_stats=True,
                    max_model_len=max_len + 1,  # a score reads max_len ids and samples one more
                    max_num_seqs=slots,
                    max_num_batched_tokens=max(step_tokens, slots),
                    logprobs_mode="processed_logprobs",
                    max_logprobs=1,
                    seed=int.from_bytes(os.urandom(4), "little") >> 1,  # its default, 0, repeats after each restart
                    tensor_parallel_size=tensor_parallel,
                    distributed_executor_backend="uni" if tensor_parallel == 1 else "mp",
                    worker_extension_cls="inference_space.engines.vllm_worker.Extension",
                    **({"enable_lora": True, "max_lora_rank": lora_rank} if lora_rank else {}),
                )
            )
        except Exception as error:  # whatever vLLM's configuration and layers raise
            _clean_up()
            raise ConfigError(f"vLLM cannot serve this checkpoint: {type(error).__name__}: {error}") from error
        import torch

        self.device, kind = self.call("where")[0]
        self.dtype: torch.dtype = getattr(torch, kind)

    def call(self, what: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Have every worker do something, see `vllm_worker.Side`; their answers in rank order.

        Raises what a worker raised, if it is an error of ours, else EngineFailed; EngineFailed too when a worker is
        gone or late, and then for ever (`lost`): a late answer would be taken for the next call's."""
        if self.lost:
            raise EngineFailed(self.lost)
        try:
            answers = self._engine.collective_rpc("deltawire", self._rpc_seconds, (what, *args), kwargs)
        except Exception as error:
            self.lost = f"a worker of vLLM did not answer ({what}): {type(error).__name__}: {error}"
            raise EngineFailed(self.lost) from error
        for rank, (kind, text) in enumerate(answers):
            if kind:
                where = f"worker {rank}: " if self.ranks > 1 else ""
                raise getattr(sync.errors, kind)(where + text)
        return [result for _, result in answers]

    def lend(self, arrays: Sequence[Array]) -> tuple[list[Array], Borrowed, Lent | None]:
        """Flat arrays for workers to use: ours, what to hand over in a `call`, and what to close after it (with one
        worker None, and it gets the arrays themselves; else they are copied)."""
        if self.ranks == 1:
            return list(arrays), list(arrays), None
        lent = Lent.of(arrays)
        return lent.arrays, lent.handle, lent

    def temper(self, temperature: float) -> None:
        """Read the scores that are added from now on at this temperature (no other may be under way)."""
        if temperature != self._temperature:
            self.call("temper", temperature)
            self._temperature = temperature

    def warm_up(self) -> None:
        """Take two steps: the first ones of a process take seconds."""
        self.add("warm-up", [0], temperature=1.0, tokens=2, ends=(), salt="")
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def add(
        self, name: str, ids: Sequence[int], *, temperature: float, tokens: int, ends: Sequence[int], salt: str
    ) -> None:
        """Take a call. No seed: on a CPU vLLM dies of one when a prefill is cut (recomputing cuts them). A `salt`
        keeps its prefix cache apart from other salts'. Raises ValueError for what vLLM refuses."""
        sampling = self._params(
            temperature=min(temperature, 1.0), max_tokens=tokens, stop_token_ids=list(ends), ignore_eos=True,
            logprobs=0, detokenize=False, output_kind=self._delta, skip_clone=True,
        )  # fmt: skip
        sampling.temperature = (
            temperature  # set late (a clone would check it again): below 0.01 is lifted, above 2 refused
        )
        self._add(name, ids, sampling, salt)

    def add_score(self, name: str, ids: Sequence[int]) -> None:
        """Take a sequence to read, see `temper`."""
        sampling = self._params(
            temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, detokenize=False, output_kind=self._delta
        )
        self._add(name, ids, sampling, "")

    def _add(self, name: str, ids: Sequence[int], sampling: Any, salt: str) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        from .vllm_slot import request

        try:
            adapter = request(self.adapter) if self.adapter else None
            prompt = tokens_input(list(ids), cache_salt=salt or None)
            self._engine.add_request(name, prompt, sampling, lora_request=adapter)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error

    def abort(self, names: Sequence[str]) -> None:
        """Forget calls."""
        self._engine.abort_request(list(names))

    def step(self) -> Iterator[Delta]:
        """One pass of the model."""
        for output in self._engine.step():
            made = output.outputs[0]
            ids = list(made.token_ids)
            steps = zip(ids, made.logprobs or (), strict=False)
            prompt = output.prompt_logprobs or ()
            read = zip(output.prompt_token_ids or (), prompt, strict=False)
            yield Delta(
                output.request_id,
                ids,
                [float(step[token].logprob) for token, step in steps],
                made.finish_reason,
                [float(step[token].logprob) for token, step in read if step is not None] if prompt else None,
            )

    def keys_finite(self, names: Sequence[str]) -> bool:
        """False when one of these calls has left keys or values that are not numbers."""
        known = self._engine.output_processor.external_req_ids
        manager = self._engine.engine_core.engine_core.scheduler.kv_cache_manager
        inner = [key for name in names for key in known.get(name, ())]
        blocks = {block for key in inner for group in manager.get_block_ids(key) for block in group}
        total = self._engine.vllm_config.cache_config.num_gpu_blocks
        return not blocks or all(self.call("keys_finite", sorted(blocks), total))

    def forget_keys(self, *, zero: bool) -> None:
        """Drop all keys and values: the prefix cache's, and those of running calls, which are computed again. `zero`
        also overwrites them: a masked position that holds NaN would still spoil what attends past it."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept a part of its prefix cache")
        if zero:
            self.call("zero_keys")

    def close(self) -> None:
        """Give the model's memory and vLLM's process groups back, and end the workers."""
        self._engine.engine_core.shutdown()
        del self._engine
        _clean_up()


def _clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def _import() -> tuple[Any, Any, Any, Any]:
    let_modules_be_scanned()
    try:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise _missing(str(error)) from error
    return LLMEngine, EngineArgs, SamplingParams, RequestOutputKind


def _missing(why: str) -> ConfigError:
    return ConfigError(
        f"engine = vllm needs vLLM {PINNED} in this environment ({why}); `make test-vllm` makes one; or set engine = "
        "torch"
    )


def let_modules_be_scanned() -> None:
    """vLLM looks at `__dict__` of everything in every loaded module; llvmlite's library answers any name with a
    function of its own, which breaks that look. Give it a `__dict__` to show."""
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    ffi.lib._fntab.setdefault("__dict__", {})
