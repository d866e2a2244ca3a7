"""Sends a prompt to where its beginning was sent before, unless that replica has much more to do than others.

All it knows is what it sent (a tree of prompts per replica, kept by the fleet): no engine has to report its cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from pydantic import Field

from twinfer.core import technique
from twinfer.core.request import Request
from twinfer.core.routing import ReplicaView
from twinfer.core.technique import Technique
from twinfer.plugins.router.load import least_loaded, load_of


class PrefixAware(Technique):
    name = "prefix_aware"
    summary = "The replica that was sent the longest common prefix, while load is even; else the least loaded one"
    reference = "Cache-aware load balancing: SGLang (arXiv:2312.07104); Preble (arXiv:2407.00023)"

    class Options(technique.Options):
        block: int = Field(64, ge=1, description="tokens per node of the tree of prompts")
        least_match: float = Field(
            0.25, ge=0, le=1, description="share of the prompt that must match for its replica to be preferred"
        )
        most_behind: int = Field(
            8, ge=0, description="open requests by which the preferred replica may exceed the least loaded one"
        )
        most_ratio: float = Field(
            1.5, ge=1, description="and the ratio of their open requests from which on that counts as uneven"
        )
        by: Literal["requests", "tokens"] = Field("requests", description="load that decides when no prefix does")

    options: Options

    @property
    def prefix_block(self) -> int:
        return self.options.block

    def pick(self, request: Request, views: Seq[ReplicaView]) -> int:
        o = self.options
        idlest = least_loaded(views, o.by)
        found = {view.index: view.routed_tokens(request) for view in views}
        longest = max(found.values())
        if longest < max(1, o.least_match * len(request.prompt)):
            return idlest.index
        best = least_loaded([view for view in views if found[view.index] == longest], o.by)
        load, least = load_of(best, "requests"), load_of(idlest, "requests")
        if load - least > o.most_behind and load > o.most_ratio * least:
            return idlest.index
        return best.index
