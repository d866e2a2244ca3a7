"""KV on its way: from prefill to decode replicas, and between replicas and KV tiers, as flows over shared links.

    handover    prefill ends -> Move "send" there     both launched -> flow -> TransferDone to both
                decode admits -> Move "load" there
    tier load   a prompt begins with KV that host memory or the shared store has -> Move "load" -> flow -> TransferDone
    tier store  a request has ended -> flow -> its blocks are there for the next

    links       out<i>, in<i>: network of replica i (bandwidth per device x devices)      fabric: shared by all, if limited
                up<i>, down<i>: host link of replica i, to and from its host memory

Invariants
* KV stays in the prefill replica's pool until all of it has arrived (the Core's SENDING), and the decode replica has
  blocks for it before the first byte goes (the Core's LOADING): back-pressure is the Cores' own.
* With overlap, all but the last layer may go while the prompt's last step computes, no faster than it makes them; the
  last layer follows when the step has ended.
* Every flow belongs to one or two replicas; when one of them fails it is cancelled.
"""

from __future__ import annotations

from typing import Any

import simpy

from twinfer.core.cache_groups import Paging
from twinfer.core.errors import ConfigError
from twinfer.core.events import TransferDone, TransferFailed
from twinfer.core.fleet import KV_SHARE, Fleet
from twinfer.core.plan import Move
from twinfer.core.request import KVSource, Request
from twinfer.core.work import RowShape, StepShape
from twinfer.simulator.links import Flow, Network
from twinfer.simulator.prefix_index import PrefixIndex
from twinfer.simulator.replica import Replica
from twinfer.simulator.run import World

HOST, STORE = "tier:host", "tier:store"
_ROUND = 256  # tokens to which the size of a recomputation is rounded up before its time is worked out


def devices_of(world: World) -> int:
    """Devices of one replica."""
    return world.setup.config.layout.devices


def kv_link(fleet: Fleet, world: World) -> tuple[float, float, str]:
    """B/s per device, latency in s and where they are from, of KV that leaves or reaches a replica over the network.

    Raises ConfigError when neither the fleet nor the device file says.
    """
    device = world.device
    latency = device.network_latency or 0.0 if fleet.kv_latency is None else fleet.kv_latency
    if fleet.kv_bandwidth is not None:
        return fleet.kv_bandwidth, latency, "as given"
    if device.network_bandwidth is None:
        raise ConfigError(
            "--kv-bandwidth", None, f"no network between machines with {device.name} is known", "give bytes per second"
        )
    why = f"{KV_SHARE:.0%} of {device.network or 'the network'}, {device.network_source}"
    return device.network_bandwidth * KV_SHARE, latency, why


def kv_page_bytes(world: World) -> float:
    """Bytes of one page of KV in all devices of a replica, each byte counted once however many devices hold it."""
    setup = world.setup
    share = Paging(setup.block_size, setup.groups).share
    return setup.block_size * setup.model.kv_bytes_per_token() * share


def kv_bytes(world: World, num_tokens: int) -> float:
    """Bytes of the KV of one sequence: of whole blocks, and of sliding windows what they still hold."""
    setup = world.setup
    return Paging(setup.block_size, setup.groups).pages(num_tokens) * kv_page_bytes(world)


class Handover:
    """KV of one prompt on its way from `source` to a decode replica that may not be chosen yet."""

    __slots__ = (
        "begun", "cap", "flow", "head_bytes", "head_done", "job", "loading", "num_bytes", "sending", "source", "source_id",
        "target", "target_id",
    )  # fmt: skip

    def __init__(self, source: Replica, source_id: str, num_bytes: float, job: Any) -> None:
        self.source, self.source_id, self.job = source, source_id, job
        self.target: Replica | None = None
        self.target_id = ""
        self.num_bytes = num_bytes
        self.sending = False  # the source has all of it and holds it
        self.loading = False  # the target has blocks for it
        self.flow: Flow | None = None
        self.begun: float | None = None
        self.cap = 0.0  # B/s at which the last step of the prompt makes the KV; 0: without overlap
        self.head_bytes = 0.0  # sent, or being sent, before the prompt is done
        self.head_done = False


class Transfers:
    """All flows of one fleet run. A job's `handover` becomes None when its KV has arrived at its decode replica."""

    def __init__(self, env: simpy.Environment, fleet: Fleet) -> None:
        self._env = env
        self._fleet = fleet
        self.network = Network(env)
        self._by_source: dict[tuple[int, str], Handover] = {}
        self._by_target: dict[tuple[int, str], Handover] = {}
        self._loads: dict[tuple[int, str], Flow] = {}  # from tiers
        self._stores: dict[int, dict[Flow, None]] = {}
        self._lost: set[tuple[int, str]] = set()  # decode pieces whose KV was lost before they asked for it
        self._latency = 0.0
        self._compute_s: dict[tuple[int, int, int], float] = {}
        tiered = fleet.host_tier_bytes is not None or fleet.shared_tier_bytes is not None
        self.tiers = PrefixIndex(fleet.tier_block) if tiered else None
        self.sent_bytes = 0.0
        self.sent_s: list[float] = []
        self.tier_loads = 0
        self.tier_tokens = 0
        self.tier_bytes = 0.0
        if fleet.fabric_bandwidth is not None:
            self.network.add_link("fabric", fleet.fabric_bandwidth)
        self._fabric = ("fabric",) if fleet.fabric_bandwidth is not None else ()

    def connect(self, replica: Replica) -> None:
        """Links of one replica. Raises ConfigError for a device whose host link is not known but needed."""
        fleet, network, i = self._fleet, self.network, replica.index
        n = devices_of(replica.world)
        if fleet.networked:
            bandwidth, self._latency, _ = kv_link(fleet, replica.world)
            network.add_link(f"out{i}", bandwidth * n)
            network.add_link(f"in{i}", bandwidth * n)
        if fleet.host_tier_bytes is not None:
            device = replica.world.device
            link = device.host_link_bandwidth or (device.memory_bandwidth / 2 if device.kind == "cpu" else None)
            if link is None:
                raise ConfigError(
                    "--host-tier-bytes", fleet.host_tier_bytes, f"how fast {device.name} reads host memory is not known",
                    "use a device file with host_link_bandwidth, or leave it out",
                )  # fmt: skip
            network.add_link(f"up{i}", link * n)
            network.add_link(f"down{i}", link * n)
        if replica.pool != "decode":
            for option, limit in (
                ("--host-tier-bytes", fleet.host_tier_bytes),
                ("--shared-tier-bytes", fleet.shared_tier_bytes),
            ):
                least = self._node_bytes(replica, HOST if option == "--host-tier-bytes" else STORE)
                if limit is not None and limit < least:
                    raise ConfigError(
                        option, limit, f"it keeps blocks of {fleet.tier_block} tokens ({least:.0f} B) and has room for none",
                        f"give at least {least:.0f}, or a smaller --tier-block",
                    )  # fmt: skip

    @property
    def num_flows(self) -> int:
        return self.network.num_flows

    # --- handovers ------------------------------------------------------------------------------

    def offer(self, source: Replica, source_id: str, num_tokens: int, job: Any) -> Handover:
        """The prompt of piece `source_id` of `job` is, or will be, in the KV of `source`."""
        handover = Handover(source, source_id, kv_bytes(source.world, num_tokens), job)
        self._by_source[source.index, source_id] = handover
        return handover

    def assign(self, handover: Handover, target: Replica, target_id: str) -> None:
        """Piece `target_id` of `target` will load it."""
        handover.target, handover.target_id, handover.loading = target, target_id, False
        self._by_target[target.index, target_id] = handover

    def overlap(self, handover: Handover, seconds: float) -> None:
        """The last step of the prompt has been launched and takes `seconds`."""
        layers = handover.source.world.setup.model.num_layers
        if layers > 1 and seconds > 0:
            handover.cap = handover.num_bytes / seconds
            handover.head_bytes = handover.num_bytes * (layers - 1) / layers

    def moved(self, replica: Replica, move: Move) -> None:
        """A plan with `move` was launched."""
        key = (replica.index, move.seq)
        if move.kind == "send":
            handover = self._by_source.get(key)
            if handover is None:  # nobody wants it any more
                replica.tell(TransferDone(move.seq))
            else:
                handover.sending = True
                self._go(handover)
        elif move.peer in (HOST, STORE):
            self._load(replica, move)
        elif key in self._lost:
            self._lost.remove(key)
            replica.tell(TransferFailed(move.seq, "the replica that had the KV failed"))
        else:
            handover = self._by_target[key]
            handover.loading = True
            self._go(handover)

    def _go(self, handover: Handover) -> None:
        """Start what can flow."""
        if handover.flow is not None or not handover.loading or handover.target is None:
            return
        if not handover.sending and (handover.head_done or not handover.cap):
            return
        path = (f"out{handover.source.index}", *self._fabric, f"in{handover.target.index}")
        latency = 0.0
        if handover.begun is None:
            handover.begun, latency = self._env.now, self._latency
        if handover.sending:
            left = handover.num_bytes - (handover.head_bytes if handover.head_done else 0.0)
            handover.flow = self.network.send(path, left, lambda _: self._arrived(handover), latency)
        else:
            handover.flow = self.network.send(
                path, handover.head_bytes, lambda _: self._head_arrived(handover), latency, handover.cap
            )

    def _head_arrived(self, handover: Handover) -> None:
        handover.head_done, handover.flow = True, None
        self._go(handover)

    def _arrived(self, handover: Handover) -> None:
        assert handover.target is not None and handover.begun is not None
        self.sent_bytes += handover.num_bytes
        self.sent_s.append(self._env.now - handover.begun)
        self._forget(handover)
        handover.source.tell(TransferDone(handover.source_id))
        handover.target.tell(TransferDone(handover.target_id))
        handover.job.handover = None

    def _forget(self, handover: Handover) -> None:
        if handover.flow is not None:
            self.network.cancel(handover.flow)
            handover.flow = None
        self._by_source.pop((handover.source.index, handover.source_id), None)
        if handover.target is not None:
            self._by_target.pop((handover.target.index, handover.target_id), None)

    def detach(self, handover: Handover) -> None:
        """Its decode replica is gone; the KV stays at its source, for another to load."""
        if handover.flow is not None:
            self.network.cancel(handover.flow)
        if handover.target is not None:
            self._by_target.pop((handover.target.index, handover.target_id), None)
        handover.target, handover.target_id, handover.loading = None, "", False
        handover.flow, handover.begun, handover.head_done, handover.cap = None, None, False, 0.0

    def drop(self, handover: Handover, source_lives: bool) -> None:
        """Nobody will load it, or its source is gone."""
        target, target_id, loading = handover.target, handover.target_id, handover.loading
        self._forget(handover)
        if source_lives:
            if handover.sending:
                handover.source.tell(TransferDone(handover.source_id))
        elif target is not None:
            if loading:
                target.tell(TransferFailed(target_id, "the replica that had the KV failed"))
            else:
                self._lost.add((target.index, target_id))

    def sourced_at(self, replica: Replica) -> list[Handover]:
        """Handovers whose KV lies in `replica`, oldest first."""
        return [h for (index, _), h in self._by_source.items() if index == replica.index]

    def fail(self, replica: Replica) -> None:
        """`replica` is gone: its tier loads and stores end, and so does what its host memory held."""
        i = replica.index
        for key in [key for key in self._loads if key[0] == i]:
            self.network.cancel(self._loads.pop(key))
        for flow in self._stores.pop(i, ()):
            self.network.cancel(flow)
        self._lost = {key for key in self._lost if key[0] != i}
        if self.tiers is not None:
            self.tiers.forget(i)

    # --- tiers ----------------------------------------------------------------------------------

    def tier_source(self, replica: Replica, request: Request) -> KVSource | None:
        """KV at the start of `request` that a tier has, when loading it is quicker than computing what the replica lacks."""
        if self.tiers is None or not request.cache_prefix:
            return None
        depths = self.tiers.depths(request)
        best: tuple[float, int, str] | None = None
        for holder, handle in ((replica.index, HOST), (STORE, STORE)):
            tokens = min(depths.get(holder, 0), len(request.prompt) - 1)
            if tokens < 1:
                continue
            cached = replica.cached_tokens(request)
            if tokens <= cached:
                continue
            seconds = self._load_s(replica, handle, tokens)
            saved = self._computing_s(replica, tokens - cached, tokens)
            if seconds < saved and (best is None or seconds - saved < best[0]):
                best = (seconds - saved, tokens, handle)
        return None if best is None else KVSource(handle=best[2], num_tokens=best[1])

    def _path(self, replica: Replica, handle: str) -> tuple[str, ...]:
        return (f"down{replica.index}",) if handle == HOST else (*self._fabric, f"in{replica.index}")

    def _load_s(self, replica: Replica, handle: str, tokens: int) -> float:
        latency = self._latency if handle == STORE else 0.0
        return latency + self._device_bytes(replica, tokens) / self.network.share(self._path(replica, handle))

    def _node_bytes(self, replica: Replica, holder: object) -> float:
        """Bytes of one block of a tier."""
        block = self._fleet.tier_block
        return kv_bytes(replica.world, block) if holder == STORE else self._device_bytes(replica, block)

    def _device_bytes(self, replica: Replica, tokens: int) -> float:
        """Bytes that the devices of a sequence's rank read: one that holds a copy reads it, too."""
        setup = replica.world.setup
        page = setup.block_size * setup.kv_bytes_per_slot
        devices = devices_of(replica.world) // setup.config.dp
        return Paging(setup.block_size, setup.groups).pages(tokens) * page * devices

    def _computing_s(self, replica: Replica, queries: int, keys: int) -> float:
        queries, keys = (-(-n // _ROUND) * _ROUND for n in (queries, keys))
        key = (id(replica.world), queries, keys)
        found = self._compute_s.get(key)
        if found is None:
            shape = StepShape((RowShape(queries, max(keys, queries)),), 0)
            found = self._compute_s[key] = replica.world.timer.exact(shape).seconds
        return found

    def _load(self, replica: Replica, move: Move) -> None:
        num_bytes = self._device_bytes(replica, move.num_tokens)
        self.tier_loads += 1
        self.tier_tokens += move.num_tokens
        self.tier_bytes += num_bytes
        key = (replica.index, move.seq)

        def done(_: Flow) -> None:
            del self._loads[key]
            replica.tell(TransferDone(move.seq))

        latency = self._latency if move.peer == STORE else 0.0
        self._loads[key] = self.network.send(self._path(replica, move.peer), num_bytes, done, latency)

    def keep(self, replica: Replica, request: Request, num_output: int) -> None:
        """A piece has ended at `replica`: its KV goes to the tiers, where it is not there yet."""
        if self.tiers is None or not request.cache_prefix:
            return
        fleet = self._fleet
        tail = (0,) * max(0, num_output - 1)  # the last token of an answer has no KV
        for limit, holder in ((fleet.host_tier_bytes, replica.index), (fleet.shared_tier_bytes, STORE)):
            if limit is not None and (holder == STORE or replica.pool != "decode"):  # nobody asks those for prompts
                path = (f"up{replica.index}",) if holder != STORE else (f"out{replica.index}", *self._fabric)
                self._store(replica, request, tail, path, limit, holder)

    def _store(
        self,
        replica: Replica,
        request: Request,
        tail: tuple[int, ...],
        path: tuple[str, ...],
        limit: int,
        holder: object,
    ) -> None:
        assert self.tiers is not None
        tiers, block = self.tiers, self._fleet.tier_block
        node_bytes = self._node_bytes(replica, holder)
        whole = (len(request.prompt) + len(tail)) // block
        new = whole - min(whole, tiers.depths(request).get(holder, 0) // block)
        flows = self._stores.setdefault(replica.index, {})

        def done(flow: Flow) -> None:
            flows.pop(flow, None)
            tiers.note(holder, request, int(limit // node_bytes), tail)

        flow = self.network.send(path, new * node_bytes, done)
        flows[flow] = None


__all__ = ["HOST", "STORE", "Handover", "Transfers", "devices_of", "kv_bytes", "kv_link", "kv_page_bytes"]
