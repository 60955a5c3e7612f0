"""One schedule from beginning to end: actors drawn from a seed, the faults, then quiet, and everyone at the head."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from unittest.mock import patch

from sync import Identity, Publisher
from sync.tools.verify import verify

from .actors import Actor, Operator, Reader, Trainer, supervised
from .documents import CHANNEL, DocumentReader, Editor
from .promises import Judge
from .setups import Setup, of_seed
from .store import Bucket
from .world import Process, SimExecutor, World

SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # syncing to memory costs nothing


class Play:
    """A world with its bucket, judge and actors. Use as a context manager: it removes its folder."""

    def __init__(self, seed: int, setup: Setup | None = None) -> None:
        self.seed = seed
        self.world = World(seed)
        self.bucket = Bucket(self.world)
        self.judge = Judge(self.world, self.bucket)
        self.folder = Path(tempfile.mkdtemp(prefix="deltawire-sim-", dir=SCRATCH))
        self.setup = setup or of_seed(seed)
        self.setup.folder = self.folder
        self.trainers: list[Trainer] = []
        self.readers: list[Reader] = []
        self.operators: list[Operator] = []
        self.documents: DocumentReader | None = None
        self.stage = Process(self.world, "stage")
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        self._patches.enter_context(patch.dict(Publisher.__init__.__kwdefaults__, executor=self._worker))
        self._patches.enter_context(patch.object(secrets, "token_hex", self.world.token_hex))
        return self

    def _worker(self, name: str) -> SimExecutor:
        """What a publisher that is given no executor uses: the tools make such."""
        return SimExecutor(self.world, self.world.current.process, name)

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def process(self, name: str) -> Process:
        """A process with a clock of its own."""
        return Process(self.world, name, skew=self.world.rng.choice((0.0, -40.0, 3e5, -2e5)))

    def trainer(self, name: str = "trainer") -> Trainer:
        """Add a trainer; nothing runs yet."""
        found = Trainer(self.world, self.judge, self.bucket, self.setup, self.process(name))
        self.trainers.append(found)
        return found

    def reader(self, name: str = "reader") -> Reader:
        """Add a follower; nothing runs yet."""
        found = Reader(self.world, self.judge, self.bucket, self.setup, self.process(name))
        self.readers.append(found)
        return found

    def operator(self, name: str = "operator") -> Operator:
        """Add somebody with a command line; nothing runs yet."""
        found = Operator(self.world, self.judge, self.bucket, self.setup, self.process(name))
        self.operators.append(found)
        return found

    def run(self, script: Callable[[], None]) -> None:
        """Run a script as the world's first task, and everything it starts, to the end."""
        self.world.spawn(self.stage, "stage", script)
        self.world.run()

    # --- a drawn schedule

    def random(self) -> None:
        """The whole schedule of this seed."""
        for n in range(self.setup.trainers):
            self.trainer(f"trainer-{n}")
        for n in range(self.setup.followers):
            self.reader(f"reader-{n}")
        for n in range(self.setup.operators):
            self.operator(f"operator-{n}")
        self.run(self._random)

    def _random(self) -> None:
        world, setup = self.world, self.setup
        lives = []
        actors: list[Actor] = [*self.trainers, *self.readers, *self.operators]
        if setup.documents:
            editor = Editor(world, self.judge, self.bucket, setup, self.process("editor"))
            self.documents = DocumentReader(world, self.judge, self.bucket, editor, self.process("documents"))
            actors += [editor, self.documents]
        for actor in actors:
            actor.process.kill_rate, actor.process.pace = setup.kill_rate, world.rng.choice((1.0, 1.0, 1.0, 8.0))
            lives.append(world.spawn(actor.process, actor.process.name, supervised(world, actor)))
        mine = lives[: len(self.trainers)]

        def over() -> bool:
            return world.steps > setup.chaos_steps or all(t.done for t in mine)

        while not over():
            world.pause("watch", 50.0, over)
        world.quiet = True
        while not all(t.done for t in lives):
            world.pause("curtain", float("inf"), lambda: all(t.done for t in lives))
        self.finale()

    def finale(self) -> None:
        """The faults are over: one more trainer takes over, and every follower reaches the head."""
        world = self.world
        world.quiet = True
        world.pause("the last requests land", self.setup.weather.stray + self.setup.weather.lag + 1)
        for trainer in self.trainers:
            trainer.give_up()
        heads = self.judge.newest()
        if len(heads) == 1 and heads[0].identity is not None:
            self.arrive()
        last = self.trainer("last")
        if self.trainers[0].checkpoints:
            last.checkpoints = self.trainers[0].checkpoints[-1:]
        last.open(takeover=True)
        for _ in range(2):
            last.step()
            assert last.publisher is not None
            last.publisher.wait()
        last.end()
        self.reader("late")
        self.arrive()
        if self.documents is not None:
            self.arrive_at_document(self.documents)
        self.judge.replay()
        if self.seed % 4 == 0:  # as much work as the rest of the finale together
            found = verify(self.bucket, scratch=self.folder)
            self.judge.check("verify", holds=found["ok"], why=str(found["problems"]))
        for reader in self.readers:
            reader.close()

    def arrive(self) -> None:
        """Liveness: polls that meet no fault bring every follower to the head."""
        (head,) = self.judge.newest()
        assert head.identity is not None
        for reader in self.readers:
            for _ in range(6):
                reader.poll()
                self.world.pause("settle", self.setup.weather.lag + 1)
                if self.at(reader, head.identity):
                    break
            assert reader.follower is not None
            status = reader.follower.status()
            why = f"{reader.process.name} does not reach {head.identity}: {status}"
            self.judge.check("live", holds=self.at(reader, head.identity), why=why)

    def arrive_at_document(self, reader: DocumentReader) -> None:
        """Liveness of an artifact channel: the newest head's document, unless two writers share its epoch."""
        for _ in range(2):
            reader.poll()
            self.world.pause("settle", self.setup.weather.lag + 1)
        heads = self.judge.newest(CHANNEL)
        if len(heads) == 1 and heads[0].identity is not None:
            held = reader.follower.held.get(CHANNEL)
            why = f"the reader of documents holds {held}, the head is {heads[0].identity}"
            self.judge.check("live", holds=held is not None and held[0] >= heads[0].identity, why=why)

    @staticmethod
    def at(reader: Reader, identity: Identity) -> bool:
        """True when a follower serves that version, or a later one that a stray request hid from the bucket since."""
        return (
            reader.follower is not None
            and reader.follower.status().ready
            and (reader.engine.identity or identity) >= identity
        )


def play(seed: int) -> tuple[Counter[str], str]:
    """Play one seed; returns what was counted and the hash of the trace. Raises what broke, with the way to replay."""
    with Play(seed) as stage:
        try:
            stage.random()
        except BaseException as error:
            error.add_note(f"{stage.world.tail()}\nreplay: {REPLAY.format(seed=seed)}")
            raise
        stage.world.count["steps"] += stage.world.steps
        return stage.world.count, stage.world.digest()


REPLAY = "PYTHONPATH=tests .venv/bin/python -m sim.run --seed {seed} --seeds 1"
