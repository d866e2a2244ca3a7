"""Writes a RunRecord while a run goes on, from what any driver sees: plans, results and outputs.

Invariants
* Times come in on the driver's clock and are stored relative to `start`.
* The record is valid at any moment: `finish(complete=False)` after a cancel keeps all that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from twinfer.core.events import Decoded, Finished, Output, Rejected, TokenDelta
from twinfer.core.guesses import Guesses
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.records import RequestRecord, RunRecord, StepRecord, Tally, compute_metrics
from twinfer.core.request import Request

if TYPE_CHECKING:
    from twinfer.core.flock import Stretch

Detail = Literal["steps", "requests"]


class Recorder:
    """One run's observer. `start` is the driver-clock time that becomes 0 in the record.

    detail: `steps` keeps every step and every gap between tokens; `requests` keeps the times of requests, and of steps
    and gaps what the metrics need, so that memory does not grow with tokens.
    """

    def __init__(
        self,
        world: str,
        config: Mapping[str, Any],
        workload: Mapping[str, Any],
        kv_bytes_per_token: float,
        environment: Mapping[str, Any] | None = None,
        reasons: Mapping[str, str] | None = None,
        run_id: str | None = None,
        start: float = 0.0,
        keep_ops: bool = True,
        detail: Detail = "steps",
    ) -> None:
        created = datetime.now(UTC)
        self.start = start
        self.keep_ops = keep_ops
        self.detail: Detail = detail
        self.before_finish: Callable[[], None] | None = None  # a driver that tells late tells all it knows
        self._tally = None if detail == "steps" else Tally()
        self.guesses = Guesses()
        self._ends: list[float] = []  # of all steps, where tokens may be told of late
        self.record = RunRecord(
            id=run_id or f"{created:%Y%m%d-%H%M%S}-{world}-{uuid4().hex[:6]}",
            world=world,
            created=created.isoformat(timespec="seconds"),
            config=dict(config),
            workload=dict(workload),
            environment=dict(environment or {}),
            reasons=dict(reasons or {}),
            kv_bytes_per_token=kv_bytes_per_token,
        )
        self._open: dict[tuple[str, int], RequestRecord] = {}
        self._by_seq: dict[str, RequestRecord] = {}
        self._alive: dict[str, int] = {}  # samples of a request that have not ended
        self._duplicates: list[str] = []  # ids submitted again while a request of that name was alive

    @property
    def tally(self) -> Tally | None:
        """What is kept of steps and gaps in detail `requests`."""
        return self._tally

    def submitted(self, request: Request, now: float) -> None:
        """A request arrived; its own `arrival` counts if it is set, else `now` (driver clock)."""
        if request.id in self._alive:  # Core turns it away, the first one stays
            self._duplicates.append(request.id)
            return
        self._alive[request.id] = request.params.num_samples
        arrival = (request.arrival or now) - self.start
        for index in range(request.params.num_samples):
            entry = RequestRecord(
                request_id=request.id, index=index, arrival=arrival, num_prompt_tokens=len(request.prompt)
            )
            self._open[request.id, index] = entry
            self._by_seq[request.id if index == 0 else f"{request.id}/{index}"] = entry
            self.record.requests.append(entry)

    def step(self, plan: StepPlan, result: StepResult, start: float, end: float) -> None:
        """A step ran from `start` to `end` (driver clock)."""
        begin = start - self.start
        num_decode = context = tokens = num_rows = 0
        if plan.decoding is not None:
            num_rows = tokens = num_decode = plan.decoding.count
            context = plan.decoding.keys
        for row in plan.rows:
            fed = len(row.tokens)
            tokens += fed
            num_decode += fed == 1
            context += row.start + fed
            entry = self._by_seq.get(row.seq)
            if entry is not None and entry.first_scheduled is None:
                entry.first_scheduled = begin
        if tokens > num_rows + len(plan.rows):  # some row feeds more than one token
            self.guesses.note(plan.rows, result.rows)
        stats = plan.stats
        if self._tally is not None:
            self._tally.step(end - start, stats, stats.used_slots + tokens)
            if num_rows:
                self._tally.gaps.add(end - start, num_rows)
            return
        self._ends.append(end - self.start)
        self.record.steps.append(
            StepRecord(
                step=plan.step,
                start=begin,
                seconds=end - start,
                sigma=result.sigma,
                num_rows=num_rows + len(plan.rows),
                num_tokens=tokens,
                num_decode_rows=num_decode,
                num_context_tokens=context,
                running=stats.running,
                waiting=stats.waiting,
                held_blocks=stats.held_blocks,
                idle_blocks=stats.idle_blocks,
                total_blocks=stats.total_blocks,
                used_slots=stats.used_slots + tokens,
                block_size=stats.block_size,
                preempted=len(plan.preempted),
                swapped_out_blocks=sum(len(swap.blocks) for swap in plan.swap_outs),
                swapped_in_blocks=sum(len(swap.blocks) for swap in plan.swap_ins),
                ops=result.ops if self.keep_ops else {},
            )
        )

    def run(self, stretch: Stretch, times: Seq[float], results: Seq[StepResult] = ()) -> None:
        """Steps of which each fed a token to the same sequences: they began and ended at `times` (driver clock).

        results: of each, in detail `steps`.
        """
        count = stretch.count
        if self._tally is not None and len(stretch.stats) == 1:
            self._tally.run(times, stretch.stats[0][1], count, stretch.taken)
            return
        pieces = [(at, min(till, stretch.steps), stats) for (at, stats), (till, _) in
                  zip(stretch.stats, [*stretch.stats[1:], (stretch.steps, None)], strict=True)]  # fmt: skip
        if self._tally is not None:
            for at, till, stats in pieces:
                taken = stretch.taken if till == stretch.steps else ()
                self._tally.run(times[at : till + 1], stats, count, taken)
            return
        self._ends += [end - self.start for end in times[1:]]
        for at, till, stats in pieces:
            for i in range(at, till):
                self.record.steps.append(
                    StepRecord(
                        step=stretch.step + i,
                        start=times[i] - self.start,
                        seconds=times[i + 1] - times[i],
                        sigma=results[i].sigma,
                        num_rows=count,
                        num_tokens=count,
                        num_decode_rows=count,
                        num_context_tokens=stretch.keys + count * i,
                        running=stats.running,
                        waiting=stats.waiting,
                        held_blocks=stats.held_blocks,
                        idle_blocks=stats.idle_blocks,
                        total_blocks=stats.total_blocks,
                        used_slots=stats.used_slots + count * (i - at + 1),
                        block_size=stats.block_size,
                        ops=results[i].ops if self.keep_ops else {},
                    )
                )

    def output(self, output: Output, now: float) -> None:
        """A delta, an end or a rejection (driver clock)."""
        at = now - self.start
        if isinstance(output, TokenDelta):
            entry = self._open[output.request_id, output.index]
            if entry.first_token is None:
                entry.first_token = at
            elif type(output) is Decoded:  # one token with each of the latest steps
                if self._tally is None:
                    ends = self._ends[-len(output.tokens) :]
                    entry.itl += [end - last for last, end in zip([entry.last_token, *ends], ends, strict=False)]  # type: ignore[operator]
            elif entry.last_token is not None:
                if self._tally is None:
                    entry.itl.append(at - entry.last_token)
                else:
                    self._tally.gaps.add(at - entry.last_token, 1)
            entry.last_token = at
            entry.num_output_tokens += len(output.tokens)
        elif isinstance(output, Finished):
            entry = self._open.pop((output.request_id, output.index))
            self._alive[output.request_id] -= 1
            if not self._alive[output.request_id]:
                del self._alive[output.request_id]
            self._by_seq.pop(output.request_id if output.index == 0 else f"{output.request_id}/{output.index}", None)
            entry.finished, entry.reason, entry.detail = at, output.reason, output.detail
            entry.num_cached_tokens = output.num_cached_tokens
            entry.num_hit_tokens = output.num_hit_tokens
            entry.num_preemptions = output.num_preemptions
            entry.num_swaps = output.num_swaps
        elif isinstance(output, Rejected):
            if output.request_id in self._duplicates:
                self._duplicates.remove(output.request_id)
                return
            for index in range(self._alive.pop(output.request_id, 0)):
                entry = self._open.pop((output.request_id, index))
                entry.finished, entry.reason, entry.detail = at, "rejected", output.why

    def finish(self, complete: bool = True) -> RunRecord:
        """The record with its metrics; may be called on a run that was stopped."""
        if self.before_finish is not None:
            self.before_finish()
        self.record.complete = complete
        self.record.metrics = compute_metrics(self.record, self._tally)
        guesses = self.guesses.metrics()
        if guesses is not None:
            self.record.metrics["speculation"] = guesses
        return self.record
