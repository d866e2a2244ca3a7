"""How long collectives take by what goes over links: within a node, and between nodes.

    N ranks, a whole buffer of S bytes             a rank sends
    all_reduce                                     2 (N - 1) / N * S        (ring)
    all_gather, reduce_scatter, all_to_all           (N - 1) / N * S
    send                                                           S

Over several nodes (g ranks in each, N of them) reductions and gathers go within nodes first, with 1 / g of the buffer
between nodes; an all-to-all sends to its own node and to the others at the same time.

Invariants
* Seconds without overheads: callers add latencies of their own.
* A group that spans several nodes of a device without a known network is refused, not guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfer.core.errors import ConfigError
from twinfer.core.work import COLLECTIVES, Op

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec


def whole_buffer(what: str, ranks: int, message: float) -> float:
    """Bytes of the whole buffer (NCCL's convention) of a message by `COLLECTIVES`: the parts of a gather together."""
    return message * ranks if what == "all_gather" else message


def sent_share(what: str, ranks: int) -> float:
    """Share of the whole buffer that each of `ranks` sends."""
    if what == "send":
        return 1.0
    return (2.0 if what == "all_reduce" else 1.0) * (ranks - 1) / ranks


def wire_seconds(op: Op, device: DeviceSpec, link_share: float, network_share: float) -> tuple[float, str]:
    """Seconds that the links are busy with a collective, and in words; shares: of the bandwidths that are reached."""
    what, ranks = COLLECTIVES.get(op.name, "all_reduce"), op.shape[0] if op.shape else 2
    link = device.link_bandwidth
    if not link:
        raise ConfigError(
            "--device", device.name, f"has no link, but {op.name} sends {op.comm_bytes:.0f} bytes",
            "use --tp 1, or a device file with link_bandwidth",
        )  # fmt: skip
    node = device.devices_per_node or ranks
    size = whole_buffer(what, ranks, op.comm_bytes)
    near = link_share * link
    if ranks <= node:
        seconds = sent_share(what, ranks) * size / near
        return seconds, f"{size / 1e6:.2f} MB, {what} of {ranks} over {link / 1e9:.0f} GB/s"
    network = device.network_bandwidth
    if not network:
        raise ConfigError(
            "--device", device.name, f"{op.name} joins {ranks} devices, {node} in a node, but how nodes are linked is not known",
            "use a smaller group, or a device file with network_bandwidth",
        )  # fmt: skip
    nodes, far = -(-ranks // node), network_share * network
    words = f"{size / 1e6:.2f} MB, {what} of {ranks} on {nodes} nodes over {network / 1e9:.0f} GB/s"
    if what == "send":
        return size / far, words
    if what == "all_to_all":
        return max((ranks - node) / ranks * size / far, (node - 1) / ranks * size / near), words
    within, between = sent_share(what, node) * size / near, sent_share(what, nodes) * size / node / far
    return within + between, words


def network_hops(op: Op, device: DeviceSpec) -> int:
    """Times that a message of a collective waits for the network: 0 within a node."""
    ranks = op.shape[0] if op.shape else 2
    node = device.devices_per_node or ranks
    nodes = -(-ranks // node)
    if nodes == 1:
        return 0
    what = COLLECTIVES.get(op.name, "all_reduce")
    return 1 if what in ("send", "all_to_all") else (nodes - 1) * (2 if what == "all_reduce" else 1)


__all__ = ["network_hops", "sent_share", "whole_buffer", "wire_seconds"]
