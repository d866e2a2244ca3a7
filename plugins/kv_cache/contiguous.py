"""Contiguous KV, as older systems had it: one region of the maximum length per sequence, taken at once.

The block of this cache is the whole region, so everything else (tables, accounting, waste) is the same
code as for the paged cache, and the waste can be seen.
"""

from __future__ import annotations

from twinfer.core import technique
from twinfer.core.idle import LRU
from twinfer.core.policy import IdleOrder, Limits
from twinfer.core.technique import Technique


class Contiguous(Technique):
    name = "contiguous"
    summary = "Pre-allocates max_model_len tokens per sequence; no sharing"
    reference = "the reservation PagedAttention measures against (arXiv:2309.06180, section 3)"

    class Options(technique.Options):
        pass

    shares_prefixes = False
    copies_on_write = False
    frees_windows = False  # a region is taken whole and given back whole

    def block_size(self, limits: Limits) -> int:
        return limits.max_model_len

    def reserve(self, num_tokens: int, limits: Limits) -> int:
        return limits.max_model_len

    def headroom(self, limits: Limits) -> int:
        return 0

    def idle_order(self) -> IdleOrder:
        return LRU()
