"""What the dashboard shows of a record: label, unit, direction and number format of each metric.

Invariants
* A value that was not measured stays None and is printed "not measured", never 0.
* Every label carries its unit; seconds are shown as ms where they are small, bytes in binary units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MISSING = "not measured"
Band = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A metric of a record.

    key: name in the record's metrics, `ttft.p50` for a percentile.  scale: shown value = value * scale.
    better: "higher", "lower" or "" when neither is.
    """

    key: str
    label: str
    unit: str
    better: str
    scale: float = 1.0
    help: str = ""
    short: str = ""  # for narrow cards

    @property
    def card(self) -> str:
        return self.short or self.label

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


QUANTITIES = (
    Quantity("output_throughput", "Output throughput", "tok/s", "higher", help="Output tokens per second of the run.", short="Throughput"),
    Quantity("total_throughput", "Total throughput", "tok/s", "higher", help="Prompt and output tokens per second."),
    Quantity("request_throughput", "Request throughput", "req/s", "higher", help="Completed requests per second."),
    Quantity("ttft.p50", "TTFT p50", "ms", "lower", 1e3, "Arrival to first token, median."),
    Quantity("ttft.p95", "TTFT p95", "ms", "lower", 1e3, "Arrival to first token, 95th percentile."),
    Quantity("tpot.p50", "TPOT p50", "ms", "lower", 1e3, "Time per output token after the first, median."),
    Quantity("tpot.p95", "TPOT p95", "ms", "lower", 1e3, "Time per output token after the first, 95th percentile."),
    Quantity("itl.p95", "ITL p95", "ms", "lower", 1e3, "Gap between deliveries of tokens of one request, 95th percentile; guessed tokens come several at once."),
    Quantity("e2e.p50", "E2E p50", "s", "lower", 1.0, "Arrival to last token, median."),
    Quantity("duration", "Duration", "s", "lower", 1.0, "First arrival to last token."),
    Quantity("peak_kv_bytes", "Peak KV reserved", "MiB", "lower", 1 / 2**20, "Most KV memory reserved at once.", short="Peak KV"),
    Quantity("kv_waste", "KV waste", "%", "lower", 100.0, "Reserved KV slots that hold no token, over time."),
    Quantity("prefix_cache_hit_rate", "Prefix cache hits", "%", "higher", 100.0, "Prompt tokens found in the cache."),
    Quantity("num_preemptions", "Preemptions", "", "lower", 1.0, "Requests that gave their memory back and started over."),
)  # fmt: skip
BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}
CHARTED = (
    "output_throughput", "ttft.p50", "ttft.p95", "tpot.p50", "e2e.p50", "peak_kv_bytes", "kv_waste",
    "prefix_cache_hit_rate",
)  # fmt: skip
"""What combinations of techniques are compared by, one at a time."""


def value_of(metrics: Mapping[str, Any], key: str) -> float | None:
    """`metrics["ttft"]["p50"]` for "ttft.p50"; None when absent or not finite."""
    value: Any = metrics
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def band_of(intervals: Mapping[str, Any], key: str) -> Band | None:
    """The (low, high) 80 % band of a metric, None when there is none."""
    band = intervals.get(key, intervals.get(key.replace(".", "_")))
    return None if band is None else (float(band[0]), float(band[1]))


def number(value: float | None) -> str:
    """Three significant digits, thousands separated; integers of four digits and more are kept whole."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(text) == round(float(text)) else text


def shown(quantity: Quantity, value: float | None, unit: bool = True) -> str:
    """A value in the metric's unit, e.g. "12.3 ms"; "not measured" for None."""
    if value is None:
        return MISSING
    text = number(value * quantity.scale)
    return f"{text} {quantity.unit}" if unit and quantity.unit else text


def suited(quantity: Quantity, *values: float | None) -> Quantity:
    """`quantity` in the unit that suits these values of it: seconds where one of them is 1 s or more, as in the terminal."""
    longest = max((abs(value) for value in values if value is not None), default=0.0)
    return replace(quantity, unit="s", scale=1.0) if quantity.unit == "ms" and longest >= 1 else quantity


def percent(fraction: float | None, signed: bool = True) -> str:
    """A fraction as a percentage with a true minus sign."""
    if fraction is None:
        return MISSING
    value = 100 * fraction
    digits = 0 if abs(value) >= 10 else 1
    text = f"{abs(value):,.{digits}f} %"
    if float(f"{value:.{digits}f}") == 0:
        return f"{0:.{digits}f} %"
    return ("−" if value < 0 else "+" if signed else "") + text


def change(value: float | None, base: float | None) -> float | None:
    """(value - base) / base; None when either is missing or the base is 0."""
    return None if value is None or not base else (value - base) / base


def improvement(quantity: Quantity, value: float | None, base: float | None) -> float | None:
    """Like `change`, but positive is always better."""
    delta = change(value, base)
    return None if delta is None else (-delta if quantity.better == "lower" else delta)


def byte_scale(largest: float) -> tuple[float, str]:
    """(factor, unit) that shows `largest` bytes with few digits, in binary units."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1 / 1024**power, unit
    return 1.0, "B"
