"""Paged KV: blocks of a few tokens, handed out as a sequence grows, shared by prefix.

sequence A  [ b7 ][ b2 ][ b9 .. ]        full blocks of a common prefix (b7, b2) stand in both
sequence B  [ b7 ][ b2 ][ b4 .. ]        tables; idle cached blocks wait in LRU order to be hit or reused
"""

from __future__ import annotations

from pydantic import Field

from twinfer.core import technique
from twinfer.core.idle import LRU
from twinfer.core.policy import IdleOrder, Limits
from twinfer.core.technique import Technique


class Paged(Technique):
    name = "paged"
    summary = "Block table per sequence, prefix sharing, copy-on-write, LRU of idle cached blocks"
    reference = "PagedAttention / vLLM (SOSP'23, arXiv:2309.06180)"

    class Options(technique.Options):
        block_size: int = Field(16, ge=1, le=1024, description="tokens per block")
        prefix_sharing: bool = Field(True, description="reuse committed blocks of equal prefixes")
        free_windows: bool = Field(True, description="give up blocks that sliding-window layers have left behind")
        headroom: float = Field(0.01, ge=0, lt=1, description="share of blocks admission leaves free for growth")

    options: Options

    @property
    def shares_prefixes(self) -> bool:
        return self.options.prefix_sharing

    @property
    def frees_windows(self) -> bool:
        return self.options.free_windows

    copies_on_write = True

    def block_size(self, limits: Limits) -> int:
        return self.options.block_size

    def reserve(self, num_tokens: int, limits: Limits) -> int:
        return num_tokens

    def headroom(self, limits: Limits) -> int:
        return int(limits.num_blocks * self.options.headroom)

    def idle_order(self) -> IdleOrder:
        return LRU()
