"""The inspector page: run state over tabs, the first of which lists rollouts; everything is read over HTTP."""

from __future__ import annotations

import time
from typing import Any, get_args

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.responses import Response

from sync.asgi import error_json
from sync.errors import DeltawireError, InvalidRequest
from sync.schema.artifacts import ARTIFACT_CHANNELS
from sync.schema.rollouts import RolloutStatus

from . import render, views
from .keys import HELP, KEYS
from .play import Games
from .reader import Reader
from .style import CSS
from .tabs import QUIET, ChannelsTab, PlayTab, plots_tab, tasks_tab

PAGE = 50
REFRESH_SECONDS = 3.0
QUEUE = 256

_TABS = ("rollouts", "tasks", "play", "plots", "channels", "queue")
_ALL_RUNS = ("all runs", "")
_ANY_STATUS = ("any status", "")
_COLOURINGS = [("mask", "mask"), ("logprob", "logprob"), ("weight version", "version")]
_CHOOSE = render.notice("No rollout chosen", "Choose one in the list, or open this page with ?rollout=<id>.")
_ON_ROW = """
element.addEventListener('click', (event) => {
  const row = event.target.closest('tr[data-rollout]');
  if (!row || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  element.querySelectorAll('tr[aria-current]').forEach((r) => r.removeAttribute('aria-current'));
  row.setAttribute('aria-current', 'true');
  const url = new URL(window.location);
  url.searchParams.set('rollout', row.dataset.rollout);
  window.history.replaceState(null, '', url);
  trigger('click', { rollout: row.dataset.rollout });
});
"""
_ON_ROLLOUT = """
element.addEventListener('click', (event) => {
  const link = event.target.closest('a[data-rollout]');
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  const url = new URL(window.location);
  url.searchParams.set('rollout', link.dataset.rollout);
  window.history.replaceState(null, '', url);
  trigger('click', { rollout: link.dataset.rollout });
});
watch('value', () => {
  const detail = document.getElementById('dw-detail');
  if (window.innerWidth < 1100) detail.scrollIntoView({ behavior: 'smooth' }); else detail.scrollTop = 0;
});
"""
# Rows must not move under a pointer that is about to choose one.
_UNLESS_POINTED_AT = """(live, ...rest) =>
  [live && !(matchMedia('(hover: hover)').matches && document.querySelector('#dw-list:hover')), ...rest]"""


def mount(app: FastAPI, base_url: str, token: str) -> FastAPI:
    """Mount the inspector at `/` of `app` and return `app`; call it after the app's own routes were added.

    `base_url` is where this process answers (http://127.0.0.1:port) and `token` our bearer token. Unknown /v1
    routes stay JSON errors instead of pages. Nothing is loaded from, or reported to, another host.
    """

    async def unknown(request: Request) -> Response:
        text = f"no route {request.method} {request.url.path}; the page at / shows what this service does"
        return Response(error_json("not_found", text), status_code=404, media_type="application/json")

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    app.add_route("/v1/{rest:path}", unknown, methods=methods, include_in_schema=False)
    fonts = {"font": ["ui-sans-serif", "system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    gr.mount_gradio_app(
        app,
        build(base_url, token),
        path="/",
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="slate", **fonts),
        head=f'<style>{CSS}</style><script>{KEYS}</script><meta name="robots" content="noindex">',
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        max_file_size="1kb",
        show_error=True,
    )
    return app


def build(base_url: str, token: str) -> gr.Blocks:
    """Lay out the page over the service at `base_url` and wire its events; every event reads anew."""
    reader = Reader(base_url, token)
    page = _Page(reader)
    with gr.Blocks(title="Deltawire inspector", analytics_enabled=False, fill_width=True) as blocks:
        title = '<div class="dw"><h1>Deltawire<span>rollout inspector</span></h1></div>'
        gr.HTML(title + HELP, apply_default_css=False)
        strip = gr.HTML(elem_id="dw-strip", apply_default_css=False)
        names = gr.State([_ALL_RUNS])
        with gr.Tabs(elem_id="dw-tabs") as tabs:
            with gr.Tab("Rollouts", id="rollouts"):
                run, refresh, follow = _rollouts(blocks, page)
            tasks_tab(reader)
            play = PlayTab(reader, Games(base_url, token))
            plots_tab(reader)
            channels = ChannelsTab(reader)
            with gr.Tab("Queue", id="queue"):
                queue = gr.HTML(elem_id="dw-queue", apply_default_css=False)
        header = [strip, queue, names, run]
        blocks.load(page.status, [names], header, **QUIET).then(page.first, *refresh, **QUIET)
        tick = gr.Timer(REFRESH_SECONDS).tick
        tick(page.status, [names], header, **QUIET)
        tick(page.follow, *follow, js=_UNLESS_POINTED_AT, **QUIET)

        async def opened_at(request: gr.Request) -> tuple[Any, ...]:
            asked = request.query_params
            tab = asked.get("tab", "")
            if tab not in _TABS:
                return (gr.skip(),) * (1 + len(channels.outputs))
            if tab != "channels" or not asked.get("run"):
                return gr.update(selected=tab), *(gr.skip(),) * len(channels.outputs)
            wanted = asked.get("channel", "rubric")
            channel = wanted if wanted in ARTIFACT_CHANNELS else "rubric"
            shown = await channels.show(asked["run"][:128], channel, asked.get("version", "")[:64])
            return gr.update(selected=tab), *shown

        blocks.load(opened_at, None, [tabs, *channels.outputs], **QUIET)
        blocks.unload(play.left)
    return blocks.queue(max_size=QUEUE, default_concurrency_limit=16, api_open=False)


def _rollouts(blocks: gr.Blocks, page: _Page) -> tuple[Any, list[Any], list[Any]]:
    """The Rollouts tab; returns its run filter, and inputs and outputs of reading the list anew and of following it."""
    offset, chosen = gr.State(0), gr.State("")
    with gr.Row():
        with gr.Column(scale=5, min_width=340):
            with gr.Row():
                run = gr.Dropdown([_ALL_RUNS], value="", label="Run", elem_id="dw-run", min_width=120)
                states = [_ANY_STATUS, *((s, s) for s in get_args(RolloutStatus))]
                status = gr.Dropdown(states, value="", label="Status", elem_id="dw-status", min_width=120)
            with gr.Row(elem_id="dw-pager"):
                newer = gr.Button("Newer", size="sm", interactive=False, elem_id="dw-newer")
                older = gr.Button("Older", size="sm", interactive=False, elem_id="dw-older")
                where = gr.HTML(elem_id="dw-where", apply_default_css=False)
                live = gr.Checkbox(value=True, label="Follow", elem_id="dw-live", container=False, min_width=80)
            table = gr.HTML(elem_id="dw-list", js_on_load=_ON_ROW, apply_default_css=False)
        with gr.Column(scale=5, min_width=340, elem_id="dw-detail"):
            detail = gr.HTML(_CHOOSE, elem_id="dw-rollout", js_on_load=_ON_ROLLOUT, apply_default_css=False)
            colour = gr.Radio(_COLOURINGS, value="mask", label="Colour tokens by", elem_id="dw-colour", visible=False)
            tokens = gr.HTML(elem_id="dw-tokens", apply_default_css=False)
    listing, shown = [offset, table, where, newer, older], [chosen, detail, colour, tokens]
    view = [run, status, chosen]
    blocks.load(page.opened, [colour], shown, **QUIET)
    gr.on([run.input, status.input], page.first, view, listing, **QUIET)
    newer.click(page.newer, [offset, *view], listing, **QUIET)
    older.click(page.older, [offset, *view], listing, **QUIET)
    gr.on([table.click, detail.click], page.choose, [colour], shown, **QUIET)
    colour.input(page.recolour, [chosen, colour], tokens, **QUIET)
    return run, [view, listing], [[live, offset, *view], listing]


class _Page:
    """The page's events. A failure of the service becomes a notice where the content would be."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def status(self, names: list[Any]) -> tuple[Any, Any, Any, Any]:
        """Header strip, the queue, and the run filter's choices where they changed."""
        try:
            status = await self._reader.status()
        except DeltawireError as error:
            told = render.notice("The service's status cannot be read", str(error), "bad")
            return told, told, gr.skip(), gr.skip()
        now = [_ALL_RUNS, *((run.name, run.name) for run in status.runs)]
        same = [tuple(n) for n in names] == now
        shown = render.strip(status, time.time()), views.queue(status)
        return *shown, now, gr.skip() if same else gr.update(choices=now)

    async def first(self, run: str, status: str, chosen: str) -> tuple[Any, ...]:
        """The newest page of what the filters choose."""
        return await self._list(0, run, status, chosen)

    async def newer(self, offset: int, run: str, status: str, chosen: str) -> tuple[Any, ...]:
        """One page towards the newest."""
        return await self._list(max(0, offset - PAGE), run, status, chosen)

    async def older(self, offset: int, run: str, status: str, chosen: str) -> tuple[Any, ...]:
        """One page towards the oldest."""
        return await self._list(offset + PAGE, run, status, chosen)

    async def follow(self, live: bool, offset: int, run: str, status: str, chosen: str) -> tuple[Any, ...]:  # noqa: FBT001 - gradio passes inputs by place
        """The newest page again, unless another page is being read or following is off."""
        if not live or offset:
            return (gr.skip(),) * 5
        return await self._list(0, run, status, chosen)

    async def _list(self, offset: int, run: str, status: str, chosen: str) -> tuple[Any, ...]:
        try:
            page = await self._reader.recent(run or "", status or "", offset, PAGE)
        except DeltawireError as error:
            html = render.notice("The rollouts cannot be listed", str(error), "bad")
            return offset, html, "", gr.update(interactive=offset > 0), gr.update(interactive=False)
        end = offset + len(page.rollouts)
        where = f"{offset + 1:,}–{end:,} of {page.total:,}" if page.rollouts else f"0 of {page.total:,}"
        return (
            offset,
            render.table(page, chosen, time.time()),
            f'<span class="dw dw-soft" data-testid="where">{where}</span>',
            gr.update(interactive=offset > 0),
            gr.update(interactive=end < page.total),
        )

    async def opened(self, colour: render.Colouring, request: gr.Request) -> tuple[Any, ...]:
        """The rollout that the page's address names, if it names one."""
        name = request.query_params.get("rollout", "")
        return await self._show(name, colour) if name else ("", _CHOOSE, gr.update(visible=False), "")

    async def choose(self, colour: render.Colouring, event: gr.EventData) -> tuple[Any, ...]:
        """The rollout of the row that was clicked."""
        return await self._show(str(event.rollout), colour)

    async def _show(self, name: str, colour: render.Colouring) -> tuple[Any, ...]:
        try:
            item = await self._reader.rollout(name)
        except DeltawireError as error:
            gone = isinstance(error, InvalidRequest) and error.status == 404
            title = f"There is no rollout {name[:128]}" if gone else "The rollout cannot be read"
            return name, render.notice(title, str(error), "bad"), gr.update(visible=False), ""
        try:
            group = await self._reader.group(item.group)
        except DeltawireError:
            group = ()  # a Space of another release has no such route; its rollouts can be read all the same
        shown = gr.update(visible=True)
        return name, render.rollout(item, time.time(), group), shown, render.tokens(item, colour)

    async def recolour(self, chosen: str, colour: render.Colouring) -> str:
        """The chosen rollout's tokens in another colouring."""
        try:
            return render.tokens(await self._reader.rollout(chosen), colour)
        except DeltawireError as error:
            return render.notice("The rollout cannot be read", str(error), "bad")
