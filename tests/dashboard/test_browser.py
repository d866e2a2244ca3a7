"""Both pages in headless Chromium: offline, no console errors, runs that are watched, cancelled and found again.

Marked `browser`; skipped with the reason where Chromium or Playwright is absent.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.run_store import RunStore
from twinfer.dashboard.jobs import JobManager
from twinfer.dashboard.launch import Server

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")

CHROMIUM = next((p for p in ("/usr/bin/chromium", shutil.which("chromium"), shutil.which("chromium-browser"),
                             shutil.which("google-chrome")) if p and Path(p).exists()), None)  # fmt: skip
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SMALL = "num_requests=4&output_len=8&input_len=16&spread=0&v=1"
LONG = "num_requests=60000&output_len=64&input_len=16&spread=0&v=1"
WIDTHS = {"desktop": (1440, 2400), "phone": (390, 3800)}
# streamlit's own, on a deep link
KNOWN_404 = re.compile(r"/(techniques|compare|capacity|memory|roofline)/_stcore/(health|host-config)$")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (chromium on the PATH)")
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield made
        made.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with Server(root) as made:
        yield made


@pytest.fixture(scope="module")
def stored(root: Path, request: pytest.FixtureRequest) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("dashboard_conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    made_up = module_from_spec(spec)
    spec.loader.exec_module(made_up)
    store = RunStore(root)
    store.save(made_up.make_record("engine"))
    store.save(made_up.make_record("simulator", decode=0.046, prefill=0.45, bands=True))


class Tab:
    """A page in its own context, with everything it asked for and complained about."""

    def __init__(
        self, browser: Any, server: Server, width: int = 1440, height: int = 1800, scheme: str = "light"
    ) -> None:
        self.url = server.url
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.missing: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url.replace("ws://", "http://")))
        self.page.on("response", lambda answer: self.missing.append(answer.url) if answer.status >= 400 else None)
        self.page.on(
            "console", lambda message: self.complaints.append(message.text) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, path: str) -> None:
        self.page.goto(f"{self.url}/{path}")
        self.settle()

    def settle(self) -> None:
        """Until the script has run, no skeleton is left, every chart is drawn and nothing moves.

        Before its first run the script is "notRunning" too, and charts load lazily: a click on a page that is still
        being laid out may hit what was there a moment ago.
        """
        self.page.evaluate("window.seenLayout = null")
        self.page.wait_for_function(SETTLED, polling=100, timeout=120_000)

    def text(self) -> str:
        return self.page.inner_text("[data-testid=stMain]")

    def wait_for_text(self, pattern: str, patience: float = 60) -> str:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            text = self.text()
            if re.search(pattern, text):
                return text
            self.page.wait_for_timeout(150)
        raise AssertionError(f"no {pattern!r} in:\n{self.text()}")

    def query(self) -> dict[str, str]:
        return dict(self.page.evaluate("Object.fromEntries(new URLSearchParams(location.search))"))

    def wait_for_query(self, name: str, value: str | None, patience: float = 20) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.query().get(name) == value:
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{name} is {self.query().get(name)!r}, not {value!r}")

    def assert_clean(self) -> None:
        outside = [url for url in self.requests if not url.startswith((self.url, "data:", "blob:"))]
        assert outside == []
        bad = [url for url in self.missing if not KNOWN_404.search(url)]
        assert bad == []
        said = [text for text in self.complaints if "404 (Not Found)" not in text]
        assert said == []
        assert len(self.complaints) <= 2 * max(1, sum(url.endswith("_stcore/health") for url in self.missing))


@pytest.fixture
def tab(browser: Any, server: Server) -> Iterator[Callable[..., Tab]]:
    made: list[Tab] = []

    def new(**kwargs: Any) -> Tab:
        made.append(Tab(browser, server, **kwargs))
        return made[-1]

    yield new
    for each in made:
        each.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", "techniques", "compare"])
def test_a_cold_deep_link_is_offline_and_quiet(tab, stored, path: str, scheme: str):
    t = tab(scheme=scheme)
    t.open(path)
    t.page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
    assert ("Real vs predicted" if path == "compare" else "Techniques") in t.page.inner_text("h1")
    assert "could not be drawn" not in t.text() and "encountered an error" not in t.text()
    ground = t.page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    light = sum(int(v) for v in re.findall(r"\d+", ground)[:3]) > 380
    assert light == (scheme == "light")
    t.assert_clean()


NUM_CHARTS = {
    "techniques": 2, "compare": 5, "memory?model=llama-3.1-70b&device=h100-sxm&tp=2&pp=2&v=1": 2,
    "memory?model=llama-3.1-70b&device=l40s&tp=2&v=1": 2, "roofline?model=llama-3.1-8b&device=h100-sxm&batch=128&v=1": 1,
}  # fmt: skip


FITS, OVER = (path for path in NUM_CHARTS if path.startswith("memory"))  # one at each width


@pytest.mark.parametrize(
    ("path", "size"), [(p, s) for p in NUM_CHARTS for s in WIDTHS if (p, s) not in ((FITS, "phone"), (OVER, "desktop"))]
)
def test_charts_do_not_overlap_nor_stretch_and_have_words(tab, stored, path: str, size: str):
    width, height = WIDTHS[size]
    t = tab(width=width, height=height, scheme="dark" if size == "phone" else "light")
    t.open(path)
    assert not t.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"), "the page scrolls sideways"
    found = t.page.evaluate(LINT)
    assert len(found) >= NUM_CHARTS[path]
    for chart in found:
        assert chart["problems"] == [], chart
        assert len(chart["label"]) > 40, chart
        assert chart["height"] >= 160 and chart["width"] >= 250, chart
    for box in t.page.query_selector_all("[data-testid=stMetric]"):
        inside = box.evaluate(
            "e => { const r = e.getBoundingClientRect(); return r.left >= 0 && r.right <= innerWidth; }"
        )
        assert inside
    overlapping = t.page.evaluate(OVERLAP)
    assert overlapping == []
    t.assert_clean()


SETTLED = r"""
() => {  // same layout in five looks, 100 ms apart, with nothing left to load or draw
  const charts = [...document.querySelectorAll('[data-testid=stPlotlyChart]')];
  const app = document.querySelector('[data-testid=stApp]'), title = document.querySelector('[data-testid=stMain] h1');
  const idle = app && app.dataset.testScriptState === 'notRunning' && app.dataset.testConnectionState === 'CONNECTED';
  const busy = !idle || !title || document.querySelector('[data-testid=stSkeleton]') || charts.some(c => !c.querySelector('.main-svg'));
  const blocks = [...document.querySelectorAll('[data-testid=stMain] [data-testid=stElementContainer]')];
  const look = busy ? Math.random() : blocks.map(e => { const r = e.getBoundingClientRect(); return [r.top, r.height].join(); }).join(';');
  const seen = window.seenLayout || {look: null, times: 0};
  window.seenLayout = {look, times: look === seen.look ? seen.times + 1 : 0};
  return window.seenLayout.times >= 4;
}
"""

LINT = r"""
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
  const named = g.closest('[aria-label]');
  return {problems, label: named ? named.getAttribute('aria-label') : '', width: outer.width, height: outer.height};
})
"""

OVERLAP = r"""
() => {  // blocks of the page that lie over each other; what a closed expander holds is not seen
  const found = [], blocks = [...document.querySelectorAll(
    '[data-testid=stMain] [data-testid=stMetric], [data-testid=stMain] .js-plotly-plot, [data-testid=stMain] h1, [data-testid=stMain] h3, ' +
    '[data-testid=stMain] [data-testid=stSelectbox], [data-testid=stMain] [data-testid=stButton]')]
    .filter(e => e.checkVisibility()).map(e => ({name: e.dataset.testid || e.tagName, box: e.getBoundingClientRect()})).filter(b => b.box.width && b.box.height);
  for (let i = 0; i < blocks.length; i++) for (let j = i + 1; j < blocks.length; j++) {
    const a = blocks[i].box, b = blocks[j].box;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 3 && y > 3) found.push(blocks[i].name + ' / ' + blocks[j].name);
  }
  return found;
}
"""


def test_tables_open_under_the_charts(tab, stored):
    t = tab(height=3000)
    t.open("compare")
    expander = t.page.locator("[data-testid=stExpander]", has_text="Table").first
    expander.locator("summary").click()
    expander.get_by_text("TPOT p50").wait_for()
    button = expander.get_by_role("button", name="CSV")
    button.click(trial=True, timeout=60_000)  # what a busy page takes to answer is not part of the download's time
    with t.page.expect_download(timeout=60_000) as download:
        button.click()
    text = Path(download.value.path()).read_text()
    assert text.startswith("metric,unit,measured") and "TPOT p50,ms" in text
    t.assert_clean()


def test_a_model_that_does_not_fit_is_made_to_fit_by_a_click(tab):
    t = tab()
    t.open("memory?model=llama-3.1-70b&device=l40s&tp=2&max_num_seqs=8&v=1")
    assert "Does not fit" in t.text()
    t.page.get_by_role("button", name="Apply").first.click()
    t.wait_for_text(r"Fits on 2 × l40s")
    assert t.query()["quantizer"] == "fp8"
    t.page.go_back()
    t.wait_for_text(r"Does not fit")
    t.assert_clean()


def test_the_scenario_survives_links_edits_back_forward_and_reload(tab):
    t = tab()
    t.open(f"techniques?max_num_seqs=3&{SMALL}")
    rows = t.page.get_by_role("spinbutton", name="Rows in a batch")
    assert rows.input_value() == "3"
    t.page.get_by_role("link", name="Real vs predicted").click()
    t.page.wait_for_url(re.compile("/compare"))
    t.settle()
    t.wait_for_query("max_num_seqs", "3")
    t.page.get_by_role("link", name="Techniques").click()
    t.page.wait_for_url(re.compile("/techniques"))
    t.settle()
    assert t.page.get_by_role("spinbutton", name="Rows in a batch").input_value() == "3"
    t.page.get_by_role("spinbutton", name="Rows in a batch").fill("5")
    t.page.get_by_role("spinbutton", name="Rows in a batch").press("Enter")
    t.wait_for_query("max_num_seqs", "5")
    t.settle()
    t.page.go_back()
    t.settle()
    t.wait_for_query("max_num_seqs", "3")
    assert t.page.get_by_role("spinbutton", name="Rows in a batch").input_value() == "3"
    t.page.go_forward()
    t.settle()
    t.wait_for_query("max_num_seqs", "5")
    assert t.page.get_by_role("spinbutton", name="Rows in a batch").input_value() == "5"
    t.page.reload()
    t.settle()
    assert t.page.get_by_role("spinbutton", name="Rows in a batch").input_value() == "5"
    t.assert_clean()


def test_a_run_is_watched_cancelled_started_again_reloaded_and_found(tab, root: Path):
    t = tab()
    t.open(f"techniques?{LONG}")
    t.page.get_by_role("button", name="Predict and store").click()
    first = t.wait_for_text(r"\d+ of 60000 requests")
    bar = t.page.locator("[data-testid=stProgress] [role=progressbar]").first
    before = float(bar.get_attribute("aria-valuenow") or 0)
    seen = re.search(r"(\d+) of 60000", first)
    assert seen is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        now = re.search(r"(\d+) of 60000", t.text())
        if now is not None and int(now[1]) > int(seen[1]):
            break
        t.page.wait_for_timeout(200)
    else:
        raise AssertionError("the progress did not move")
    assert float(bar.get_attribute("aria-valuenow") or 0) >= before
    t.page.get_by_role("button", name="Cancel").click()
    t.wait_for_text(r"cancelled", 40)
    job = JobManager(root).get(t.query()["job"])
    assert job is not None and job.state == "cancelled"

    t.page.get_by_role("button", name="Predict and store").click()
    t.wait_for_text(r"\d+ of 60000 requests")
    second = t.query()["job"]
    assert second != job.id
    t.page.reload()
    t.settle()
    assert t.query()["job"] == second
    t.wait_for_text(r"\d+ of 60000 requests")

    other = tab()  # a tab without the link is told about it
    other.open("techniques")
    other.page.get_by_role("button", name="Watch it").click()
    other.wait_for_text(r"\d+ of 60000 requests")
    other.page.get_by_role("button", name="Cancel").click()
    other.wait_for_text(r"cancelled", 40)
    t.wait_for_text(r"cancelled", 40)
    t.assert_clean()
    other.assert_clean()


def test_a_finished_run_is_compared_and_survives_the_server(browser, tmp_path: Path, tiny_llama_dir: Path):
    query = f"{SMALL}&model={tiny_llama_dir}&max_model_len=128"
    with Server(tmp_path) as server:
        t = Tab(browser, server)
        t.open(f"techniques?{query}")
        t.page.get_by_role("button", name="Run for real").click()
        text = t.wait_for_text(r"2 of 2 runs|failed|cannot", 120)
        assert "2 of 2 runs" in text
        t.settle()
        assert "measured" in t.text()
        link = t.page.url
        t.page.get_by_role("button", name="Compare", exact=True).click()
        t.page.wait_for_url(re.compile("/compare"))
        t.settle()
        t.page.wait_for_selector(".js-plotly-plot .main-svg")
        assert "Mean absolute error" in t.text()
        assert t.query()["real"].endswith(RunStore(tmp_path).load(t.query()["real"]).id)
        t.assert_clean()
        t.context.close()
    with Server(tmp_path) as server:  # another server: the job and its records are found again
        t = Tab(browser, server)
        t.open(link.split("/", 3)[3])
        assert "2 of 2 runs" in t.text() and "measured" in t.text()
        t.context.close()


def test_ctrl_enter_runs(tab):
    t = tab()
    t.open(f"techniques?{SMALL}")
    t.page.keyboard.press("Control+Enter")
    t.wait_for_text(r"(Loading|Measuring|Predicting|Starting|Waiting|runs in)")
    t.page.wait_for_function("new URLSearchParams(location.search).has('job')")


FLEETS = (
    "model=llama-3.1-8b&plan_devices=a100-sxm-80gb,h100-sxm&plan_rate=20&plan_requests=30&input_len=400&output_len=8"
    "&spread=0&plan_ttft=0.5&plan_tpot=0&plan_percentile=90&v=1"
)


def test_a_capacity_search_is_cancelled_made_and_shown(tab, browser: Any, server: Server):
    t = tab(height=2600)
    t.open(f"capacity?{FLEETS.replace('plan_requests=30', 'plan_requests=100000')}")
    t.page.get_by_role("button", name="Search").click()
    t.wait_for_text(r"Searching|Loading|Starting")
    t.page.get_by_role("button", name="Cancel").click()
    t.wait_for_text(r"cancelled", 40)
    t.page.get_by_role("button", name="Dismiss").click()
    t.settle()
    t.page.get_by_text("Trace and size of the search").click()
    t.page.get_by_role("spinbutton", name="Requests tried").fill("30")
    t.page.get_by_role("spinbutton", name="Requests tried").press("Enter")
    t.wait_for_query("plan_requests", "30")
    t.settle()
    t.page.keyboard.press("Control+Enter")
    text = t.wait_for_text(r"The cheapest fleet|failed|No fleet", 90)
    assert "The cheapest fleet for llama-3.1-8b" in text and re.search(r"next limit|no limit", text)
    t.settle()
    t.assert_clean()
    link = t.page.url.split("/", 3)[3]
    for width, height in WIDTHS.values():
        for scheme in ("light", "dark"):
            if (width < 500) == (scheme == "dark"):
                other = tab(width=width, height=height, scheme=scheme)
                other.open(link)
                other.page.wait_for_function(
                    "document.querySelectorAll('.js-plotly-plot .main-svg').length > 4", timeout=30_000
                )
                other.settle()
                assert not other.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1")
                found = other.page.evaluate(LINT)
                assert len(found) == 3
                for chart in found:
                    assert chart["problems"] == [] and len(chart["label"]) > 40, chart
                assert other.page.evaluate(OVERLAP) == []
                other.assert_clean()
