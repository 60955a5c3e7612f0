"""The inspector's stylesheet: system fonts, a palette for light and one for dark, one column on a phone."""

from __future__ import annotations

CSS = """
:root { --dw-ink:#1a2230; --dw-soft:#5b6675; --dw-line:#dde2e9; --dw-card:#fff; --dw-page:#f5f7fa;
  --dw-hover:#eef3fb; --dw-accent:#2457c5; --dw-good:#0b6b3a; --dw-warn:#8a5200; --dw-bad:#b3211b;
  --dw-mix:24%; }
.dark { --dw-ink:#e7ebf2; --dw-soft:#9aa7b8; --dw-line:#2c3542; --dw-card:#171d26; --dw-page:#0e1218;
  --dw-hover:#202937; --dw-accent:#82aaff; --dw-good:#5bd18f; --dw-warn:#f0b45a; --dw-bad:#ff8a80;
  --dw-mix:38%; }
body, .gradio-container { background:var(--dw-page) !important; }
.gradio-container { overflow:clip !important; --layout-gap:12px; --block-radius:10px;
  --block-background-fill:var(--dw-card); --block-border-color:var(--dw-line);
  --border-color-primary:var(--dw-line); --input-background-fill:var(--dw-card);
  --input-border-color:var(--dw-line); --block-info-text-color:var(--dw-soft);
  --block-padding:8px 12px; }
.gradio-container .main.fillable { padding:0 !important; }
.gradio-container .html-container { padding:0 !important; }
.gradio-container main { width:100%; max-width:1680px; margin:0 auto;
  padding:14px 20px 24px !important; }
.dw { color:var(--dw-ink); font-size:13px; line-height:1.45;
  font-family:ui-sans-serif,system-ui,sans-serif; }
.dw p { margin:0; color:inherit; }
.dw h3 { margin:0; font-size:15px; font-weight:650; overflow-wrap:anywhere; color:inherit; }
.dw h1 { margin:0; font-size:20px; font-weight:700; letter-spacing:-.01em; color:inherit; }
.dw h1 span { color:var(--dw-soft); font-weight:400; font-size:13px; letter-spacing:0;
  margin-left:8px; }
.dw-soft, .dw .dw-soft { color:var(--dw-soft); overflow-wrap:anywhere; }
.dw .dw-label { margin:4px 0 -4px; color:var(--dw-soft); font-size:11px; text-transform:uppercase;
  letter-spacing:.06em; }
.dw-card { background:var(--dw-card); border:1px solid var(--dw-line); border-radius:10px;
  padding:12px 14px; min-width:0; display:flex; flex-direction:column; gap:8px; }
.dw-card h3 + .dw-soft { margin-top:-6px; }
.dw-strip { display:grid; gap:10px;
  grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr)); }
.dw-facts { display:grid; grid-template-columns:repeat(auto-fit,minmax(74px,1fr)); gap:6px 8px;
  margin:0; }
.dw-facts div { min-width:0; }
.dw-facts dt { color:var(--dw-soft); font-size:11px; }
.dw-facts dd { margin:0; font-variant-numeric:tabular-nums; font-weight:600; overflow-wrap:anywhere; }
.dw-facts.dw-six { grid-template-columns:repeat(auto-fit,minmax(66px,1fr)); }
article .dw-facts { grid-template-columns:repeat(auto-fill,minmax(118px,1fr)); }
.dw-error { color:var(--dw-bad) !important; overflow-wrap:anywhere; }
.dw-pill { display:inline-block; border-radius:99px; padding:1px 8px; font-size:11px; font-weight:600;
  white-space:nowrap; vertical-align:1px; color:var(--dw-soft);
  background:color-mix(in srgb,currentColor 13%,transparent); }
.dw-pill + .dw-pill { margin-left:5px; }
.dw-pill.dw-good { color:var(--dw-good); }
.dw-pill.dw-warn { color:var(--dw-warn); }
.dw-pill.dw-bad { color:var(--dw-bad); }
.dw-yes { color:var(--dw-good); font-weight:700; }
.dw-no { color:var(--dw-bad); font-weight:700; }
.dw-none { color:var(--dw-soft); font-style:italic; font-weight:400; }
.dw-notice { background:var(--dw-card); border:1px dashed var(--dw-line); border-radius:10px;
  padding:14px 16px; }
.dw-notice.dw-bad { border:1px solid var(--dw-bad); }
.dw-notice.dw-bad strong { color:var(--dw-bad); }
.dw-notice p { margin-top:4px; color:var(--dw-soft); overflow-wrap:anywhere; }
.dw-scroll { background:var(--dw-card); border:1px solid var(--dw-line); border-radius:10px;
  overflow-x:auto; }
.dw-table { width:100%; border-collapse:collapse; font-variant-numeric:tabular-nums; }
.dw-table th { text-align:left; font-size:11px; font-weight:600; color:var(--dw-soft); padding:8px;
  border-bottom:1px solid var(--dw-line); }
.dw-table td { padding:6px 8px; border-bottom:1px solid var(--dw-line); white-space:nowrap;
  color:inherit; }
.dw-table tr:last-child td { border-bottom:0; }
.dw-table th:first-child, .dw-table td:first-child { padding-left:14px; }
.dw-table tbody tr { cursor:pointer; }
.dw-table tbody tr:hover { background:var(--dw-hover); }
.dw-table tr[aria-current] { background:color-mix(in srgb,var(--dw-accent) 14%,transparent);
  box-shadow:inset 3px 0 var(--dw-accent); }
.dw-table .dwc-id, .dw-table .dwc-task { max-width:170px; overflow:hidden; text-overflow:ellipsis; }
.dw-table a { color:var(--dw-accent); font-family:ui-monospace,Consolas,monospace; font-size:12px;
  text-decoration:none; }
.dw-table a:hover { text-decoration:underline; }
.dw-table .dwc-reward, .dw-table .dwc-tokens, .dw-table .dwc-age, .dw-table th:nth-child(4),
  .dw-table th:nth-child(7), .dw-table th:nth-child(8) { text-align:right; }
.dw-big { font-size:20px; }
.dw-big .dw-number { font-weight:700; }
.dw-bars { list-style:none; margin:0; padding:0; display:grid; gap:3px; }
.dw-bars li { display:grid; grid-template-columns:92px 1fr 76px; align-items:center; gap:8px;
  margin:0; }
.dw-bars span { overflow:hidden; text-overflow:ellipsis; }
.dw-bars b { text-align:right; font-variant-numeric:tabular-nums; }
.dw-bars i { display:block; height:8px; border-radius:4px; background:var(--dw-accent); min-width:2px; }
.dw-bars i.dw-minus { background:var(--dw-bad); }
ul.dw-findings { margin:0 !important; padding:8px 10px 8px 26px !important; list-style:disc;
  border-radius:8px; color:var(--dw-warn);
  background:color-mix(in srgb,var(--dw-warn) 10%,transparent); overflow-wrap:anywhere; }
.dw-talk { display:flex; flex-direction:column; gap:8px; }
.dw-bubble { max-width:86%; border:1px solid var(--dw-line); border-radius:12px; padding:6px 12px;
  background:var(--dw-page); align-self:flex-start; }
.dw-bubble small { color:var(--dw-soft); font-size:11px; }
.dw-bubble > div { white-space:pre-wrap; overflow-wrap:anywhere; }
.dw-bubble.dw-assistant { align-self:flex-end; border-color:transparent;
  background:color-mix(in srgb,var(--dw-accent) 16%,var(--dw-card)); }
.dw-bubble.dw-system, .dw-bubble.dw-tool { border-style:dashed;
  font-family:ui-monospace,Consolas,monospace; font-size:12px; }
.dw-tokens { background:var(--dw-card); border:1px solid var(--dw-line); border-radius:10px;
  padding:12px 14px; display:flex; flex-direction:column; gap:8px; }
.dw-legend { display:flex; flex-wrap:wrap; gap:4px 14px; }
.dw-legend span { display:inline-flex; align-items:center; gap:5px; }
.dw-legend .dw-t { width:14px; height:14px; padding:0; }
.dw-chain { display:flex; flex-wrap:wrap; gap:2px; max-height:420px; overflow:auto; }
.dw-t { font:11px/1.5 ui-monospace,Consolas,monospace; padding:1px 4px; border-radius:4px;
  border:1px solid transparent; background:color-mix(in srgb,var(--h) var(--dw-mix),transparent);
  cursor:default; }
.dw-t:hover { border-color:var(--dw-ink); }
.dw-t.dw-fork { box-shadow:-2px 0 var(--dw-bad); }
.dw-c { background:none; border-color:var(--dw-line); color:var(--dw-soft); }
.dw-m { --h:var(--dw-accent); }
.dw-p0 { background:color-mix(in srgb,#e8590c 6%,transparent); }
.dw-p1 { background:color-mix(in srgb,#e8590c 20%,transparent); }
.dw-p2 { background:color-mix(in srgb,#e8590c 38%,transparent); }
.dw-p3 { background:color-mix(in srgb,#e8590c 60%,transparent); }
.dw-p4 { background:#d9480f; color:#fff; }
.dw-v0 { --h:#0072b2; }
.dw-v1 { --h:#e69f00; }
.dw-v2 { --h:#009e73; }
.dw-v3 { --h:#cc79a7; }
.dw-v4 { --h:#56b4e9; }
.dw-v5 { --h:#d55e00; }
.dw-v6 { --h:#8f7ee7; }
.dw-v7 { --h:#b5a400; }
#dw-pager { align-items:center; flex-wrap:nowrap; }
#dw-pager button { min-width:70px; flex:0 0 auto; }
#dw-where { flex:1 1 auto; white-space:nowrap; }
#dw-live { flex:0 0 auto; width:auto; background:none; border:0; }
.dw a { color:var(--dw-accent); }
.dw-stack { display:flex; flex-direction:column; gap:10px; }
.dw-grid { width:100%; border-collapse:collapse; font-variant-numeric:tabular-nums; }
.dw-grid th, .dw-grid td { text-align:left; padding:6px 12px; border-bottom:1px solid var(--dw-line);
  color:inherit; }
.dw-grid th { font-size:11px; color:var(--dw-soft); }
.dw-nav { display:flex; gap:12px; color:var(--dw-soft); }
.dw-plots { display:grid; gap:12px; grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr)); }
.dw-plots figure { margin:0; }
.dw-plots figcaption { font-weight:650; }
.dw-plots svg { width:100%; height:auto; }
.dw-plots text { fill:var(--dw-soft); font-size:11px; }
.dw-axis { fill:none; stroke:var(--dw-line); }
.dw-line { fill:none; stroke:var(--h); stroke-width:1.6; }
.dw-plots circle { fill:var(--h); }
.dw-diff { display:flex; flex-direction:column; gap:8px; }
.dw-pair { background:var(--dw-card); border:1px solid var(--dw-line); border-left-width:4px;
  border-radius:8px; padding:8px 12px; overflow-wrap:anywhere; }
.dw-pair h4 { margin:0 0 4px; color:inherit; }
.dw-pair.dw-added { border-left-color:var(--dw-good); }
.dw-pair.dw-removed { border-left-color:var(--dw-bad); }
.dw-pair.dw-changed { border-left-color:var(--dw-warn); }
.dw-sides { display:grid; gap:12px; grid-template-columns:repeat(auto-fit,minmax(min(240px,100%),1fr)); }
.dw-pair mark { color:inherit; background:color-mix(in srgb,var(--dw-warn) 26%,transparent); }
.dw-pair small { color:var(--dw-soft); }
.dw a:focus-visible, .dw [tabindex]:focus-visible { outline:2px solid var(--dw-accent); outline-offset:2px; }
.dw-table tr:focus-within { background:var(--dw-hover); }
#dw-keys { color:var(--dw-ink); background:var(--dw-card); border:1px solid var(--dw-line);
  border-radius:10px; padding:16px 20px; margin:auto; }
@media (min-width:1100px) {
  #dw-detail { position:sticky; top:8px; max-height:calc(100vh - 16px); overflow:auto;
    flex-wrap:nowrap; }
}
#dw-detail > * { flex-shrink:0; }
@media (max-width:700px) {
  .gradio-container main { padding:10px !important; }
  .dw-strip { display:flex; overflow-x:auto; scroll-snap-type:x mandatory; }
  .dw-strip > * { flex:0 0 88%; scroll-snap-align:start; }
  .dw-strip > :only-child { flex-basis:100%; }
  .dw-scroll { max-height:62vh; overflow-y:auto; }
  .dw-table thead { display:none; }
  .dw-table td { border:0 !important; padding:0 !important; }
  .dw-table tr { display:grid; grid-template-columns:1fr 96px 44px 48px; gap:2px 8px;
    padding:8px 12px; border-bottom:1px solid var(--dw-line); }
  .dw-table tbody { display:block; }
  .dw-table { display:block; }
  .dw-table .dwc-id { grid-column:1; max-width:none; }
  .dw-table .dwc-status { grid-column:2; grid-row:1; text-align:right; }
  .dw-table .dwc-reward { grid-column:3; grid-row:1; }
  .dw-table .dwc-success { grid-column:4; grid-row:1; text-align:right; }
  .dw-table .dwc-task { grid-column:1; max-width:none; color:var(--dw-soft); }
  .dw-table .dwc-weights { grid-column:2; grid-row:2; text-align:right; color:var(--dw-soft); }
  .dw-table .dwc-tokens { grid-column:3; grid-row:2; color:var(--dw-soft); }
  .dw-table .dwc-age { grid-column:4; grid-row:2; color:var(--dw-soft); }
  .dw-bubble { max-width:94%; }
  .dw-facts, .dw-facts.dw-six { grid-template-columns:repeat(3,1fr); }
}
"""
