"""Runs plans on torch: one forward pass per step, whatever the mix of rows.

Order within a step: forget, forks, swap-outs, clear the tables of preempted sequences, grants, copies, swap-ins, rows.

Invariants
* Results are in row order, one per row; a row that cannot be computed says why in `RowResult.failure`.
* The executor keeps block tables and token histories and nothing else; it learns them from plans and `admit`.
* A sequence's history is what its rows fed and what was sampled for it; a preempted one keeps it.
* With `profile`, `StepResult.ops` has seconds by op name (`core/layer_ops.py`) and "host" for what is none of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from twinfer.core.cache_groups import CacheGroup
from twinfer.core.errors import RequestError
from twinfer.core.plan import FromStep, Need, Row, RowResult, StepPlan, StepResult
from twinfer.core.request import Request
from twinfer.core.runtime.attention_torch import TorchAttention
from twinfer.core.runtime.batch import PackedRow, num_logits, pack
from twinfer.core.runtime.families import DecoderModel, Mark
from twinfer.core.runtime.host_storage import HostStorage
from twinfer.core.runtime.kv_storage import KVStorage, Table
from twinfer.core.runtime.profile import Profile, silent
from twinfer.core.runtime.replay import Forward
from twinfer.core.runtime.sampler import SampleEntry, Sampler, Samples


@dataclass(slots=True)
class _State:
    """What the executor knows of one sequence."""

    request: Request
    index: int
    prompt_len: int
    table: Table
    output: list[int] = field(default_factory=list)
    last_step: int = -1  # newest step that sampled for it, and the token
    last_token: int = -1

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        """Remember fed tokens that lie behind the prompt."""
        skip = max(self.prompt_len - start, 0)
        if skip < len(tokens):
            at = start + skip - self.prompt_len
            self.output[at : at + len(tokens) - skip] = tokens[skip:]

    def fork(self, parent: _State) -> None:
        """Become a copy of `parent`: the same tokens so far in the same blocks."""
        self.output = list(parent.output)
        self.table.become(parent.table)

    def sampled(self, step: int, position: int, tokens: Sequence[int]) -> None:
        del self.output[position - self.prompt_len :]
        self.output.extend(tokens)
        if tokens:
            self.last_step, self.last_token = step, tokens[-1]


class TorchExecutor:
    """Executor of one model on one device. See `twinfer.core.executor.Executor`."""

    def __init__(
        self,
        model: DecoderModel,
        attention: TorchAttention,
        num_blocks: int,
        block_size: int,
        sampler: Samples | None = None,
        profile: bool = False,
        num_host_blocks: int = 0,
        groups: Sequence[CacheGroup] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype: the storage format of KV, None for the dtype of the model."""
        spec, tp = model.spec, model.parallel.size
        self.model, self.attention, self.profile = model, attention, profile
        self.kv = KVStorage.of(spec, num_blocks, block_size, kv_dtype or model.dtype, model.device, tp, groups)
        self.host = HostStorage(self.kv, num_host_blocks)
        self.sampler: Samples = sampler if sampler is not None else Sampler(spec.vocab_size, model.device)
        self.forward = Forward(model, attention, self.kv)
        self._states: dict[str, _State] = {}

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        """Remember the request; RequestError when it needs KV from or for a peer."""
        if request.kv_from is not None or request.kv_to is not None:
            raise RequestError(f"request {request.id}: this executor cannot transfer KV; leave out kv_from and kv_to")
        for seq, index in seqs:
            self._states[seq] = _State(request, index, len(request.prompt), self.kv.new_table())

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        profile = Profile(self.model.device) if self.profile else None
        with torch.inference_mode():
            self._update_tables(plan, profile.mark if profile is not None else silent)
            results = self._rows(plan, profile)
        seconds = time.perf_counter() - begin
        return StepResult(tuple(results), seconds, ops=profile.ops(seconds) if profile is not None else {})

    def close(self) -> None:
        self._states.clear()
        for name in ("kv", "host", "forward"):
            self.__dict__.pop(name, None)
        self.__dict__.pop("model", None)

    # --- block tables -----------------------------------------------------------------------------

    def _update_tables(self, plan: StepPlan, mark: Mark) -> None:
        for seq in plan.forget:
            self._states.pop(seq, None)
        for fork in plan.forks:
            self._states[fork.seq].fork(self._states[fork.parent])
        if plan.swap_outs:
            mark("host")
            self.host.swap_out(plan.swap_outs)
            mark("kv_swap")
        for seq in plan.preempted:
            if seq in self._states:
                self._states[seq].table.clear()
        for grant in plan.grants:
            if not 0 <= grant.group < len(self.kv.groups):
                raise ValueError(f"cache group {grant.group}: this executor has {len(self.kv.groups)}")
            self._states[grant.seq].table.group(grant.group).append(grant.blocks)
        self.kv.copy_blocks(plan.copies)
        for copy in plan.copies:
            self._states[copy.seq].table.group(copy.group).replace(copy.slot, copy.target)
        mark("kv_copy" if plan.copies else "host")
        if plan.swap_ins:
            self.host.swap_in(plan.swap_ins)
            mark("kv_swap")

    # --- rows -------------------------------------------------------------------------------------

    def _rows(self, plan: StepPlan, profile: Profile | None) -> list[RowResult]:
        results: list[RowResult | None] = [None] * len(plan.rows)
        moved = {move.seq for move in plan.moves}
        packed: list[PackedRow] = []
        kept: list[int] = []
        for i, row in enumerate(plan.rows):
            tokens = self._resolve(row)
            failure = "this executor cannot transfer KV" if row.seq in moved else self._why_not(row, tokens)
            if failure is not None or tokens is None:
                results[i] = RowResult(failure=failure)
                continue
            state = self._states[row.seq]
            state.feed(row.start, tokens)
            packed.append(PackedRow(tokens, row.start, row.need, state.table, row.draft))
            kept.append(i)
        if packed:
            try:
                answers = self._forward(plan, packed, kept, profile)
            except RuntimeError as error:
                if not _out_of_memory(error) or self.model.parallel.size > 1:  # the other ranks would go on without it
                    raise
                failure = "out of device memory; lower --max-num-batched-tokens or the size of the KV pool"
                answers = [RowResult(failure=failure)] * len(kept)
            for i, answer in zip(kept, answers, strict=True):
                results[i] = answer
        return [result if result is not None else RowResult() for result in results]

    def _forward(
        self, plan: StepPlan, packed: list[PackedRow], kept: list[int], profile: Profile | None
    ) -> list[RowResult]:
        mark = profile.mark if profile is not None else silent
        logits = self.forward(pack(packed, self.model.device), profile)
        entries: list[SampleEntry] = []
        sampled: list[int] = []  # places in `kept`
        for place, i in enumerate(kept):
            row = plan.rows[i]
            if row.need is Need.NONE:
                continue
            state = self._states[row.seq]
            drafts = num_logits(row.need, len(row.tokens), row.draft) - 1
            entries.append(
                SampleEntry(
                    seq=row.seq, request=state.request, index=state.index, position=row.stop - drafts,
                    seed=row.seed, output_ids=state.output, prompt_ids=state.request.prompt, num_drafts=drafts,
                )
            )  # fmt: skip
            sampled.append(place)
        answers = [RowResult()] * len(kept)
        if entries:
            for place, entry, answer in zip(sampled, entries, self.sampler.sample(logits, entries), strict=True):
                answers[place] = answer
                if answer.failure is not None:
                    self.kv.clear_non_finite(self._states[entry.seq].table)
                self._states[entry.seq].sampled(plan.step, entry.position, answer.tokens)
        mark("sample")
        return answers

    def _resolve(self, row: Row) -> list[int] | None:
        """Token ids of a row, or None when one of them was never sampled here."""
        tokens: list[int] = []
        for token in row.tokens:
            if isinstance(token, FromStep):
                source = self._states.get(token.seq)
                if source is None or source.last_step != token.step:
                    return None
                tokens.append(source.last_token)
            else:
                tokens.append(token)
        return tokens

    def _why_not(self, row: Row, tokens: list[int] | None) -> str | None:
        state = self._states.get(row.seq)
        if state is None:
            return f"sequence {row.seq} was never admitted"
        if tokens is None:
            return "a token of an earlier step is not known"
        if row.stop > state.table.capacity or not tokens:
            return f"{len(tokens)} tokens at {row.start} do not fit {state.table.capacity} KV slots"
        vocab = self.model.spec.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab:
            return (
                f"token id {max(tokens) if max(tokens) >= vocab else min(tokens)} is outside the vocabulary of {vocab}"
            )
        if row.need is Need.ALL and not self.sampler.serves_all:
            return "logits of all positions are not served"
        if num_logits(row.need, len(tokens), row.draft) > len(tokens):
            return f"{row.draft} drafts in a row of {len(tokens)} tokens"
        return None


def _out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a type for it; the CPU allocator only a message."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
