"""An artifact channel beside the weights: an editor that publishes documents, and a reader that takes the newest."""

from __future__ import annotations

from sync import ArtifactFollower, ArtifactPublisher, Identity
from sync.errors import CorruptObject, Fenced, ObjectMissing, StopError, StoreUnavailable
from sync.heads import HeadWatcher
from sync.schema.artifacts import Artifact, Curriculum

from .promises import Judge
from .setups import Setup
from .store import Bucket, View
from .world import Process, World

CHANNEL = "curriculum"


class Editor:
    """One writer of documents, each of them different. `offered`: what may stand under each version number."""

    def __init__(self, world: World, judge: Judge, bucket: Bucket, setup: Setup, process: Process) -> None:
        self.world, self.judge, self.setup, self.process = world, judge, setup, process
        self.view = View(bucket, process, setup.weather)
        self.offered: list[Artifact] = []
        self.committed: dict[Identity, Artifact] = {}

    def life(self) -> None:
        """Open, publish now and then, open again after an error."""
        rng, world = self.world.rng, self.world
        while not world.quiet:
            writer = ArtifactPublisher(self.view, CHANNEL, options=self.setup.term, clock=self.process.clock)
            try:
                with self.judge.bounded("editor"):
                    writer.open(takeover=True)
                for _ in range(rng.randint(1, 4)):
                    self.publish(writer)
                    world.pause("think", rng.choice((1.0, 10.0, 40.0)))
                with self.judge.bounded("editor"):
                    writer.close()
            except (StoreUnavailable, Fenced, StopError, CorruptObject, ObjectMissing) as error:
                world.note(f"{type(error).__name__}: {error}")
                world.pause("broken off", rng.uniform(1.0, 60.0))

    def publish(self, writer: ArtifactPublisher) -> None:
        """One document; an identity is given to one document only."""
        document = Curriculum(environment=f"e{len(self.offered)}")
        self.offered.append(document)
        with self.judge.bounded("editor"):
            identity = writer.publish(document, measured_against=None)
        self.judge.check("I4", holds=identity not in self.committed, why=f"{CHANNEL} {identity} is given twice")
        self.committed[identity] = document
        self.world.count["documents"] += 1

    def killed(self) -> None:
        """Nothing survives."""


class DocumentReader:
    """One reader of documents, without a memory of its own."""

    def __init__(self, world: World, judge: Judge, bucket: Bucket, editor: Editor, process: Process) -> None:
        self.world, self.judge, self.editor, self.process = world, judge, editor, process
        self.view = View(bucket, process, editor.setup.weather)
        self.start()

    def start(self) -> None:
        """A follower that knows nothing."""
        self.follower = ArtifactFollower(self.view, CHANNEL)
        self.follower._heads = HeadWatcher(self.view, CHANNEL, clock=self.process.clock)
        self.highest: Identity | None = None

    def life(self) -> None:
        """Poll until the faults end."""
        while not self.world.quiet:
            self.poll()
            self.world.pause("idle", self.world.rng.choice((1.0, 10.0, 30.0)))

    def poll(self) -> None:
        """One poll: the document held was offered, is the committed one of its identity, and is never an older one."""
        try:
            self.follower.poll()
        except (StoreUnavailable, CorruptObject) as error:
            self.world.note(f"{type(error).__name__}: {error}")
        held = self.follower.held.get(CHANNEL)
        if held is None:
            return
        identity, document = held
        known = self.editor.committed.get(identity, document)
        self.judge.check("I2", holds=document in self.editor.offered and document == known, why=f"document {identity}")
        self.judge.check("I3", holds=self.highest is None or identity >= self.highest, why=f"document {identity} again")
        self.highest = identity

    def killed(self) -> None:
        """It begins anew."""
        self.start()
