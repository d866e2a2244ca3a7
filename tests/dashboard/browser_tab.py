"""A page in Chromium for tests: act, then wait for what must come of it.

Every reading here is a condition that is waited for, with patience that costs nothing when all is well. There is no way
to read a text, a value or the address once: what a page shows after an action comes from another process, in its own
time, and a machine that does other work takes as long as it likes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinfer.dashboard.launch import Server

PATIENCE = 120.0  # s for anything a page does
RUN = 300.0  # s for a run with a real model
POLL = 150  # ms

# Streamlit's own, on a deep link: it looks for the server's folder beside the page.
KNOWN_404 = re.compile(r"/(techniques|compare|capacity|memory|roofline)/_stcore/(health|host-config)$")

SETTLED = r"""
num_charts => {  // same layout in five looks, 100 ms apart, with nothing left to load or draw
  const charts = [...document.querySelectorAll('[data-testid=stPlotlyChart]')];
  const app = document.querySelector('[data-testid=stApp]'), title = document.querySelector('[data-testid=stMain] h1');
  const idle = app && app.dataset.testScriptState === 'notRunning' && app.dataset.testConnectionState === 'CONNECTED';
  const busy = !idle || !title || document.querySelector('[data-testid=stSkeleton]') || charts.length < num_charts
    || charts.some(c => !c.querySelector('.main-svg')) || document.fonts.status !== 'loaded';
  const blocks = [...document.querySelectorAll('[data-testid=stMain] [data-testid=stElementContainer]')];
  const look = busy ? Math.random() : blocks.map(e => { const r = e.getBoundingClientRect(); return [r.top, r.height].join(); }).join(';');
  const seen = window.seenLayout || {look: null, times: 0};
  window.seenLayout = {look, times: look === seen.look ? seen.times + 1 : 0};
  return window.seenLayout.times >= 4;
}
"""

# What is wrong inside each chart: texts outside or over each other, axes much wider than their data.
CHARTS = r"""
() => [...document.querySelectorAll('.js-plotly-plot')].map(g => {
  const problems = [], outer = g.getBoundingClientRect();
  const texts = [...g.querySelectorAll('.annotation-text, .textpoint text, .bartext, .legendtext, .xtick text, .ytick text')]
    .filter(e => e.textContent.trim() && getComputedStyle(e).opacity !== '0')
    .map(e => ({text: e.textContent, box: e.getBoundingClientRect()}))
    .filter(t => t.box.width > 1 && t.box.height > 1);
  for (const t of texts) {
    if (t.box.left < outer.left - 2 || t.box.right > outer.right + 2 || t.box.top < outer.top - 2 || t.box.bottom > outer.bottom + 2)
      problems.push('outside: ' + t.text);
  }
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const a = texts[i].box, b = texts[j].box;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 2 && y > 3) problems.push('overlap: ' + texts[i].text + ' / ' + texts[j].text);
  }
  for (const [axis, of] of [['xaxis', 'x'], ['yaxis', 'y']]) {
    const layout = g._fullLayout[axis];
    if (!layout || layout.type === 'category') continue;
    const log = layout.type === 'log';
    let values = [];
    for (const trace of g._fullData) {
      if (trace[of + 'axis'] !== of || (trace.hoverinfo === 'skip' && !(trace['error_' + of] || {}).visible)) continue;
      const data = Array.from(trace[of] || []).filter(v => typeof v === 'number' && isFinite(v) && (!log || v > 0));
      values = values.concat(log ? data.map(Math.log10) : data);
      const error = trace['error_' + of] || {};
      if (error.visible && error.array)
        data.forEach((v, k) => values.push(v + (error.array[k] || 0), v - ((error.arrayminus || [])[k] || 0)));
    }
    const stacked = of === 'x' && g._fullLayout.barmode === 'stack' ? g._fullData.filter(t => t.type === 'bar' && !t.base) : [];
    if (stacked.length) Array.from(stacked[0].x).forEach((_, k) => values.push(stacked.reduce((sum, t) => sum + t.x[k], 0)));
    if (values.length < 2) continue;
    if (!log && (layout.rangemode === 'tozero' || g._fullData.some(t => t.type === 'bar'))) values.push(0);
    const extent = Math.max(...values) - Math.min(...values), range = Math.abs(layout.range[1] - layout.range[0]);
    const rows = of === 'y' && g._fullData.some(t => t.type === 'bar' && t.orientation === 'h');
    if (!rows && extent > 0 && range > 1.25 * extent + (log ? 0.2 : 0) + (axis === 'xaxis' && extent < 0.3 ? 0.2 : 0))
      problems.push(axis + ' range ' + range + ' for data ' + extent);
  }
  const named = g.closest('[aria-label]'), label = named ? named.getAttribute('aria-label') : '';
  if (label.length <= 40) problems.push('no words: ' + label);
  if (outer.height < 160 || outer.width < 250) problems.push('too small: ' + outer.width + ' x ' + outer.height);
  return problems;
}).flat()
"""

# Blocks of the page that lie over each other (what a closed expander holds is not seen) or outside of it.
BLOCKS = r"""
() => {
  const found = [], blocks = [...document.querySelectorAll(
    '[data-testid=stMain] [data-testid=stMetric], [data-testid=stMain] .js-plotly-plot, [data-testid=stMain] h1, [data-testid=stMain] h3, ' +
    '[data-testid=stMain] [data-testid=stSelectbox], [data-testid=stMain] [data-testid=stButton]')]
    .filter(e => e.checkVisibility()).map(e => ({name: e.dataset.testid || e.tagName, box: e.getBoundingClientRect()})).filter(b => b.box.width && b.box.height);
  for (let i = 0; i < blocks.length; i++) for (let j = i + 1; j < blocks.length; j++) {
    const a = blocks[i].box, b = blocks[j].box;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 3 && y > 3) found.push('overlap: ' + blocks[i].name + ' / ' + blocks[j].name);
  }
  for (const b of blocks) if (b.name === 'stMetric' && (b.box.left < 0 || b.box.right > innerWidth)) found.push('outside: a metric');
  if (document.documentElement.scrollWidth > innerWidth + 1) found.push('the page scrolls sideways');
  return found;
}
"""
LAYOUT = f"() => [...({CHARTS.strip()})(), ...({BLOCKS.strip()})()]"


class Tab:
    """A page in its own context, with everything it asked for and complained about."""

    def __init__(
        self, browser: Any, server: Server, width: int = 1440, height: int = 1800, scheme: str = "light"
    ) -> None:
        self._url = server.url
        self._context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self._context.set_default_timeout(1000 * PATIENCE)
        self._page = self._context.new_page()
        self._requests: list[str] = []
        self._complaints: list[str] = []
        self._page.on("request", lambda request: self._requests.append(request.url))
        self._page.on("websocket", lambda socket: self._requests.append(socket.url.replace("ws://", "http://")))
        self._page.on("response", self._answered)
        self._page.on("console", self._said)
        self._page.on("pageerror", lambda error: self._complaints.append(str(error)))

    def _answered(self, answer: Any) -> None:
        if answer.status >= 400 and not KNOWN_404.search(answer.url):
            self._complaints.append(f"{answer.status} for {answer.url}")

    def _said(self, message: Any) -> None:
        known = "404 (Not Found)" in message.text and KNOWN_404.search(message.location["url"])
        if message.type == "error" and not known:
            self._complaints.append(message.text)

    # --- acting -------------------------------------------------------------------------------------

    def open(self, path: str, charts: int = 0) -> None:
        """Go to a page of the server and wait until it is all there, with at least so many charts."""
        self._page.goto(f"{self._url}/{path}")
        self.settle(charts)

    def click(self, name: str, role: str = "button", within: Any = None) -> None:
        """Click what is called so (a shortcut may follow), once it is there, can be clicked and lies still."""
        fresh = "[data-testid=stElementContainer]:not([data-stale=true])"
        place = self._page if role == "link" else (within or self._page).locator(fresh)
        place.get_by_role(role, name=re.compile(rf"^\W*{re.escape(name)}\b")).first.click()

    def click_text(self, text: str) -> None:
        self._page.get_by_text(text).first.click()

    def fill(self, label: str, value: str) -> None:
        """Give a number field a value, when no run of the script can put another one in its place."""
        self.settle()
        field = self._page.get_by_role("spinbutton", name=label)
        field.fill(value)
        field.press("Enter")

    def press(self, keys: str) -> None:
        """Press keys on the page at rest: shortcuts of buttons that are drawn later are not heard."""
        self.settle()
        self._page.keyboard.press(keys)

    def back(self) -> None:
        self._page.go_back()

    def forward(self) -> None:
        self._page.go_forward()

    def reload(self) -> None:
        self._page.reload()

    def expander(self, words: str, holds: str) -> Any:
        """The first expander called `words`, opened, with the text `holds` to be seen in it."""
        found = self._page.locator("[data-testid=stExpander]", has_text=words).first
        found.locator("summary").click()
        found.get_by_text(holds).wait_for()
        return found

    def download(self, name: str, within: Any) -> str:
        """The text of the file behind a button."""
        with self._page.expect_download() as download:
            self.click(name, within=within)
        return Path(download.value.path()).read_text()

    def close(self) -> None:
        self._context.close()

    # --- waiting ------------------------------------------------------------------------------------

    def settle(self, charts: int = 0) -> None:
        """Until the script has run, no skeleton is left, `charts` charts and all others are drawn and nothing moves.

        For opening a page and before a look at its layout, not for what an action brings: a page that does not yet know
        of it is at rest, too. Nor while a run is watched, which never rests.
        """
        self._page.evaluate("window.seenLayout = null")
        self._page.wait_for_function(SETTLED, arg=charts, polling=100)

    def expect(self, read: Callable[[], Any], good: Callable[[Any], Any], what: str, patience: float = PATIENCE) -> Any:
        """The first reading that is good; an AssertionError with the last one when none comes."""
        deadline = time.monotonic() + patience
        while True:
            late = time.monotonic() > deadline
            found = read()
            if good(found):
                return found
            if late:
                raise AssertionError(f"no {what} in {patience:.0f} s, at last:\n{found}")
            self._page.wait_for_timeout(POLL)

    def expect_text(self, pattern: str, patience: float = PATIENCE) -> re.Match[str]:
        """The match of `pattern` in what the page says."""
        found = self.expect(self._text, lambda text: re.search(pattern, text), f"text {pattern!r}", patience)
        match = re.search(pattern, found)
        assert match is not None
        return match

    def expect_query(self, name: str, wanted: str | Callable[[str | None], Any] | None) -> str:
        """The query parameter, once it is `wanted`: a value, None for absent, or what a predicate accepts."""
        good = wanted if callable(wanted) else lambda value: value == wanted
        found = self.expect(lambda: self._query().get(name), good, f"{name} = {wanted} in the address")
        return found or ""

    def expect_page(self, name: str) -> None:
        self.expect(lambda: self._page.url, lambda url: re.search(rf"/{name}(\?|$)", url), f"page {name}")

    def expect_value(self, label: str, value: str) -> None:
        """A number field shows the value."""
        field = self._page.get_by_role("spinbutton", name=label)
        self.expect(field.input_value, lambda found: found == value, f"{label} = {value}")

    def expect_script(self, script: str, good: Callable[[Any], Any], what: str) -> None:
        """A script of the page returns something good."""
        self.expect(lambda: self._page.evaluate(script), good, what)

    def expect_layout(self, charts: int) -> None:
        """At rest, with `charts` charts at least, nothing is cut, covered, stretched or without words."""

        def look() -> list[str]:
            self.settle(charts)
            return list(self._page.evaluate(LAYOUT))

        self.expect(look, lambda problems: not problems, "clean layout")

    def address(self, job: str) -> str:
        """Path and query of the page that shows `job`, without the server."""
        self.expect_query("job", job)
        return str(self._page.url).split("/", 3)[3]

    def assert_clean(self) -> None:
        """It asked no other machine for anything, nothing failed, and it did not complain."""
        outside = [url for url in self._requests if not url.startswith((self._url, "data:", "blob:"))]
        assert outside == [] and self._complaints == []
        text = self._text()
        assert "could not be drawn" not in text and "encountered an error" not in text

    # --- readings: only for conditions ----------------------------------------------------------------

    def _text(self) -> str:
        return str(self._page.inner_text("[data-testid=stMain]"))

    def _query(self) -> dict[str, str]:
        return dict(self._page.evaluate("Object.fromEntries(new URLSearchParams(location.search))"))
