"""One batch as written and through recorded forward passes (`core/runtime/replay.py`), which must agree bit for bit."""

from __future__ import annotations

import random

import torch

from twinfer.core.plan import Need
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.batch import PackedBatch, PackedRow, pack
from twinfer.core.runtime.families import DecoderModel
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.profile import Profile, silent
from twinfer.core.runtime.replay import Forward

BLOCK = 4


class World:
    """Sequences over shuffled pages, and the same batch run as written and through `Forward`, each on its own cache."""

    def __init__(self, model: DecoderModel, num_rows: int = 8) -> None:
        self.model, self.random = model, random.Random(0)
        self.attention = attention_of(model.spec)
        self.caches = [KVStorage.of(model.spec, 200, BLOCK) for _ in range(2)]
        self.forward = Forward(model, self.attention, self.caches[1])
        self.pages = list(range(200))
        self.random.shuffle(self.pages)
        self.tables = [self.caches[0].new_table() for _ in range(num_rows)]
        self.lengths = [0] * num_rows

    def batch(self, shape: dict[int, int], need: Need = Need.LAST) -> PackedBatch:
        """`shape`: sequence to the number of tokens that it feeds."""
        rows = []
        for i, count in shape.items():
            start = self.lengths[i]
            while self.tables[i].capacity < start + count:
                self.tables[i].append([self.pages.pop()])
            self.lengths[i] += count
            tokens = [self.random.randrange(self.model.spec.vocab_size) for _ in range(count)]
            rows.append(PackedRow(tokens, start, need, self.tables[i]))
        return pack(rows)

    def check(self, batch: PackedBatch, profile: Profile | None = None) -> None:
        step = self.attention.step(batch, self.caches[0])
        wanted = self.model.forward(batch.tokens, batch.positions, step, batch.logits_index, silent)
        assert torch.equal(self.forward(batch, profile), wanted)

    @property
    def num_recorded(self) -> int:
        return len(self.forward._recorded)
