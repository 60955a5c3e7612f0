"""The inspector page: run state, the rollout list, and one rollout turn by turn, all read over HTTP."""

from __future__ import annotations

import time
from typing import Any, get_args

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.responses import Response

from sync.asgi import error_json
from sync.errors import DeltawireError, InvalidRequest
from sync.schema.rollouts import RolloutStatus

from . import render
from .reader import Reader
from .style import CSS

PAGE = 50
REFRESH_SECONDS = 3.0
QUEUE = 256

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
        head=f'<style>{CSS}</style><meta name="robots" content="noindex">',
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
    page = _Page(Reader(base_url, token))
    with gr.Blocks(title="Deltawire inspector", analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML('<div class="dw"><h1>Deltawire<span>rollout inspector</span></h1></div>', apply_default_css=False)
        strip = gr.HTML(elem_id="dw-strip", apply_default_css=False)
        offset, chosen, names = gr.State(0), gr.State(""), gr.State([_ALL_RUNS])
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
                colour = gr.Radio(
                    _COLOURINGS, value="mask", label="Colour tokens by", elem_id="dw-colour", visible=False
                )
                tokens = gr.HTML(elem_id="dw-tokens", apply_default_css=False)
        listing, shown = [offset, table, where, newer, older], [chosen, detail, colour, tokens]
        view = [run, status, chosen]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        blocks.load(page.opened, [colour], shown, **quiet).then(
            page.status, [names], [strip, names, run], **quiet
        ).then(page.first, view, listing, **quiet)
        tick = gr.Timer(REFRESH_SECONDS).tick
        tick(page.status, [names], [strip, names, run], **quiet)
        tick(page.follow, [live, offset, *view], listing, js=_UNLESS_POINTED_AT, **quiet)
        gr.on([run.input, status.input], page.first, view, listing, **quiet)
        newer.click(page.newer, [offset, *view], listing, **quiet)
        older.click(page.older, [offset, *view], listing, **quiet)
        table.click(page.choose, [colour], shown, **quiet)
        colour.input(page.recolour, [chosen, colour], tokens, **quiet)
    return blocks.queue(max_size=QUEUE, default_concurrency_limit=16, api_open=False)


class _Page:
    """The page's events. A failure of the service becomes a notice where the content would be."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def status(self, names: list[Any]) -> tuple[Any, Any, Any]:
        """Header strip, and the run filter's choices where they changed."""
        try:
            status = await self._reader.status()
        except DeltawireError as error:
            return (
                render.notice("The service's status cannot be read", str(error), "bad"),
                gr.skip(),
                gr.skip(),
            )
        now = [_ALL_RUNS, *((run.name, run.name) for run in status.runs)]
        same = [tuple(n) for n in names] == now
        return render.strip(status, time.time()), now, gr.skip() if same else gr.update(choices=now)

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
        shown = gr.update(visible=True)
        return name, render.rollout(item, time.time()), shown, render.tokens(item, colour)

    async def recolour(self, chosen: str, colour: render.Colouring) -> str:
        """The chosen rollout's tokens in another colouring."""
        try:
            return render.tokens(await self._reader.rollout(chosen), colour)
        except DeltawireError as error:
            return render.notice("The rollout cannot be read", str(error), "bad")
