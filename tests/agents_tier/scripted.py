"""An engine that says what a script says: real prompt ids in, ids of a scripted reply out, all of it logged.

Where a program is in its script can be read from its prompt alone, so that retries, branches and parallel
conversations need no state: the last marker `[[script NAME at N]]` that somebody other than the policy wrote, plus the
assistant turns since. Replies are tokenized in random pieces, as a sampling model may: whoever decodes and encodes
them again gets other ids.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from play import Prompt, reply

from inference_space.engines.base import Call, Generation, Scores
from sync.engine import TensorPatch
from sync.errors import InvalidRequest
from sync.schema.base import Identity
from sync.schema.calls import ScoreSequence, VersionSpan
from sync.tensors import Bits

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SLOW_SECONDS = 2.0
VERSIONS = ("3@1", "4@1")
_WHOLE = re.compile("(" + "|".join(map(re.escape, SPECIAL + MARKUP)) + ")")


def make_tokenizer() -> Any:
    """A byte-level BPE of 4,096 tokens, trained on this project's documents, with Qwen3's template as TRL ships it."""
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    root = Path(__file__).parents[2]
    texts = sorted([*root.glob("docs/*.md"), *root.glob("inference_space/*.py"), *root.glob("sync/*.py")])
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    core.train([str(path) for path in texts], trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2], clean_up_tokenization_spaces=False
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    tokenizer.chat_template = template.read_text()
    return tokenizer


class Sampled(NamedTuple):
    """One line of the log: what one call saw and gave."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    weight_versions: list[dict[str, Any]]
    script: str
    step: int
    finish: str


class ScriptedEngine:
    """An `Engine` (see `inference_space.engines.base`) without a model. Every call is appended to `log` as JSON."""

    max_len = 200_000
    failure = ""
    seeds = False

    def __init__(self, log: Path, seed: int = 0) -> None:
        self.tokenizer = make_tokenizer()
        self._log = log
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._calls = 0

    def generate(self, calls: Sequence[Call]) -> list[Future[Generation]]:
        """As `Engine.generate`; the futures are done, but for those of slow scripts."""
        found: list[Future[Generation]] = []
        for call in calls:
            future: Future[Generation] = Future()
            if len(call.ids) >= self.max_len:
                text = f"the prompt has {len(call.ids)} tokens; max_len = {self.max_len}"
                future.set_exception(InvalidRequest(text, code="prompt_too_long"))
            else:
                self._answer(future, call)
            found.append(future)
        return found

    def score(self, sequences: Sequence[ScoreSequence], temperature: float) -> Future[Scores]:
        """Refused: there is no model to score with."""
        raise InvalidRequest(f"a script has no scores ({len(sequences)} asked at {temperature:g})", code="unsupported")

    def _answer(self, future: Future[Generation], call: Call) -> None:
        prompt = Prompt.read(str(self.tokenizer.decode(list(call.ids), skip_special_tokens=False)))

        def done() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(self._sample(call, prompt))

        if prompt.flavour == "slow":
            threading.Timer(SLOW_SECONDS, done).start()
        else:
            done()

    def _sample(self, call: Call, prompt: Prompt) -> Generation:
        text = reply(prompt)
        with self._lock:
            ids, stopped_by = self._stopped(self._pieces(text)[: call.sampling.max_tokens], call.sampling.stop)
            logprobs = [-self._random.expovariate(1.0) for _ in ids]
            middle = self._random.randrange(len(ids) + 1)
            ended = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
            spans = [(VERSIONS[0], 0, middle), (VERSIONS[1], middle, len(ids))]
            made = tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans if a < b)
            finish = "stop" if ended or stopped_by else "length"
            line = Sampled(
                list(call.ids), ids, logprobs, [s.model_dump() for s in made], prompt.script, prompt.step, finish
            )
            with self._log.open("a") as file:
                file.write(json.dumps(line._asdict()) + "\n")
            self._calls += 1
        return Generation(ids, logprobs, made, finish, stopped_by)

    def _pieces(self, text: str) -> list[int]:
        """Ids of `text` and the end token, cut at random places before they are encoded."""
        ids: list[int] = []
        for part in _WHOLE.split(text):
            at = 0
            while at < len(part):
                size = len(part) if part in MARKUP else self._random.randint(1, 9)
                ids += self.tokenizer.encode(part[at : at + size], add_special_tokens=False)
                at += size
        return [*ids, self.tokenizer.eos_token_id]

    def _stopped(self, ids: list[int], stop: Sequence[str]) -> tuple[list[int], str]:
        """`ids` up to the one that completes a stop text, and that text."""
        for end in range(1, len(ids) if stop else 1):
            text = self.tokenizer.decode(ids[:end])
            if met := next((s for s in stop if s in text), ""):
                return ids[:end], met
        return ids, ""

    def load(self, folder: Path, identity: Identity) -> None:
        """Nothing to load."""

    def pause(self) -> None:
        """Nothing runs between calls."""

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """There are no weights."""
        raise InvalidRequest(f"a script has no weights ({len(patches)} patches for {identity})", code="unsupported")

    def read(self, name: str, index: Any) -> Bits:
        """There are no weights."""
        raise InvalidRequest(f"a script has no tensor {name} to read at {index}", code="unsupported")

    def resume(self) -> None:
        """Nothing waits."""

    def ways(self) -> dict[str, str]:
        """No tensors."""
        return {}

    def status(self) -> dict[str, float | int | str]:
        """How many calls there were."""
        return {"active": 0, "queued": 0, "calls": self._calls}

    def close(self) -> None:
        """Nothing to end."""
