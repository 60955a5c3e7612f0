"""`/v1/completions`: token ids (or text) in, ids, logprobs and text out, as vLLM's and OpenAI's clients know it."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sync.errors import InvalidRequest
from sync.schema.calls import MAX_CALLS, Sampling, StopText, Temperature, TokenId

from .answers import text_of_generation
from .engines.base import Call, Generation
from .gateway.fields import sse

_Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1_048_576)]
_Text = Annotated[str, Field(min_length=1, max_length=4_194_304)]
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "min_tokens": (0,), "ignore_eos": (False,), "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "include_stop_str_in_output": (False,), "prompt_logprobs": (), "response_format": ({"type": "text"},),
    "length_penalty": (1,), "use_beam_search": (False,), "bad_words": ([],), "stop_token_ids": ([],),
}  # fmt: skip
_IGNORED = frozenset(
    {
        "user", "metadata", "request_id", "priority", "cache_salt", "skip_special_tokens", "add_special_tokens",
        "spaces_between_special_tokens", "return_tokens_as_token_ids", "truncate_prompt_tokens", "detokenize",
    }
)  # fmt: skip


class CompletionRequest(BaseModel):
    """What is understood; every other parameter must have its neutral value, see `completion_calls`."""

    model_config = ConfigDict(extra="allow")
    model: str = "policy"
    prompt: _Text | _Ids | Annotated[list[_Ids] | list[_Text], Field(min_length=1, max_length=MAX_CALLS)]
    max_tokens: int = Field(default=16, ge=1, le=1_048_576)
    temperature: Temperature = 1.0
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    n: int = 1
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    logprobs: int | None = Field(default=None, ge=0)
    stream: bool = False
    return_token_ids: bool = False


def completion_calls(request: CompletionRequest, tokenizer: Any, *, seeds: bool) -> list[Call]:
    """One call per prompt. A `seed` is left out where the engine has no use for it (`seeds`): TRL's worker always
    sends one, only to keep engines apart.

    Raises InvalidRequest naming the first parameter that cannot be honoured.
    """
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _IGNORED or value in _NEUTRAL.get(name, ()):
            continue
        raise InvalidRequest(f"{name}: {str(value)[:60]!r} is not supported; leave it out", code="unsupported")
    if request.n != 1:
        raise InvalidRequest(f"n: {request.n} is not supported; send the request once per sample", code="unsupported")
    if request.logprobs:
        raise InvalidRequest("logprobs: only 0 (the sampled token's) is supported", code="unsupported")
    prompts = request.prompt if _is_batch(request.prompt) else [request.prompt]
    sampling = Sampling(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed if seeds else None,
        stop=tuple([request.stop] if isinstance(request.stop, str) else request.stop or ()),
    )
    return [Call(_encoded(tokenizer, prompt), sampling) for prompt in prompts]


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _encoded(tokenizer: Any, prompt: Any) -> list[int]:
    return list(tokenizer.encode(prompt, add_special_tokens=True)) if isinstance(prompt, str) else list(prompt)


def completion_answer(
    request: CompletionRequest, calls: Sequence[Call], made: Sequence[Generation], tokenizer: Any
) -> dict[str, Any]:
    """The completion object. `weight_versions` of a choice: the spans of its ids, as `/v1/generate` gives them."""
    output = sum(len(one.output_ids) for one in made)
    prompt = sum(len(call.ids) for call in calls)
    pairs = enumerate(zip(calls, made, strict=True))
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [_choice(request, number, call, one, tokenizer) for number, (call, one) in pairs],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


def _choice(request: CompletionRequest, number: int, call: Call, made: Generation, tokenizer: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": number,
        "text": text_of_generation(tokenizer, made),
        "finish_reason": made.finish_reason,
        "stop_reason": made.stopped_by or None,
        "logprobs": None,
        "weight_versions": [span.model_dump() for span in made.spans],
    }
    if request.logprobs is not None:
        tokens = [tokenizer.decode([token]) for token in made.output_ids]
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": list(made.logprobs),
            "top_logprobs": None,
            "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
        }
    if request.return_token_ids:
        choice |= {"prompt_token_ids": list(call.ids), "token_ids": list(made.output_ids)}
    return choice


def completion_events(answer: dict[str, Any]) -> Iterator[bytes]:
    """The answer as a stream: one chunk per choice, then the usage."""
    for choice in answer["choices"]:
        yield sse({**answer, "choices": [choice], "usage": None})
    yield sse({**answer, "choices": []})
    yield b"data: [DONE]\n\n"
