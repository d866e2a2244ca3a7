"""From what the replicas of a fleet recorded to one RunRecord.

Invariants
* A request stands in it once, in the order of arrival: its pieces on several replicas are joined. Its times are those
  that its client saw; tokens, preemptions and swaps add up.
* Metrics are `core/records.py`'s, over all replicas; what only a fleet has is added, and each replica's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinfer.core.guesses import Guesses
from twinfer.core.records import RequestRecord, RunRecord, StepRecord, Tally, compute_metrics, summary
from twinfer.core.request import Request

if TYPE_CHECKING:
    from twinfer.simulator.fleet_run import FleetRun
    from twinfer.simulator.replica import Replica


def fleet_record(run: FleetRun, complete: bool) -> RunRecord:
    """The record of the fleet; of one replica and nothing else it is the replica's own, which has no fleet's metrics."""
    parts = [[rank.recorder.finish(complete) for rank in replica.ranks] for replica in run.replicas]
    if run.fleet.alone and len(parts[0]) == 1:
        return parts[0][0]
    by_piece: dict[str, list[RequestRecord]] = {}
    for replica, of_ranks in zip(run.replicas, parts, strict=True):
        for rank, part in zip(replica.ranks, of_ranks, strict=True):
            for entry in part.requests:
                entry.replica = replica.index
                by_piece.setdefault(entry.request_id, []).append(entry)
            for step in part.steps:
                step.replica, step.rank = replica.index, rank.index
    tally = _tally_of(run.replicas) if run.detail != "steps" else None
    requests: list[RequestRecord] = []
    for request in run.arrived:
        pieces = run.several.get(request.id)
        if pieces is None:
            entries = by_piece.get(request.id)
            requests += entries or [RequestRecord(request_id=request.id, arrival=request.arrival,
                                                  num_prompt_tokens=len(request.prompt))]  # fmt: skip
        else:
            found = [(run.replicas[index], by_piece.get(piece, [])) for index, piece in pieces]
            requests += _joined(request, found, tally)
    first = parts[0][0]
    record = replace(
        first,
        steps=_by_start(step for of_ranks in parts for part in of_ranks for step in part.steps),
        requests=requests,
        complete=complete,
    )
    record.metrics = compute_metrics(record, tally)
    guesses = Guesses()
    for replica in run.replicas:
        for rank in replica.ranks:
            guesses.merge(rank.recorder.guesses)
    if (counts := guesses.metrics()) is not None:
        record.metrics["speculation"] = counts
    peaks = [part.metrics["peak_kv_bytes"] for of_ranks in parts for part in of_ranks]
    record.metrics["peak_kv_bytes"] = max((p for p in peaks if p is not None), default=None)  # of one device
    if run.fleet.alone:
        return record
    record.config = {**first.config, "fleet": run.fleet.plain()}
    record.reasons = {**first.reasons, **run.reasons()}
    record.metrics |= _fleet_metrics(run)
    record.metrics["replicas"] = [
        _replica_metrics(run, replica, _metrics_of(replica, of_ranks))
        for replica, of_ranks in zip(run.replicas, parts, strict=True)
    ]
    return record


def _by_start(steps: Iterable[StepRecord]) -> list[StepRecord]:
    return sorted(steps, key=lambda s: (s.start, s.replica, s.rank, s.step))


def _tally_of(replicas: Iterable[Replica]) -> Tally:
    """What the replicas have counted instead of kept."""
    tally = Tally()
    for replica in replicas:
        for rank in replica.ranks:
            if rank.recorder.tally is not None:
                tally.merge(rank.recorder.tally)
    return tally


def _metrics_of(replica: Replica, parts: Sequence[RunRecord]) -> Mapping[str, Any]:
    """Metrics of one replica, over the records of its ranks."""
    if len(parts) == 1:
        return parts[0].metrics
    requests = [entry for part in parts for entry in part.requests]
    whole = replace(parts[0], steps=_by_start(s for part in parts for s in part.steps), requests=requests)
    return compute_metrics(whole, None if replica.ranks[0].recorder.tally is None else _tally_of([replica]))


def _joined(
    request: Request, pieces: Sequence[tuple[Replica, Sequence[RequestRecord]]], tally: Tally | None
) -> list[RequestRecord]:
    """One record per sample, from its pieces in order; a replica that failed at once may have none.

    tally: where gaps between tokens are counted that are not kept.
    """
    seen = [(replica, entry) for replica, entries in pieces for entry in entries]
    if request.params.num_samples > 1:  # several samples begin anew after a failure
        last = pieces[-1][1]
        arrival = min((entry.arrival for _, entry in seen), default=request.arrival)
        return [replace(entry, request_id=request.id, arrival=arrival) for entry in last]
    whole = RequestRecord(
        request_id=request.id, arrival=seen[0][1].arrival if seen else request.arrival,
        num_prompt_tokens=len(request.prompt), replica=pieces[-1][0].index,
    )  # fmt: skip
    for _, entry in seen:
        if whole.first_scheduled is None and entry.first_scheduled is not None:
            whole.first_scheduled = entry.first_scheduled
            # of the prompt; what it is handed or computes again is no hit
            whole.num_cached_tokens, whole.num_hit_tokens = entry.num_cached_tokens, entry.num_hit_tokens
        if entry.first_token is not None:
            if whole.last_token is None:
                whole.first_token = entry.first_token
            elif tally is None:
                whole.itl.append(entry.first_token - whole.last_token)
            else:
                tally.gaps.add(entry.first_token - whole.last_token, 1)
            whole.itl += entry.itl
            whole.last_token = entry.last_token
        whole.num_output_tokens += entry.num_output_tokens
        whole.num_preemptions += entry.num_preemptions
        whole.num_swaps += entry.num_swaps
        whole.finished, whole.reason, whole.detail = entry.finished, entry.reason, entry.detail
    if not pieces[-1][1]:  # stopped before the last replica took it in
        whole.finished = whole.reason = None
    return [whole]


def _fleet_metrics(run: FleetRun) -> dict[str, Any]:
    """What a fleet has and an engine has not; KV moves only where there are any."""
    found: dict[str, Any] = {
        "num_replicas": len(run.replicas),
        "replica_seconds": sum(replica.rented_s() for replica in run.replicas),
        "num_failures": sum(replica.num_failures for replica in run.replicas),
        "num_reroutes": run.reroutes,
    }
    transfers = run.transfers
    if transfers is not None and run.fleet.disaggregated:
        found["kv_transfer_bytes"] = transfers.sent_bytes
        found["kv_transfer"] = summary(transfers.sent_s)
    if transfers is not None and transfers.tiers is not None:
        found["tier_loads"] = transfers.tier_loads
        found["tier_tokens"] = transfers.tier_tokens
        found["tier_bytes"] = transfers.tier_bytes
    return found


def _replica_metrics(run: FleetRun, replica: Replica, metrics: Mapping[str, Any]) -> dict[str, Any]:
    rented = replica.rented_s()
    if replica.pool == "decode":  # what it was handed is no hit
        metrics = {**metrics, "prefix_cache_hit_rate": None}
    return {
        "replica": replica.index,
        "pool": replica.pool,
        "rented_s": rented,
        "busy": replica.busy_s * run.scale / rented if rented else None,
        "num_failures": replica.num_failures,
        **metrics,
    }


__all__ = ["fleet_record"]
