"""The tabs beside the rollouts: Tasks, Play, Plots and Channels. Each adds its components and wires its events."""

from __future__ import annotations

from typing import Any

import gradio as gr

from sync.errors import DeltawireError
from sync.schema.artifacts import ARTIFACT_CHANNELS

from . import plots, render, views
from .play import Game, Games
from .reader import Reader

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_CHOOSE_RUN = render.notice("No run chosen", "Choose a run that publishes its harness: one with an `artifacts` URL.")
_NO_GAME = render.notice("No episode", "Choose an environment, a task and a seed, then press Start.")


def tasks_tab(reader: Reader) -> tuple[gr.Tab, gr.HTML, Any]:
    """The Tasks tab: (tab, its content, the function that reads it anew)."""

    async def read() -> str:
        try:
            known = (await reader.environments()).environments
            stats = (await reader.summary()).tasks
            every = {info.name: await reader.tasks(info.name) for info in known}
        except DeltawireError as error:
            return render.notice("The tasks cannot be read", str(error), "bad")
        return views.tasks(known, stats, every)

    with gr.Tab("Tasks", id="tasks") as tab:
        content = gr.HTML(elem_id="dw-tasks", apply_default_css=False)
    tab.select(read, None, content, **QUIET)
    return tab, content, read


def plots_tab(reader: Reader) -> tuple[gr.Tab, gr.HTML, Any]:
    """The Plots tab: (tab, its content, the function that reads it anew)."""

    async def read() -> str:
        try:
            return plots.plots(await reader.series(""))
        except DeltawireError as error:
            return render.notice("The plots cannot be drawn", str(error), "bad")

    with gr.Tab("Plots", id="plots") as tab:
        content = gr.HTML(elem_id="dw-plots", apply_default_css=False)
    tab.select(read, None, content, **QUIET)
    return tab, content, read


class PlayTab:
    """The Play tab: one episode per page, ended when the page goes away."""

    def __init__(self, reader: Reader, games: Games) -> None:
        self._reader, self._games = reader, games
        with gr.Tab("Play", id="play") as tab, gr.Row():
            with gr.Column(scale=2, min_width=260):
                self.environment = gr.Dropdown([], label="Environment", elem_id="dw-play-environment")
                self.task = gr.Dropdown([], label="Task", elem_id="dw-play-task")
                self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="dw-play-seed")
                start = gr.Button("Start", variant="primary", elem_id="dw-play-start")
            with gr.Column(scale=5, min_width=300):
                self.game = gr.HTML(_NO_GAME, elem_id="dw-play-game", apply_default_css=False)
                said = gr.Textbox(label="Your answer", lines=2, max_length=20_000, elem_id="dw-play-text")
                say = gr.Button("Send", elem_id="dw-play-send")
        self.tab = tab
        self.choices = [self.environment, self.task]
        tab.select(self.opened, self.environment, self.choices, **QUIET)
        self.environment.input(self.tasks, self.environment, self.task, **QUIET)
        start.click(self.start, [self.environment, self.task, self.seed], self.game, **QUIET)
        gr.on([say.click, said.submit], self.say, said, [self.game, said], **QUIET)

    async def opened(self, chosen: str | None) -> tuple[Any, Any]:
        """The environments, and the tasks of the one that is chosen."""
        try:
            names = [info.name for info in (await self._reader.environments()).environments]
        except DeltawireError as error:
            gr.Warning(str(error))
            return gr.skip(), gr.skip()
        if not names:
            return gr.skip(), gr.skip()
        name = chosen if chosen in names else names[0]
        return gr.update(choices=names, value=name), await self.tasks(name)

    async def tasks(self, environment: str) -> Any:
        """The tasks of one environment."""
        try:
            found = list(await self._reader.tasks(environment))
        except DeltawireError as error:
            gr.Warning(str(error))
            return gr.skip()
        return gr.update(choices=found, value=found[0] if found else None)

    async def start(self, environment: str, task: str, seed: float | None, request: gr.Request) -> str:
        """Begin an episode in place of the one before."""
        try:
            drawn = None if seed is None else int(seed)
            return _shown(await self._games.start(str(request.session_hash), environment or "", task or "", drawn))
        except DeltawireError as error:
            return render.notice("No episode was started", str(error), "bad")

    async def say(self, text: str, request: gr.Request) -> tuple[str, Any]:
        """Take one turn."""
        try:
            game = self._games.game(str(request.session_hash))
            await game.ask("step", {"message": text})
        except DeltawireError as error:
            return render.notice("The turn was not taken", str(error), "bad"), gr.skip()
        return _shown(game), ""

    async def left(self, request: gr.Request) -> None:
        """The page went away."""
        await self._games.leave(str(request.session_hash))


def _shown(game: Game) -> str:
    title = f"{game.environment} · {game.facts.get('task', 'task unknown')} · seed {game.facts.get('seed', 'unknown')}"
    return views.game(title, game.talk, game.rewards, done=game.done, success=game.success)


class ChannelsTab:
    """The Channels tab: the log of a run's channels, and two versions of one of its artifacts side by side."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        with gr.Tab("Channels", id="channels") as tab:
            with gr.Row():
                self.run = gr.Dropdown([], label="Run", elem_id="dw-channels-run", min_width=140)
                self.channel = gr.Dropdown(
                    list(ARTIFACT_CHANNELS), value="rubric", label="Artifact", elem_id="dw-channels-artifact",
                    min_width=140,
                )  # fmt: skip
                self.old = gr.Dropdown([], label="From version", elem_id="dw-channels-old", min_width=140)
                self.new = gr.Dropdown([], label="To version", elem_id="dw-channels-new", min_width=140)
            self.diff = gr.HTML(elem_id="dw-channels-diff", apply_default_css=False)
            self.log = gr.HTML(_CHOOSE_RUN, elem_id="dw-channels-log", apply_default_css=False)
        self.tab = tab
        self.outputs = [self.run, self.channel, self.old, self.new, self.diff, self.log]
        tab.select(self.selected, [self.run, self.channel], self.outputs, **QUIET)
        gr.on([self.run.input, self.channel.input], self.selected, [self.run, self.channel], self.outputs, **QUIET)
        pair = [self.run, self.channel, self.old, self.new]
        gr.on([self.old.input, self.new.input], self.compare, pair, self.diff, **QUIET)

    async def selected(self, run: str | None, channel: str) -> tuple[Any, ...]:
        """The channels of `run`, and the two newest versions of the artifact compared."""
        return await self.show(run or "", channel, "")

    async def show(self, run: str, channel: str, version: str) -> tuple[Any, ...]:
        """The same, for one version and the one before it where `version` is not empty."""
        names: list[str] = []
        try:
            names = [info.name for info in (await self._reader.status()).runs]
            run = run or (names[0] if names else "")
            if not run:
                return gr.update(choices=[]), channel, *(gr.update(choices=[], value=None),) * 2, "", _CHOOSE_RUN
            found = await self._reader.channels(run)
        except DeltawireError as error:
            told = render.notice("The channels cannot be read", str(error), "bad")
            none = gr.update(choices=[], value=None)
            return gr.update(choices=names, value=run or None), channel, none, none, "", told
        listed = [v.version for line in found.channels if line.channel == channel for v in line.versions]
        new = version or (listed[0] if listed else "")
        before = listed[listed.index(new) + 1 :] if new in listed else listed
        old = before[0] if before else ""
        choices = [("nothing (show it alone)", ""), *((v, v) for v in listed)]
        return (
            gr.update(choices=names, value=run),
            channel,
            gr.update(choices=choices, value=old),
            gr.update(choices=listed, value=new or None),
            await self.compare(run, channel, old, new),
            views.channels(found, run),
        )

    async def compare(self, run: str, channel: str, old: str | None, new: str | None) -> str:
        """Two versions of an artifact side by side, or one alone."""
        if not new:
            return render.notice(f"No {channel} yet", f"Run {run} has published no version of its {channel}.")
        try:
            first = await self._reader.artifact(run, channel, old) if old else None
            return views.difference(first, await self._reader.artifact(run, channel, new))
        except DeltawireError as error:
            return render.notice("The versions cannot be compared", str(error), "bad")
