"""All pages in headless Chromium: offline, no console errors, runs that are watched, cancelled and found again.

Marked `browser`; skipped with the reason where Chromium or Playwright is absent. What a page does is waited for through
`browser_tab.Tab`, which has no other way to look at it; runs that are to be cancelled last until they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_tab import PATIENCE, RUN, Tab

from twinfer.core.records import RunRecord
from twinfer.core.run_store import RunStore
from twinfer.dashboard.jobs import JobManager
from twinfer.dashboard.launch import Server, free_port

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")

CHROMIUM = next((p for p in ("/usr/bin/chromium", shutil.which("chromium"), shutil.which("chromium-browser"),
                             shutil.which("google-chrome")) if p and Path(p).exists()), None)  # fmt: skip
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SMALL = "num_requests=4&output_len=8&input_len=16&spread=0&v=1"
ENDLESS = "scheduler=slow&num_requests=60000&output_len=32&input_len=16&spread=0&v=1"
WIDTHS = {"desktop": (1440, 2400), "phone": (390, 3800)}
ROWS = "Rows in a batch"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (chromium on the PATH)")
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=1000 * PATIENCE)
        yield made
        made.close()


@pytest.fixture(scope="module")
def serve(slow_plugins: Path) -> Callable[[Path], Server]:
    """A server for a root, on a port of its own: the default one may be another test run's."""
    return lambda root: Server(root, free_port(0), plugin_dirs=[slow_plugins], patience=RUN)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(root: Path, serve: Callable[[Path], Server]) -> Iterator[Server]:
    with serve(root) as made:
        yield made


@pytest.fixture(scope="module")
def stored(root: Path, record: Callable[..., RunRecord]) -> None:
    store = RunStore(root)
    store.save(record("engine"))
    store.save(record("simulator", decode=0.046, prefill=0.45, bands=True))


@pytest.fixture
def tab(browser: Any, server: Server) -> Iterator[Callable[..., Tab]]:
    made: list[Tab] = []

    def new(**kwargs: Any) -> Tab:
        made.append(Tab(browser, server, **kwargs))
        return made[-1]

    yield new
    for each in made:
        each.close()


LIGHT = "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) > 380"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", "techniques", "compare"])
def test_a_cold_deep_link_is_offline_and_quiet(tab, stored, path: str, scheme: str):
    t = tab(scheme=scheme)
    t.open(path, charts=1)
    t.expect_text("Real vs predicted" if path == "compare" else "Techniques")
    t.expect_script(LIGHT, lambda light: light == (scheme == "light"), f"{scheme} ground")
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
    t.open(path, NUM_CHARTS[path])
    t.expect_layout(NUM_CHARTS[path])
    t.assert_clean()


ROWS_OF_CARDS = "[...new Set([...document.querySelectorAll('[data-testid=stMetric]')].map(e => Math.round(e.getBoundingClientRect().top)))].length"


@pytest.mark.parametrize(("width", "rows"), [(1280, 1), (390, 2)])
def test_four_cards_stand_in_a_row_on_a_desktop_and_two_on_a_phone(tab, stored, width: int, rows: int):
    t = tab(width=width)
    t.open(f"techniques?{SMALL}", NUM_CHARTS["techniques"])
    t.expect_script(ROWS_OF_CARDS, lambda found: found == rows, f"{rows} rows of cards")


def test_tables_open_under_the_charts(tab, stored):
    t = tab(height=3000)
    t.open("compare", NUM_CHARTS["compare"])
    text = t.download("CSV", within=t.expander("Table", holds="TPOT p50"))
    assert text.startswith("metric,unit,measured") and "TPOT p50,ms" in text
    t.assert_clean()


def test_a_model_that_does_not_fit_is_made_to_fit_by_a_click(tab):
    t = tab()
    t.open("memory?model=llama-3.1-70b&device=l40s&tp=2&max_num_seqs=8&v=1")
    t.expect_text("Does not fit")
    t.click("Apply")
    t.expect_text("Fits on 2 × l40s")
    t.expect_query("quantizer", "fp8")
    t.back()
    t.expect_text("Does not fit")
    t.expect_query("quantizer", None)
    t.assert_clean()


def test_what_is_shown_survives_a_reload_at_once(tab):
    """An edit is in the address before the page shows it."""
    t = tab()
    t.open("memory?model=llama-3.1-70b&device=l40s&tp=2&max_num_seqs=8&v=1")
    t.click("Apply")
    t.expect_text("Fits on 2 × l40s")
    t.reload()
    t.expect_text("Fits on 2 × l40s")
    t.expect_query("quantizer", "fp8")


def test_the_scenario_survives_links_edits_back_forward_and_reload(tab):
    t = tab()
    t.open(f"techniques?max_num_seqs=3&{SMALL}")
    t.expect_value(ROWS, "3")
    t.click("Real vs predicted", role="link")
    t.expect_page("compare")
    t.expect_text("How far is the prediction")
    t.expect_query("max_num_seqs", "3")
    t.click("Techniques", role="link")
    t.expect_page("techniques")
    t.expect_value(ROWS, "3")
    t.fill(ROWS, "5")
    t.expect_query("max_num_seqs", "5")
    t.back()
    t.expect_value(ROWS, "3")
    t.expect_query("max_num_seqs", "3")
    t.forward()
    t.expect_value(ROWS, "5")
    t.expect_query("max_num_seqs", "5")
    t.reload()
    t.expect_value(ROWS, "5")
    t.assert_clean()


def test_a_run_is_watched_cancelled_started_again_reloaded_and_found(tab, root: Path):
    progress, bar = r"(\d+) of 60000 requests", "+document.querySelector('[data-testid=stProgress] [role=progressbar]')?.ariaValueNow"  # fmt: skip
    t = tab()
    t.open(f"techniques?{ENDLESS}")
    t.click("Predict and store")
    first = t.expect_query("job", bool)
    seen = int(t.expect_text(progress)[1])
    t.expect_text(rf"(?!{seen} of)(?<!\d){progress}")
    t.expect_script(bar, lambda value: value is not None and value >= 0, "progress bar")
    t.click("Cancel")
    t.expect_text("cancelled")
    t.expect(lambda: JobManager(root).get(first).state, lambda state: state == "cancelled", "cancelled job")

    t.click("Predict and store")
    second = t.expect_query("job", lambda job: job not in (None, first))
    t.expect_text(progress)
    t.reload()
    t.expect_query("job", second)
    t.expect_text(progress)

    other = tab()  # a tab without the link is told about it
    other.open("techniques")
    other.click("Watch it")
    other.expect_query("job", second)
    other.expect_text(progress)
    other.click("Cancel")
    other.expect_text("cancelled")
    t.expect_text("cancelled")
    t.assert_clean()
    other.assert_clean()


def test_a_finished_run_is_compared_and_survives_the_server(browser, serve, tmp_path: Path, tiny_llama_dir: Path):
    with serve(tmp_path) as server:
        t = Tab(browser, server)
        t.open(f"techniques?{SMALL}&model={tiny_llama_dir}&max_model_len=128")
        t.press("Control+Enter")  # runs for real
        job = t.expect_query("job", bool)
        assert t.expect_text("2 of 2 runs|failed|cannot", RUN)[0] == "2 of 2 runs"
        t.expect_text("measured")
        link = t.address(job)
        t.click("Compare")
        t.expect_page("compare")
        t.expect_text("Mean absolute error")
        real = t.expect_query("real", bool)
        assert RunStore(tmp_path).load(real).world == "engine"
        t.settle(charts=NUM_CHARTS["compare"])
        t.assert_clean()
        t.close()
    with serve(tmp_path) as server:  # another server: the job and its records are found again
        t = Tab(browser, server)
        t.open(link)
        t.expect_text("2 of 2 runs")
        t.expect_text("measured")
        t.close()


FLEETS = (
    "model=llama-3.1-8b&plan_devices=a100-sxm-80gb,h100-sxm&plan_rate=20&input_len=400&output_len=8"
    "&spread=0&plan_ttft=0.5&plan_tpot=0&plan_percentile=90&v=1"
)


def test_a_capacity_search_is_cancelled_made_and_shown(tab):
    t = tab(height=2600)
    t.open(f"capacity?{FLEETS}&plan_requests=100000&scheduler=slow")
    t.click("Search")
    first = t.expect_query("job", bool)
    t.click("Cancel")
    t.expect_text("cancelled")
    t.click("Dismiss")
    t.expect_query("job", None)
    t.open(f"capacity?{FLEETS}&plan_requests=40")
    t.click_text("Trace and size of the search")
    t.fill("Requests tried", "30")
    t.expect_query("plan_requests", "30")
    t.expect_text("No search was made for this yet")
    t.press("Control+Enter")
    job = t.expect_query("job", lambda job: job not in (None, first))
    assert t.expect_text("The cheapest fleet for llama-3.1-8b|failed|No fleet", RUN)[0].startswith("The cheapest")
    t.expect_text("next limit|no limit")
    t.settle(charts=3)
    t.assert_clean()
    link = t.address(job)
    for (width, height), scheme in zip(WIDTHS.values(), ("light", "dark"), strict=True):
        other = tab(width=width, height=height, scheme=scheme)
        other.open(link, charts=3)
        other.expect_layout(3)
        other.assert_clean()
