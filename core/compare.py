"""Two runs side by side: what was measured, what was predicted, how far apart they are.

Invariants
* Nothing is invented: a metric that one run lacks has no error (None), never 0.
* `error` is (predicted - real) / real; it is None when real is 0 and predicted is not.
* Settings that differ between the runs are listed, so that no error is read as the model's fault
  when the two runs were not of the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinfer.core.records import RunRecord

# what is reported first, in this order; other metrics follow in the order in which the record has them
HEADLINE = (
    "output_throughput", "total_throughput", "request_throughput", "ttft", "tpot", "itl", "e2e",
    "peak_kv_bytes", "kv_waste", "num_preemptions",
)  # fmt: skip
_ONE_SIDED = frozenset({"config.op_time", "config.device"})  # mean something to one world only


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """One number of both runs.

    name: dotted, as in `ttft.p50`.  error: fraction of the real value.
    interval: the prediction's 80 % band, if it has one.
    """

    name: str
    real: float | None
    predicted: float | None
    error: float | None
    interval: tuple[float, float] | None = None

    @property
    def inside(self) -> bool | None:
        """The real value lies in the prediction's band; None without a band."""
        if self.interval is None or self.real is None:
            return None
        return self.interval[0] <= self.real <= self.interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`settings`: dotted name -> (real, predicted) where they differ. `notes`: what limits the comparison."""

    real_id: str
    predicted_id: str
    pairs: tuple[MetricPair, ...]
    settings: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> MetricPair:
        for pair in self.pairs:
            if pair.name == name:
                return pair
        raise KeyError(name)

    def nested(self, *what: str) -> dict[str, Any]:
        """The metrics schema with attributes `what` of each pair at its leaves (one: bare, more: an object)."""
        tree: dict[str, Any] = {}
        for pair in self.pairs:
            leaf = getattr(pair, what[0]) if len(what) == 1 else {name: getattr(pair, name) for name in what}
            head, _, statistic = pair.name.partition(".")
            if statistic:
                tree.setdefault(head, {})[statistic] = leaf
            else:
                tree[head] = leaf
        return tree


def compare(real: RunRecord, predicted: RunRecord) -> Comparison:
    """Join two records on metric names. Any two runs can be compared; `notes` says when it is not real/predicted."""
    ours, theirs = dict(_flat(real.metrics)), dict(_flat(predicted.metrics))
    summaries = {name.partition(".")[0] for name in (*ours, *theirs) if "." in name}
    names = sorted(
        (n for n in {**ours, **theirs} if n not in summaries), key=_rank
    )  # a summary may be None on one side
    pairs = []
    for name in names:
        a, b = ours.get(name), theirs.get(name)
        band = predicted.intervals.get(name)
        pairs.append(MetricPair(name=name, real=a, predicted=b, error=relative_error(a, b), interval=band))
    return Comparison(
        real_id=real.id,
        predicted_id=predicted.id,
        pairs=tuple(pairs),
        settings=differences(real, predicted),
        notes=tuple(_notes(real, predicted)),
    )


def relative_error(real: float | None, predicted: float | None) -> float | None:
    """(predicted - real) / real; 0 when both are 0, None when it has no meaning."""
    if real is None or predicted is None:
        return None
    if real == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - real) / real


def _flat(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{k}", v) for k, v in value.items())
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, value


def _rank(name: str) -> int:
    head = name.partition(".")[0]
    return HEADLINE.index(head) if head in HEADLINE else len(HEADLINE)


def differences(real: RunRecord, predicted: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Settings that differ: dotted name -> (real, predicted)."""
    ours, theirs = _settings(real), _settings(predicted)
    found = {}
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if a != b and key not in _ONE_SIDED:
            found[key] = (a, b)
    return found


def _settings(record: RunRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                walk(f"{prefix}.{key}", item)
        elif value is not None and value != [] and value != ():
            flat[prefix] = list(value) if isinstance(value, tuple) else value

    walk("config", record.config)
    walk("workload", record.workload)
    return flat


def _notes(real: RunRecord, predicted: RunRecord) -> Iterator[str]:
    if real.world != "engine":
        yield f"{real.id} was not measured (world: {real.world}); the column 'real' shows it all the same"
    if predicted.world != "simulator":
        yield f"{predicted.id} is not a prediction (world: {predicted.world}); the column 'predicted' shows it"
    elif "`twinfer calibrate`" in (rests_on := predicted.reasons.get("device", "")):  # what would bring it nearer
        yield f"predicted times are those of {rests_on}"
    for record in (real, predicted):
        if not record.complete:
            yield f"{record.id} was stopped early; its metrics cover what had finished"
    counts = real.metrics.get("num_completed"), predicted.metrics.get("num_completed")
    if None not in counts and counts[0] != counts[1]:
        yield f"{counts[0]} requests completed in {real.id}, {counts[1]} in {predicted.id}"
    missing = sum(1 for name, value in _flat(real.metrics) if value is None and predicted.metrics.get(name) is not None)
    if missing:
        yield f"{missing} predicted metrics were not measured"


__all__ = ["HEADLINE", "Comparison", "MetricPair", "compare", "differences", "relative_error"]
