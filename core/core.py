"""The engine's whole decision making as a state machine: events in, plans out.

    receive(event, now) ... next_step(now) -> StepPlan | Idle | Blocked ... outputs()

It never reads a clock, never blocks and never touches a tensor, so a real driver and a simulated one
run the same object.

Invariants
* No phases: prefill, chunk, decode, verify and recompute differ only in how many tokens a row feeds.
* Policy proposes, core disposes: budgets, blocks, row caps and lengths hold whatever a policy says.
* Events are consumed before the queue is walked; a request that cannot run never hides one that can
  be finished, and gates (loads, forks) take no row.
* Admission never preempts, and asks for room for the whole known sequence, so a prompt that cannot
  fit is not started. Where attention has windows that is what feeding it takes at its most (`Ledger.peak`):
  the window and the largest chunk; for a sequence alone, the window and one token (`Ledger.least`), because
  rows are cut to what the pool can give. Blocks of outstanding steps are never reclaimed.
* Progress law: runnable work, nothing outstanding and an empty plan finishes the head request with a
  reason that names the number to raise; the core never spins.
* Order never depends on hashes: every container that decides order is a list or an insertion-ordered dict.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from twinfer.core.beam import BeamGroup, beam_answered, end_beams, give_way
from twinfer.core.errors import ProtocolError
from twinfer.core.events import (
    Abort,
    Blocked,
    Event,
    Finished,
    Idle,
    Output,
    Rejected,
    StepDone,
    Submit,
    Tick,
    TokenDelta,
    TransferDone,
    TransferFailed,
)
from twinfer.core.guard import FAULTS, fault
from twinfer.core.intake import Queue, WaitingEntry, why_refused
from twinfer.core.ledger import Ledger
from twinfer.core.plan import Decoding, Fork, Need, PlanStats, Row, RowResult, StepPlan, StepResult
from twinfer.core.planner import Planner
from twinfer.core.policy import KVCache, Limits, Scheduler, View
from twinfer.core.request import Request, Sequence, Status
from twinfer.core.seeds import sequence_seed
from twinfer.core.swap import HostPool

_RUNNING = Status.RUNNING


class Core:
    """One replica. See the module docstring for its rules.

    windows: attention window of each cache group, None for full attention (`cache_groups.py`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCache,
        limits: Limits,
        seed: int = 0,
        namespace: str = "",
        windows: Seq[int | None] = (None,),
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.seed = seed
        self.ledger = Ledger(kv_cache, limits, namespace, windows)
        self.host = HostPool(limits.num_host_blocks)
        self.requests: dict[str, list[Sequence]] = {}  # samples still alive, by request
        self.sequences: dict[str, Sequence] = {}  # alive, or still read by a transfer
        self.running: list[Sequence] = []
        self.waiting: list[WaitingEntry] = []
        self.filling: list[Sequence] = []  # admitted, may still lack blocks for tokens they have
        self.outstanding: dict[int, StepPlan] = {}
        self.transfers: dict[str, str] = {}  # sequence -> "load" | "send", in progress
        self.sends: list[Sequence] = []  # finished, to be handed to a peer by the next plan
        self.forget: list[str] = []
        self.preempted: list[str] = []
        self.forks: list[Fork] = []
        self.late: dict[str, int] = {}  # ended, but a row of it is in this outstanding step
        self.num_steps = 0
        self.num_submitted = 0
        self.num_admitted = 0
        self._outputs: list[Output] = []
        self._stale = False  # `running` lists sequences that have ended

    # --- driver's side --------------------------------------------------------------------------

    def receive(self, event: Event, now: float) -> None:
        """Take note of `event`. Raises ProtocolError for one that cannot follow the earlier ones."""
        match event:
            case StepDone(step, result):
                self._step_done(step, result)
            case Submit(request):
                self._submit(request)
            case Abort(request_id):
                for seq in list(self.requests.get(request_id, ())):
                    if seq.status is not Status.DONE:  # beams end together
                        self.finish(seq, "abort")
            case TransferDone(seq_id):
                self._transfer_ended(seq_id, None)
            case TransferFailed(seq_id, why):
                self._transfer_ended(seq_id, why)
            case Tick():
                pass

    def accepted(self, request: Request) -> bool:
        """True while samples of this very request are alive; tells an accepted Submit from a rejected one."""
        samples = self.requests.get(request.id)
        return samples is not None and samples[0].request is request

    def next_step(self, now: float) -> StepPlan | Idle | Blocked:
        """The next plan, or why there is none. Never raises under pressure; a policy that raises does."""
        if len(self.outstanding) >= self.limits.max_outstanding:
            return self._blocked()
        while True:
            self.tidy()
            if not self.sequences:
                return self._blocked() if self.outstanding or self.transfers else Idle()
            planner = Planner(self, now)
            planner.run()
            if planner.rows or planner.moves:
                return self.launch(planner)
            if planner.preempted_any:  # room was made but not used: ask again
                continue
            if self.outstanding or self.transfers:
                return self._blocked()
            if planner.defer is not None:
                return Idle(planner.defer)
            if give_way(self):
                continue
            seq, why = planner.stuck()
            self.finish(seq, "capacity", why)

    def outputs(self) -> list[Output]:
        """What there is to tell since the last call, oldest first."""
        out, self._outputs = self._outputs, []
        return out

    @property
    def has_work(self) -> bool:
        """True while a sequence is alive, a step is outstanding or a transfer is in progress."""
        return bool(self.sequences or self.outstanding or self.transfers)

    def snapshot(self) -> dict[str, Any]:
        """All mutable state, independent of this Core; `restore` brings it back."""
        keep = ("scheduler", "limits", "seed")
        return copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in keep})

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`, taken from a Core with the same policies and limits."""
        self.__dict__.update(copy.deepcopy(snapshot))

    # --- events ---------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        why = why_refused(self, request)
        if why:
            self._outputs.append(Rejected(request.id, why))
            return
        length = len(request.prompt)
        limit = min(length + request.params.max_tokens, self.limits.max_model_len)
        samples: list[Sequence] = []
        beams = request.params.beam_width > 1
        for index in range(request.params.num_samples):
            number = self.num_submitted
            self.num_submitted += 1
            seed = sequence_seed(request.params.seed, self.seed, number, index)
            seq = Sequence(request, index, number, seed, limit)
            if index and beams:
                seq.status = Status.PARKED
                seq.kv_load = None
            elif index and self.ledger.cache.copies_on_write:
                seq.leader = samples[0]
                seq.kv_load = None  # the leader loads, the others fork from it
            samples.append(seq)
            self.sequences[seq.id] = seq
            if seq.id in self.forget:  # an ended request had this id: the executor knows the new one already
                self.forget.remove(seq.id)
                self.preempted.append(seq.id)
            if seq.status is Status.WAITING:
                self.enqueue(seq)
        if beams:
            group = BeamGroup(samples)
            for seq in samples:
                seq.beams = group
        self.requests[request.id] = samples

    def _step_done(self, step: int, result: StepResult) -> None:
        if step not in self.outstanding:
            raise ProtocolError(f"StepDone({step}) but outstanding steps are {list(self.outstanding)}")
        if step != next(iter(self.outstanding)):
            raise ProtocolError(f"StepDone({step}) before step {next(iter(self.outstanding))}: steps end in order")
        plan = self.outstanding.pop(step)
        if len(result.rows) != len(plan.rows):
            raise ProtocolError(f"step {step}: {len(result.rows)} results for {len(plan.rows)} rows")
        find = self.sequences.get
        for row, res in zip(plan.rows, result.rows, strict=True):
            seq = find(row.seq)
            if seq is None:  # aborted, or ended by an earlier step, while this row ran
                if self.late.get(row.seq) == step:
                    del self.late[row.seq]
                continue
            if seq.last_step == step:
                seq.last_step = None
            if seq.status is _RUNNING:
                self.row_done(seq, row, res, step)
        self.ledger.pool.step_ended(step)

    def row_done(self, seq: Sequence, row: Row, res: RowResult, step: int) -> None:
        """A row of a running sequence gave `res`."""
        _, start, fed, draft, _, _ = row
        computed = start + len(fed)
        seq.inflight -= len(fed)
        sampled = seq.awaiting and seq.awaiting[0] == step
        if sampled:
            del seq.awaiting[0]
        if res.failure is not None:
            self.finish(seq, "error", res.failure)
            return
        if not sampled:
            self._advance(seq, computed)
            if row.need is Need.BEAM:
                beam_answered(self, seq, res)
            return
        tokens, output = res.tokens, seq.output
        if len(tokens) == 1 and res.stopped is None and not draft:
            token = tokens[0]
            if token not in seq.stop_ids and computed + 1 < seq.limit:
                # One more token that ends nothing, as nearly always in decoding.
                output.append(token)
                self._outputs.append(TokenDelta(seq.request.id, seq.index, tokens, res.logprobs))
                self.ledger.commit(seq, seq.computed, computed)
                seq.computed = computed
                seq.drafts = res.drafts
                return
        if not tokens and res.stopped is None:
            raise ProtocolError(f"step {step}: row {row.seq} needed a token and got none")
        if len(tokens) > draft + 1:
            raise ProtocolError(f"step {step}: row {row.seq} got {len(tokens)} tokens for {draft} drafts")
        computed += max(0, len(tokens) - 1) - draft
        kept, reason, detail = self._accept(seq, res)
        if kept:
            logprobs = res.logprobs
            if kept < len(tokens):
                tokens, logprobs = tokens[:kept], logprobs[:kept]
            self._outputs.append(TokenDelta(seq.request.id, seq.index, tokens, logprobs))
        self._advance(seq, min(computed, seq.prompt_len + len(output)))
        if reason:
            self.finish(seq, reason, detail)
        else:
            seq.drafts = res.drafts

    def _accept(self, seq: Sequence, res: RowResult) -> tuple[int, str, str]:
        """Append sampled tokens up to the first that ends the sequence: (kept, reason, detail)."""
        output, params = seq.output, seq.request.params
        last = len(res.tokens) if res.stopped is not None else 0  # the token that completed the stop string
        for kept, token in enumerate(res.tokens, 1):
            output.append(token)
            if token in seq.stop_ids and len(output) > params.min_tokens:
                return kept, "stop", f"token {token}"
            if seq.prompt_len + len(output) >= seq.limit and kept != last:
                return kept, "length", self.why_long(seq)
        if res.stopped is not None:
            return len(res.tokens), "stop", res.stopped
        return len(res.tokens), "", ""

    def why_long(self, seq: Sequence) -> str:
        """Which limit ended `seq`, that is as long as it may be."""
        if len(seq.output) >= seq.request.params.max_tokens:
            return f"max_tokens={seq.request.params.max_tokens}"
        return f"max_model_len={self.limits.max_model_len}"

    def _advance(self, seq: Sequence, computed: int) -> None:
        self.ledger.commit(seq, seq.computed, computed)
        seq.computed = computed

    def _transfer_ended(self, seq_id: str, failure: str | None) -> None:
        kind = self.transfers.pop(seq_id, None)
        if kind is None:
            raise ProtocolError(f"a transfer of {seq_id!r} ended, but none is in progress: {list(self.transfers)}")
        seq = self.sequences[seq_id]
        if seq.status in (Status.SENDING, Status.DONE):  # sent, or aborted while loading
            self._drop(seq)
        elif failure is not None:  # compute it here instead
            self.ledger.release(seq, None)
            self.preempted.append(seq_id)
            seq.kv_load = None
            seq.status = Status.WAITING
            self.enqueue(seq)
        else:
            assert seq.kv_load is not None
            self._advance(seq, min(seq.kv_load.num_tokens, seq.known - 1))
            seq.num_cached = seq.computed
            if seq.num_hit is None:
                seq.num_hit = seq.computed
            seq.kv_load = None
            seq.status = Status.RUNNING
            self.admitted(seq)
            self.running.append(seq)

    # --- state changes, shared with the planner ---------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        try:
            seq.order = self.scheduler.order(seq)
            insort(self.waiting, (seq.order, seq.number, seq))
        except FAULTS as error:  # raised by the policy, or keys that cannot be compared
            raise fault("scheduler", self.scheduler, "order", error) from error

    def unqueue(self, seq: Sequence) -> None:
        index = bisect_left(self.waiting, (seq.order, seq.number))
        if index == len(self.waiting) or self.waiting[index][2] is not seq:  # keys that do not compare (not-a-number)
            index = next(i for i, entry in enumerate(self.waiting) if entry[2] is seq)
        del self.waiting[index]

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks (its tokens are kept): its KV is swapped out or computed again."""
        self.host.swap_out(seq, self.ledger)
        seq.status = Status.WAITING
        seq.computed = 0
        seq.drafts = ()
        seq.num_preemptions += 1
        self.ledger.release(seq, None)
        self.preempted.append(seq.id)

    def finish(self, seq: Sequence, reason: str, detail: str = "") -> None:
        """End a living sequence and release what it holds, once; a beam ends with all beams of its request."""
        if seq.beams is not None:
            end_beams(self, seq.beams, reason, detail)
            return
        self.tell(
            Finished(
                seq.request.id,
                seq.index,
                reason,
                detail,
                seq.prompt_len,
                len(seq.output),
                seq.num_cached,
                seq.num_preemptions,
                seq.num_swaps,
                num_hit_tokens=seq.num_hit or 0,
            )
        )
        samples = self.requests[seq.request.id]
        samples.remove(seq)
        if not samples:
            del self.requests[seq.request.id]
        self.leave(seq, reason)

    def tell(self, output: Output) -> None:
        """Add to what `outputs` returns next."""
        self._outputs.append(output)

    def leave(self, seq: Sequence, reason: str) -> None:
        """`seq` has ended for `reason`: release what it holds as soon as nobody reads or writes it."""
        if seq.status is Status.WAITING:
            self.unqueue(seq)
        self._stale = True
        if seq.status is Status.LOADING:
            seq.status = Status.DONE  # its blocks are still being written: kept until the transfer ends
        elif seq.status is Status.RUNNING and seq.request.kv_to is not None and reason in ("stop", "length"):
            seq.status = Status.SENDING
            self.sends.append(seq)
        else:
            self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        seq.status = Status.DONE
        self.host.forget(seq)
        # Rows of outstanding steps may still write to these blocks.
        self.ledger.release(seq, seq.last_step)
        if seq.last_step is not None:
            self.late[seq.id] = seq.last_step
        del self.sequences[seq.id]
        self.forget.append(seq.id)
        if seq.id in self.preempted:
            self.preempted.remove(seq.id)
        if self.forks:
            self.forks = [fork for fork in self.forks if fork.seq != seq.id]

    def admitted(self, seq: Sequence) -> None:
        """`seq` comes last in `running`."""
        seq.admission = self.num_admitted
        self.num_admitted += 1

    def tidy(self) -> None:
        """Strike what has ended from `running`."""
        if self._stale:
            self.running = [seq for seq in self.running if seq.status is _RUNNING]
            self._stale = False

    def view(self, now: float, closed: Callable[[], bool], running: Seq[Sequence] | None = None) -> View:
        """What a scheduler may look at, and cannot change; `running` instead of all that run."""
        return View(
            now, self.limits, self.ledger.block_size, tuple(self.running if running is None else running),
            Queue(self.waiting, closed), len(self.waiting), self.ledger.pool.available,
        )  # fmt: skip

    def stats(self, unseen: int = 0, waiting: int | None = None) -> PlanStats:
        """Counts of this moment; `unseen`: committed tokens that the pool has not been told of yet."""
        pool = self.ledger.pool
        return PlanStats(
            len(self.running), len(self.waiting) if waiting is None else waiting, pool.held,
            pool.num_idle, pool.num_blocks, pool.used + unseen, pool.block_size,
        )  # fmt: skip

    def launch(self, planner: Planner, decoding: Decoding | None = None, unseen: int = 0) -> StepPlan:
        """The plan that `planner` has made is out from now on."""
        step = self.num_steps
        self.num_steps += 1
        plan = StepPlan(
            step, tuple(planner.rows), tuple(planner.grants), tuple(planner.copies), tuple(planner.moves),
            tuple(self.forget), tuple(self.preempted), self.stats(unseen), {}, tuple(self.forks),
            tuple(self.host.swap_outs), tuple(planner.swap_ins), decoding,
        )  # fmt: skip
        if plan.swap_outs:
            self.host.swap_outs = []
        self.host.give_back(planner.emptied)
        self.forget, self.preempted, self.forks = [], [], []
        self.outstanding[step] = plan
        return plan

    def _blocked(self) -> Blocked:
        return Blocked(tuple(self.outstanding), tuple(self.transfers))

    # --- audit ----------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Violated invariants, empty when all is well; cheap enough to call after every test event."""
        from twinfer.core.audit import audit_core

        return audit_core(self)
