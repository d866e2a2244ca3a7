"""Weighs the prompt tokens that a replica would still have to compute against what it holds already.

    cost of a replica = weight * (prompt - cached there) + tokens in its KV pool or in open prompts, whichever is more

It needs engines that report their caches exactly: cached prefixes and free blocks are those of the moment.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pydantic import Field

from twinfer.core import technique
from twinfer.core.request import Request
from twinfer.core.routing import ReplicaView
from twinfer.core.technique import Technique


class KVAware(Technique):
    name = "kv_aware"
    summary = "The replica with the least work for this prompt: tokens it has not cached, weighed against KV in use"
    reference = "KV-cache-aware scheduling: Mooncake's Conductor (FAST'25, arXiv:2407.00079)"

    class Options(technique.Options):
        weight: float = Field(1.0, ge=0, description="of a token to be computed against one that is held")

    options: Options

    def pick(self, request: Request, views: Seq[ReplicaView]) -> int:
        length = len(request.prompt)

        def cost(view: ReplicaView) -> tuple[float, int, int]:
            held = (view.num_blocks - view.free_blocks) * view.block_size
            load = max(held, view.num_tokens)  # a prompt that waits holds nothing yet
            return self.options.weight * (length - view.cached_tokens(request)) + load, view.last_pick, view.index

        return min(views, key=cost).index
