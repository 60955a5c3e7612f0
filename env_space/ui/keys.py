"""The page's keys: j and k move in the list, Enter opens, / goes to the filter, ? says all of them."""

from __future__ import annotations

HELP = """<dialog id="dw-keys" class="dw" aria-label="keys"><h3>Keys</h3><ul>
<li><b>j</b>, <b>k</b>: next and previous rollout in the list (arrows too, while the list has the focus)</li>
<li><b>Enter</b>: open it</li><li><b>n</b>, <b>p</b>: next and previous rollout of the open one's group</li>
<li><b>/</b>: the run filter</li><li><b>?</b>: this list; <b>Esc</b> closes it</li></ul></dialog>"""

KEYS = """
document.addEventListener('keydown', (event) => {
  const at = event.target;
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  const writes = at.isContentEditable || ['INPUT', 'TEXTAREA', 'SELECT'].includes(at.tagName);
  if (writes) { if (event.key === 'Escape') at.blur(); return; }
  const arrows = at.closest && at.closest('#dw-list');
  const step = { j: 1, k: -1, ArrowDown: arrows ? 1 : 0, ArrowUp: arrows ? -1 : 0 }[event.key] || 0;
  if (step) {
    const links = [...document.querySelectorAll('#dw-list tr[data-rollout] a')];
    if (!links.length) return;
    let now = links.indexOf(document.activeElement);
    if (now < 0) now = links.findIndex((a) => a.closest('tr').hasAttribute('aria-current'));
    event.preventDefault();
    const next = now < 0 ? 0 : now + step;
    links[Math.max(0, Math.min(links.length - 1, next))].focus();
  } else if (event.key === 'n' || event.key === 'p') {
    const word = event.key === 'n' ? 'next' : 'previous';
    document.querySelector(`#dw-rollout a[data-step="${word}"]`)?.click();
  } else if (event.key === '/') {
    const filter = document.querySelector('#dw-run input');
    if (filter) { event.preventDefault(); filter.focus(); }
  } else if (event.key === '?') {
    const keys = document.getElementById('dw-keys');
    if (keys && !keys.open) keys.showModal(); else keys?.close();
  }
});
"""
