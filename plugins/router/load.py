"""Routers that look at load alone, or at nothing.

Load is what a router in front of real engines knows: the requests that it sent and that have not ended, and the
tokens of their prompts. How long answers become it does not know, and neither do these.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from pydantic import Field

from twinfer.core import technique
from twinfer.core.request import Request
from twinfer.core.routing import ReplicaView
from twinfer.core.seeds import draw, mix
from twinfer.core.technique import Technique


def load_of(view: ReplicaView, by: str) -> int:
    """Open requests of a replica, or the prompt tokens of them."""
    return view.num_requests if by == "requests" else view.num_tokens


def least_loaded(views: Seq[ReplicaView], by: str) -> ReplicaView:
    """The view with the least load; of equal ones that which was picked longest ago, so that idle ones take turns."""
    return min(views, key=lambda view: (load_of(view, by), view.last_pick, view.index))


class RoundRobin(Technique):
    name = "round_robin"
    summary = "Each replica in turn: the one that was picked longest ago"
    reference = "Nagle, On packet switches with infinite storage (RFC 970, 1985)"

    def pick(self, request: Request, views: Seq[ReplicaView]) -> int:
        return min(views, key=lambda view: (view.last_pick, view.index)).index


class RandomOfTwo(Technique):
    name = "random"
    summary = "The less loaded of a few replicas drawn at random; two of them are nearly as good as looking at all"
    reference = "Mitzenmacher, The power of two choices in randomized load balancing (IEEE TPDS 12, 2001)"

    class Options(technique.Options):
        choices: int = Field(2, ge=1, description="replicas drawn for each request; 1 is plain random")
        by: Literal["requests", "tokens"] = Field("requests", description="what counts as load")
        seed: int = Field(0, ge=0, description="of the draws")

    options: Options

    def pick(self, request: Request, views: Seq[ReplicaView]) -> int:
        left = list(views)
        key = mix(self.options.seed)
        for byte in request.id.encode():  # keyed by the request's name, not by how often this was asked
            key = mix(key ^ byte)
        drawn = []
        for number in range(min(self.options.choices, len(left))):
            drawn.append(left.pop(int(draw(key, number) * len(left))))
        return least_loaded(drawn, self.options.by).index


class LeastLoaded(Technique):
    name = "least_loaded"
    summary = "The replica with the fewest open requests, or the fewest prompt tokens in open requests"
    reference = "Join the shortest queue: Winston, Optimality of the shortest line discipline (J. Appl. Prob. 14, 1977)"

    class Options(technique.Options):
        by: Literal["requests", "tokens"] = Field("requests", description="what counts as load")

    options: Options

    def pick(self, request: Request, views: Seq[ReplicaView]) -> int:
        return least_loaded(views, self.options.by).index


__all__ = ["LeastLoaded", "RandomOfTwo", "RoundRobin", "least_loaded", "load_of"]
