"""Forward passes of a few tokens, recorded once per shape and then repeated as one call (`kernels/native/program.py`).

Invariants
* A recording is repeated only for a batch of the same shape: as many tokens, rows and logits, as many threads.
* It gives the numbers of the pass it was recorded from: the same kernels with the same arguments.
* A model whose pass is not all native kernels is found out at the first try and from then on runs as written.
* Marks keep their meaning: a profile is told the seconds between the marks of the recorded pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinfer.core.runtime.attention_cpu import NativeStep
from twinfer.core.runtime.attention_torch import TorchAttention
from twinfer.core.runtime.batch import PackedBatch
from twinfer.core.runtime.families import DecoderModel, Mark
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.profile import Profile, silent
from twinfer.kernels.native.program import Program

MOST_TOKENS = 32  # above it the calls are a small part of a step
MOST_SHAPES = 16  # recordings kept
Shape = tuple[int, int, int, int]


@dataclass(slots=True)
class _Recorded:
    program: Program
    batch: PackedBatch
    step: NativeStep
    logits: Tensor


class Forward:
    """`model.forward` over the cache `kv`, one batch at a time. Logits are valid until the next call."""

    def __init__(self, model: DecoderModel, attention: TorchAttention, kv: KVStorage) -> None:
        self.model, self.attention, self.kv = model, attention, kv
        self.why_not = "several ranks" if model.parallel.size > 1 else ""
        """Why nothing is recorded; empty while nothing speaks against it."""
        self._recorded: dict[Shape, _Recorded] = {}
        self._last: Shape | None = None

    def __call__(self, batch: PackedBatch, profile: Profile | None = None) -> Tensor:
        """Float32 logits `[len(batch.logits_index), vocab]`."""
        shape = (batch.num_tokens, len(batch.spans), len(batch.logits_index), torch.get_num_threads())
        found = self._recorded.get(shape)
        if found is not None:
            return self._repeat(found, batch, profile)
        again, self._last = shape == self._last, shape  # recording pays for what comes again
        step = self.attention.step(batch, self.kv)
        if profile is not None:
            profile.mark("host")
        if again and not self.why_not and batch.num_tokens <= MOST_TOKENS and isinstance(step, NativeStep):
            return self._record(shape, batch, profile)
        mark = profile.mark if profile is not None else silent
        return self.model.forward(batch.tokens, batch.positions, step, batch.logits_index, mark)

    def _record(self, shape: Shape, batch: PackedBatch, profile: Profile | None) -> Tensor:
        own = batch.clone()
        step = self.attention.step(own, self.kv)
        assert isinstance(step, NativeStep)

        def run(note: Mark) -> Tensor:
            def mark(op: str) -> None:
                note(op)
                if profile is not None:
                    profile.mark(op)

            return self.model.forward(own.tokens, own.positions, step, own.logits_index, mark)

        program, logits = Program.record(run)
        if program.refusal:
            self.why_not = f"{program.refusal} is not a native kernel"
        else:
            if len(self._recorded) == MOST_SHAPES:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[shape] = _Recorded(program, own, step, logits)
        return logits

    def _repeat(self, found: _Recorded, batch: PackedBatch, profile: Profile | None) -> Tensor:
        found.batch.take(batch)
        found.step.refill(batch)
        if profile is not None:
            profile.mark("host")
        found.program.run()
        if profile is not None:
            profile.add(found.program.seconds())
        return found.logits


__all__ = ["Forward"]
