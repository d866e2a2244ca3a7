"""What a design could do at best, without simulating it: what cannot work is never simulated.

A steady step of d decode rows also feeds the prompts that keep those rows coming, p = d * P / D tokens (P mean
prompt, D mean decode steps of a request), and takes t(d). Its requests per second are d / (D * t(d)). t(d) / d falls
with d, so the largest d that fits is best: by rows, by tokens of a step, by the KV pool, and for TPOT by t(d) itself.
A speculator makes D smaller and t(d) larger: each row also feeds its guesses, and what drafts has its own passes.

    ideal    t(d) on the device's peaks, without overheads (roofline): no fleet is faster
    likely   t(d) with the op times of the simulation, d also held to the TPOT promise: where a search begins

Invariants
* A design is refused here only if its replica on an empty server already breaks a promise, or memory does.
* `fewest` replicas is optimistic: queues, bursts and lengths that vary only make it more. In a closed loop it is 1:
  requests that wait are not lost, they are late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinfer.core.goal import Goal
from twinfer.core.policy import Limits
from twinfer.core.request import Request
from twinfer.core.session import History
from twinfer.core.work import RowShape, StepShape
from twinfer.plugins.op_time.roofline import Roofline
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.plan_steps import Steps, steps_of
from twinfer.simulator.run import World

SAFETY = 0.85
"""Share of the likely replicas that are surely needed: the mean step is not quite the steps that run."""
POINTS = 12  # batch sizes at which t(d) is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a workload asks for: number of requests, seconds they arrive over, mean and extreme lengths.

    prompt: mean tokens of a prompt, with all that was said before in its session.  fed: mean prompt tokens that surely
    have to be computed (prompts that share prefixes: 1; of a later turn what it adds).  held: mean prompt tokens whose
    KV no other request shares.  turns, thinking: most turns of a session, and most seconds between its turns in all.
    """

    num: int
    span: float
    prompt: float
    fed: float
    held: float
    output: float
    longest_output: int
    shortest_context: int
    prompts: tuple[int, ...]  # what each adds, sorted
    turns: int = 1
    thinking: float = 0.0

    @property
    def rate(self) -> float:
        """Requests per s; inf when all arrive at once."""
        return self.num / self.span if self.span > 0 else math.inf


def demand_of(requests: Sequence[Request]) -> Demand:
    added = sorted(len(r.prompt) for r in requests)
    whole = [len(r.prompt) + (0 if r.follows is None else r.follows.history_tokens) for r in requests]
    outputs = [r.params.max_tokens or 1 for r in requests]
    own = all(_own(r.prompt) for r in requests)
    turns = most = 1
    thinking = longest = 0.0
    for request in requests:
        follows = request.follows
        turns, thinking = (1, 0.0) if follows is None else (turns + 1, thinking + follows.think_s)
        most, longest = max(most, turns), max(longest, thinking)
    mean = sum(whole) / len(whole)
    return Demand(
        num=len(requests), span=requests[-1].arrival - requests[0].arrival, prompt=mean,
        fed=sum(added) / len(added) if own else 1.0, held=mean if own else 1.0,
        output=sum(outputs) / len(outputs), longest_output=max(outputs), shortest_context=min(whole) + 1,
        prompts=tuple(added), turns=most, thinking=longest,
    )  # fmt: skip


def _own(prompt: Sequence[int]) -> bool:
    """Whether a prompt was made to share nothing with others (`core/workload.py`), perhaps with images in it."""
    parts = prompt.parts if isinstance(prompt, History) else (prompt,)
    return all(isinstance(part, range) for part in parts)


def steady_shape(steps: Steps, rows: int, demand: Demand) -> StepShape:
    """The mean step of `rows` decoding rows and the prompt tokens that replace those that end."""
    decodes = steps.decodes(demand.output)
    context = max(1, round(demand.prompt + demand.output / 2))
    tokens = round(rows * demand.fed / decodes) if decodes else round(demand.fed * rows)
    each = max(1, round(demand.prompt))
    whole, rest = divmod(tokens, each)
    prefills = (RowShape(each, each),) * whole + ((RowShape(rest, max(rest, (each + rest) // 2)),) if rest else ())
    decoding = (steps.row(context),) * rows if decodes else ()
    return StepShape(decoding + prefills, (rows * steps.row(context).queries if decodes else 0) + max(1, whole))


def capacity(
    steps: Steps, limits: Limits, kv_tokens: int, demand: Demand, slowest_step: float = math.inf
) -> tuple[float, int]:
    """Requests per second of one replica in steady steps of at most `slowest_step` seconds, and the rows of such a
    step; (0, 0) when none is that fast."""
    decodes = steps.decodes(demand.output)
    context = demand.held + demand.output / 2
    each = steps.row(1).queries
    per_row = each + demand.fed / decodes if decodes else max(1.0, demand.fed)
    most = min(limits.max_num_seqs, kv_tokens / context, limits.max_num_batched_tokens / per_row)
    if most < 1:  # a prompt takes several steps: count the steps of one request alone
        alone = empty_server(steps, limits, max(1, round(demand.fed)))
        row = steps.row(max(1, round(demand.prompt + demand.output / 2)))
        rest = steps.seconds(StepShape((row,), row.queries)) if decodes else 0.0
        beside = max(1.0, min(limits.max_num_seqs, kv_tokens / context))
        return 1 / (alone + decodes * rest) * beside, int(beside)
    sizes = sorted({max(1, round(most ** (i / POINTS))) for i in range(POINTS + 1)} | {int(most)})
    best = (0.0, 0)
    for rows in sizes:
        seconds = steps.seconds(steady_shape(steps, rows, demand))
        if seconds <= slowest_step:
            best = max(best, (rows / (max(decodes, 1.0) * seconds), rows))
    return best


def empty_server(steps: Steps, limits: Limits, prompt: int, chunk: int | None = None) -> float:
    """TTFT of a prompt that finds the server empty: its chunks, one after the other."""
    chunk = min(chunk or prompt, limits.max_num_batched_tokens)
    seconds, done = 0.0, 0
    while done < prompt:
        take = min(chunk, prompt - done)
        done += take
        seconds += steps.plain.seconds(StepShape((RowShape(take, done),), int(done == prompt)))
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """fewest: replicas below which no fleet keeps the promises; likely: where to look first; problem: why none does."""

    fewest: int = 1
    likely: int = 1
    problem: str = ""


def bound_of(
    world: World, demand: Demand, goals: Sequence[Goal], peak_rate: float, pools: tuple[int, int] = (1, 0),
    clients: int | None = None,
) -> Bound:  # fmt: skip
    """Bounds of the design of `world`. peak_rate: requests per s in the busiest part of the traffic.

    pools: its prefill and decode replicas; where they are apart, only the device's peaks are a bound.
    clients: of a closed loop.
    """
    setup = world.setup
    at_once = setup.config.dp * setup.config.pp  # each rank, and each stage, has a step of its own
    limits = replace(setup.limits, max_num_batched_tokens=setup.limits.max_num_batched_tokens * at_once)
    steps = steps_of(world)
    for goal in goals:
        value = _at_least(world, steps, demand, goal)
        if value > goal.limit:
            return Bound(
                problem=f"{goal.name} is {_time(value)} at least, on an empty server (promised: {_time(goal.limit)})"
            )
    kv_tokens = limits.num_blocks * setup.block_size // len(setup.groups)
    slowest = min((g.limit for g in goals if g.metric in ("tpot", "itl") and g.share >= 0.9), default=math.inf)
    slowest *= steps.tokens
    likely, rows = capacity(steps, limits, kv_tokens, demand, slowest)
    if not likely:
        likely, rows = capacity(steps, limits, kv_tokens, demand)
        likely *= SAFETY
    if clients is not None:
        return Bound(likely=max(1, math.ceil(clients / (sum(pools) * max(1, rows)))))
    peaks = world.device.model_copy(update={"efficiency": {}, "calibration": {}})
    ideal = _ideal(steps.on(OpTimeChain((Roofline(),), peaks)), limits, kv_tokens, demand)
    share = max((g.share for g in goals if g.metric in ("ttft", "e2e")), default=0.0)
    step = 1 / (SAFETY * likely)
    waits = max((g.limit for g in goals if g.metric in ("ttft", "e2e")), default=0.0)
    if not any(g.metric == "e2e" for g in goals):  # answers may go on after the first token was in time
        waits += demand.longest_output * min(slowest, step * limits.max_num_seqs)
    needed = share * demand.num / (demand.span + demand.thinking + demand.turns * waits)
    fewest = max(1, math.ceil(needed / (sum(pools) * ideal)))
    if not pools[1]:
        fewest = max(fewest, math.ceil(SAFETY * needed / likely))
    return Bound(fewest=fewest, likely=max(fewest, math.ceil(peak_rate / (0.9 * sum(pools) * likely))))


def _ideal(steps: Steps, limits: Limits, kv_tokens: int, demand: Demand) -> float:
    """Requests per s on the device's peaks. Guesses that find no room are left out, and luck may be better than its
    mean, so with a speculator it is the better of both ways, and a little more."""
    plain = capacity(steps.plain, limits, kv_tokens, demand)[0]
    return max(plain, capacity(steps, limits, kv_tokens, demand)[0] / SAFETY) if steps.guesses else plain


def _at_least(world: World, steps: Steps, demand: Demand, goal: Goal) -> float:
    """Seconds that `goal`'s statistic takes on a server that has nothing else to do; 0 where that says nothing."""
    if goal.metric in ("tpot", "itl"):
        step = steps.plain.seconds(StepShape((RowShape(1, demand.shortest_context),), 1))
        if goal.metric == "itl" and steps.guesses:  # tokens of one step come at once
            return 0.0
        return step / (1 + steps.depth)
    if demand.fed == 1.0:  # hits of a prefix cache may leave nothing to compute
        return 0.0
    # whole prompts go to the one that stands at the goal's rank; of a mean, to the mean one
    ordered = demand.prompts
    length = round(demand.fed) if goal.statistic == "mean" else ordered[math.floor((len(ordered) - 1) * goal.share)]
    config, limits = world.setup.config, world.setup.limits
    if config.pp > 1:  # chunks follow each other through the stages: no faster than all of them at once
        return empty_server(steps, replace(limits, max_num_batched_tokens=max(1, length)), max(1, length))
    return empty_server(steps, limits, max(1, length), config.scheduler.options.get("chunk_size"))


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


__all__ = ["SAFETY", "Bound", "Demand", "bound_of", "capacity", "demand_of", "empty_server", "steady_shape"]
