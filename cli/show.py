"""How results look: JSON on stdout, tables for people, progress on stderr, Ctrl-C that keeps what is done.

Invariants
* Numbers keep a unit and three significant digits; what was not measured says so, it is never 0.
* Progress is drawn only when stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from twinfer.core.errors import rounded

if TYPE_CHECKING:
    from rich.table import Table

    from twinfer.core.compare import Comparison, MetricPair
    from twinfer.core.records import RunRecord
    from twinfer.core.run_store import RunSummary

NO = 3
"""Exit code of a question that was answered, with no: it does not fit, no fleet will do."""
STOPPED = 130
"""Exit code after Ctrl-C, as shells report it."""

_document: ContextVar[TextIO | None] = ContextVar("stdout of the document", default=None)

OnProgress = Callable[[int, int, Mapping[str, Any]], None]

_LATENCIES = ("ttft", "tpot", "itl", "e2e")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_BANDED = ("p50", "p95")  # the bands of all five would be too wide for a terminal
_TITLES = {
    "output_throughput": "output throughput", "total_throughput": "total throughput",
    "request_throughput": "requests", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E",
    "peak_kv_bytes": "peak KV", "kv_waste": "KV waste", "num_preemptions": "preemptions",
    "num_swaps": "of them swapped",
    "duration": "duration", "prefix_cache_hit_rate": "prefix cache hits", "replica_seconds": "replicas x time",
    "num_failures": "failures", "num_reroutes": "requests routed again", "kv_transfer_bytes": "KV handed over",
    "tier_bytes": "KV loaded from tiers", "tier_loads": "loads from tiers",
}  # fmt: skip


def print_json(value: Any) -> None:
    """One document on stdout, without NaN or Infinity."""
    from twinfer.core.run_files import plain

    out = _document.get() or sys.stdout
    json.dump(plain(value), out, indent=2, allow_nan=False)
    out.write("\n")
    out.flush()


@contextlib.contextmanager
def document_alone() -> Iterator[None]:
    """Stdout is for `print_json` alone: what else is printed, by plugins for one, goes to stderr."""
    before = _document.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _document.reset(before)


def print_table(table: Table) -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False)  # names are those of users and files: [x] and :x: are no markup
    # a pipe has no width: let the widest row decide instead of cutting words
    console = console if console.is_terminal else Console(markup=False, emoji=False, width=160)
    if table.title:  # not above the table, where rich wraps it to the table's width
        console.print(table.title, style="bold", highlight=False)
        table.title = None
    console.print(table)


def note(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr)


# --- numbers ----------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return rounded(value)


def seconds(value: float | None) -> str:
    if value is None:
        return "not measured"
    if abs(value) < 1e-9:  # nothing here is that short: it is what rounding leaves of a difference
        return "0 ms"
    return f"{number(value)} s" if abs(value) >= 0.9995 else f"{value * 1e3:.3g} ms"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return "not measured"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError


def percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "not measured"
    return f"{value * 100:+.1f} %" if signed else f"{value * 100:.1f} %"


def metric(name: str, value: float | None) -> str:
    """A metric of `core/records.py` with its unit; `name` may be dotted."""
    head = name.partition(".")[0]
    if head in _LATENCIES or head in ("duration", "replica_seconds", "kv_transfer"):
        return seconds(value)
    if head in ("output_throughput", "total_throughput"):
        return "not measured" if value is None else f"{number(value)} tok/s"
    if head == "request_throughput":
        return "not measured" if value is None else f"{number(value)} /s"
    if head in ("peak_kv_bytes", "kv_transfer_bytes", "tier_bytes"):
        return size(value)
    if head in ("kv_waste", "prefix_cache_hit_rate"):
        return percent(value)
    return number(value)


def between(name: str, band: tuple[float, float] | None) -> str:
    """A prediction's band; empty where it has none or no width."""
    return f"{metric(name, band[0])} to {metric(name, band[1])}" if band and band[0] != band[1] else ""


def title(name: str) -> str:
    head, _, statistic = name.partition(".")
    return f"{_TITLES.get(head, head.replace('_', ' '))} {statistic}".strip()


# --- tables -----------------------------------------------------------------------------------------


def new_table(caption: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=caption, box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", no_wrap=position == 0, overflow="fold")
    return table


def record_tables(record: RunRecord) -> list[Table]:
    """Metrics of one run: single numbers with the prediction's band, then latencies with their percentiles."""
    from twinfer.core.fleet import recorded_in_words
    from twinfer.core.guesses import in_words

    what = "predicted" if record.world == "simulator" else "measured"
    config, metrics = record.config, record.metrics
    techniques = " + ".join(str(config.get(k, {}).get("name")) for k in ("scheduler", "kv_cache") if config.get(k))
    place = recorded_in_words(record.environment.get("device") or config.get("device", ""), config)
    banded = bool(record.intervals)  # a measurement has none
    caption = f"{config.get('model')} on {place}, {techniques}: {what}"
    numbers = new_table(caption, "", "", *(["80 % band"] if banded else []))
    for name in ("output_throughput", "total_throughput", "request_throughput", "duration", "peak_kv_bytes",
                 "kv_waste", "num_preemptions", "num_swaps", "prefix_cache_hit_rate"):  # fmt: skip
        if name == "num_swaps" and not metrics.get(name):
            continue
        row = [title(name), metric(name, metrics.get(name)), between(name, record.intervals.get(name))]
        numbers.add_row(*row[: 3 if banded else 2])
    for name in ("replica_seconds", "num_failures", "num_reroutes", "kv_transfer_bytes", "tier_loads", "tier_bytes"):
        if metrics.get(name):  # of a fleet
            numbers.add_row(title(name), metric(name, metrics[name]))
    if guesses := metrics.get("speculation"):
        for what, text in in_words(guesses, config["max_num_seqs"]).items():
            numbers.add_row(what, text)
    done = f"{metrics.get('num_completed')} of {metrics.get('num_requests')}"
    numbers.add_row("completed", done if record.complete else f"{done}, stopped early")
    latencies = new_table("", "", *_STATISTICS)
    for name in _LATENCIES:
        values = metrics.get(name)
        latencies.add_row(title(name), *([seconds(values[s]) for s in _STATISTICS] if values else ["not measured"]))
        if any(
            bands := [between(name, record.intervals.get(f"{name}.{s}")) if s in _BANDED else "" for s in _STATISTICS]
        ):
            latencies.add_row("  80 % band", *bands)
    replicas = replica_table(record)
    return [numbers, latencies] if replicas is None else [numbers, latencies, replicas]


def replica_table(record: RunRecord) -> Table | None:
    """One line for each replica of a fleet, None for a single engine."""
    replicas = record.metrics.get("replicas")
    if not replicas:
        return None
    columns = ("requests", "output", "TTFT p50", "TTFT p95", "TPOT p50", "busy", "peak KV", "preemptions", "hits")
    several = len({r["pool"] for r in replicas}) > 1
    failed = any(r["num_failures"] for r in replicas)
    title = (
        "each replica, over its own time from its first arrival to its last token: outputs do not add up to the fleet's"
    )
    table = new_table(title, "replica", *(["pool"] if several else []), *columns, *(["failures"] if failed else []))
    for r in replicas:
        ttft, tpot = r.get("ttft") or {}, r.get("tpot") or {}
        table.add_row(
            str(r["replica"]), *([r["pool"]] if several else []), number(r["num_requests"]),
            metric("output_throughput", r["output_throughput"]), seconds(ttft.get("p50")), seconds(ttft.get("p95")),
            seconds(tpot.get("p50")), percent(r["busy"]), size(r["peak_kv_bytes"]), number(r["num_preemptions"]),
            "" if r["pool"] == "decode" else percent(r["prefix_cache_hit_rate"]),
            *([number(r["num_failures"])] if failed else []),
        )  # fmt: skip
    return table


def comparison_table(comparison: Comparison, names: Sequence[str] | None = None) -> Table:
    """Real, predicted and error per metric; `names` picks them. Statistics of one metric with equal lines share it."""
    from twinfer.core.compare import HEADLINE

    table = new_table(
        f"{comparison.real_id} / {comparison.predicted_id}", "", "real", "predicted", "error", "80 % band"
    )
    shown = [p for p in comparison.pairs if _head(p) in HEADLINE and (names is None or p.name in names)]
    for (head, *cells), alike in itertools.groupby(shown, key=lambda pair: (_head(pair), *_cells(pair))):
        statistics = " = ".join(pair.name.partition(".")[2] for pair in alike)
        table.add_row(title(f"{head}.{statistics}"), *cells)
    return table


def _head(pair: MetricPair) -> str:
    return pair.name.partition(".")[0]


def _cells(pair: MetricPair) -> tuple[str, ...]:
    error = "" if pair.error is None else percent(pair.error, signed=True)
    return metric(pair.name, pair.real), metric(pair.name, pair.predicted), error, between(pair.name, pair.interval)


def runs_table(summaries: Sequence[RunSummary]) -> Table:
    table = new_table("stored runs, newest first", "id", "world", "created", "model", "device", "techniques", "output")
    for s in summaries:
        if s.problem:
            table.add_row(s.id, "damaged", "", s.problem)
            continue
        output = metric("output_throughput", s.metrics.get("output_throughput"))
        techniques = f"{s.scheduler} + {s.kv_cache}"
        table.add_row(s.id, s.world, s.created[:19], s.name or s.model, s.device, techniques, output)
    return table


# --- long runs --------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(label: str) -> Iterator[OnProgress]:
    """A line on stderr about what is being done, then a bar; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, info: None
        return
    from twinfer.cli.bar import Bar

    with Bar(label) as bar:
        yield bar.on_progress


class Interrupt:
    """Ctrl-C as a question (`should_stop`) where ending early leaves something to keep; elsewhere it ends at once.

    keeps: what has been done by then is kept, from the first time the question is asked on. The second Ctrl-C ends at
    once all the same.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.asked = False
        """Ctrl-C was pressed."""
        self.ended = False
        """It ended what was going on; `words` say so."""
        self.words = ""
        self._polled, self._keeps = False, keeps

    def __call__(self) -> bool:
        if self.ended:  # the exception was lost on its way, in a callback of some library
            raise KeyboardInterrupt
        self._polled = self._keeps
        return self.asked

    def _on_signal(self, signum: int, frame: object) -> None:
        self.ended = self.asked or not self._polled
        if self.ended:
            self.words = "ended at once, nothing of it is kept" if self.asked else "stopped, nothing is kept"
            self.asked = True
            raise KeyboardInterrupt
        self.asked = True
        note("stopping after this step; press Ctrl-C again to end at once")


@contextlib.contextmanager
def interruptible(keeps: bool = True) -> Iterator[Interrupt]:
    """`should_stop` for what takes long (`Interrupt`), of Ctrl-C and of being asked to end (SIGTERM).

    Raises `typer.Exit` with code 130 where that ended it, and says so, whatever error it came out as.
    """
    import typer

    from twinfer.core.errors import EngineError, TwinferError

    interrupt = Interrupt(keeps)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {s: signal.signal(s, interrupt._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    except BaseException as error:
        if interrupt.ended:  # a library that was being imported may wrap it in an error of its own
            note(interrupt.words)
        elif interrupt.asked and isinstance(error, TwinferError) and not isinstance(error, EngineError):
            note(str(error))  # there was nothing yet to make a result of
        else:
            raise
        raise typer.Exit(STOPPED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = [
    "NO", "STOPPED", "Interrupt", "OnProgress", "comparison_table", "document_alone", "interruptible", "metric", "new_table", "note", "number",
    "percent", "print_json", "print_table", "progress", "record_tables", "runs_table", "seconds", "size", "title",
]  # fmt: skip
