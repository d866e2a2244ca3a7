"""Event logs in, plan logs out: `golden/*.json` hold both.

    python tests/core/golden_replay.py FILE...    replay the events, print what the core answers, one line each
    python tests/core/golden_replay.py --write    record all files anew (after an intended change of decisions)

A file is {"scenario", "core", "events", "log"}. Events carry everything the core is told, results of steps
included, so a replay needs neither an executor nor random numbers.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinfer.core.core import Core
from twinfer.core.events import Abort, Event, StepDone, Submit, TransferDone, TransferFailed
from twinfer.core.params import SamplingParams
from twinfer.core.plan import RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.request import KVSource, Request
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.static import Static

FOLDER = Path(__file__).resolve().parent / "golden"
TECHNIQUES = {"continuous": Continuous, "static": Static, "paged": Paged, "contiguous": Contiguous}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a log is recorded: a core, and what happens to it."""

    scheduler: tuple[str, dict[str, Any]]
    kv_cache: tuple[str, dict[str, Any]]
    limits: Limits
    n: int = 1
    drafts: int = 0
    transfers: bool = False
    abort: float = 0.0
    num_requests: int = 8


SCENARIOS = {
    "chunked-prefix": Scenario(
        scheduler=("continuous", {"chunk_size": 6}),
        kv_cache=("paged", {"block_size": 4}),
        limits=Limits(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=40, num_blocks=32),
        abort=0.05,
    ),
    "priority-preemption": Scenario(
        scheduler=("continuous", {"policy": "priority"}),
        kv_cache=("paged", {"block_size": 2}),
        limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, num_blocks=14),
    ),
    "static-contiguous": Scenario(
        scheduler=("static", {"batch_size": 3, "max_wait_s": 1.0}),
        kv_cache=("contiguous", {}),
        limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, num_blocks=3),
    ),
    "forks-and-drafts": Scenario(
        scheduler=("continuous", {}),
        kv_cache=("paged", {"block_size": 4}),
        limits=Limits(max_num_seqs=8, max_num_batched_tokens=24, max_model_len=40, num_blocks=24),
        n=3,
        drafts=3,
        num_requests=5,
    ),
    "three-steps-out": Scenario(
        scheduler=("continuous", {}),
        kv_cache=("paged", {"block_size": 4}),
        limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, num_blocks=12, max_outstanding=3),
        abort=0.05,
    ),
    "transfers": Scenario(
        scheduler=("continuous", {}),
        kv_cache=("paged", {"block_size": 4}),
        limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, num_blocks=16, max_outstanding=2),
        transfers=True,
    ),
}


# --- recording -----------------------------------------------------------------------------------


def record(name: str) -> dict[str, Any]:
    """Run the scenario with the content oracle as executor; every event the core saw, and its answers."""
    from content_oracle import World

    scenario, rng = SCENARIOS[name], random.Random(name)
    world = World(
        TECHNIQUES[scenario.scheduler[0]](TECHNIQUES[scenario.scheduler[0]].Options(**scenario.scheduler[1])),
        TECHNIQUES[scenario.kv_cache[0]](TECHNIQUES[scenario.kv_cache[0]].Options(**scenario.kv_cache[1])),
        scenario.limits,
        max_drafts=scenario.drafts,
    )
    for number in range(scenario.num_requests):
        length = rng.randint(3, 14)
        sampled = scenario.n > 1 and number % 2 == 0
        world.submit(
            Request(
                id=f"r{number}",
                prompt=tuple(range(length)) if number % 3 else tuple(range(40, 40 + length)),
                params=SamplingParams(
                    max_tokens=rng.randint(2, 9),
                    n=scenario.n if sampled else 1,
                    temperature=1.0 if sampled else 0.0,
                    seed=number if sampled else None,
                    stop_token_ids=(7,) if number % 4 == 1 else (),
                ),
                priority=rng.randrange(3),
                arrival=world.now,
                kv_from=KVSource(handle="prefiller", num_tokens=length) if scenario.transfers and number % 2 else None,
                kv_to="decoder" if scenario.transfers and number % 3 == 0 else None,
            )
        )
        for _ in range(rng.randrange(5)):
            world.now += 0.25
            if rng.random() < scenario.abort:
                world.abort(f"r{rng.randrange(number + 1)}")
            elif world.transfers() and rng.random() < 0.5:
                world.end_transfer(world.transfers()[0], rng.random() < 0.6)
            elif world.core.has_work:
                world.advance()
    while world.core.has_work:
        world.now += 0.25
        world.advance()
    world.drain()
    core = {
        "scheduler": list(scenario.scheduler),
        "kv_cache": list(scenario.kv_cache),
        "limits": asdict(scenario.limits),
    }
    data = {"scenario": name, "core": core, "events": [encode(now, event) for now, event in world.events]}
    return {**data, "log": list(replay(data))}


def encode(now: float, event: Event | None) -> dict[str, Any]:
    at: dict[str, Any] = {"at": now}
    match event:
        case None:
            return {**at, "next_step": True}
        case Submit(request):
            r, p = request, request.params
            params = {
                key: getattr(p, key)
                for key in ("max_tokens", "n", "temperature", "seed", "stop_token_ids")
                if getattr(p, key) != getattr(SamplingParams(), key)
            }
            given: dict[str, Any] = {"id": r.id, "prompt": list(r.prompt), "params": params, "priority": r.priority}
            if r.kv_from is not None:
                given["kv_from"] = [r.kv_from.handle, r.kv_from.num_tokens]
            if r.kv_to is not None:
                given["kv_to"] = r.kv_to
            return {**at, "submit": given}
        case Abort(request_id):
            return {**at, "abort": request_id}
        case StepDone(step, result):
            return {**at, "done": step, "rows": [[list(r.tokens), list(r.drafts)] for r in result.rows]}
        case TransferDone(seq):
            return {**at, "transfer_done": seq}
        case TransferFailed(seq, why):
            return {**at, "transfer_failed": seq, "why": why}
    raise TypeError(event)


# --- replaying -----------------------------------------------------------------------------------


def decode(entry: dict[str, Any]) -> Event | None:
    if "next_step" in entry:
        return None
    if "abort" in entry:
        return Abort(entry["abort"])
    if "done" in entry:
        return StepDone(
            entry["done"], StepResult(tuple(RowResult(tuple(t), drafts=tuple(d)) for t, d in entry["rows"]))
        )
    if "transfer_done" in entry:
        return TransferDone(entry["transfer_done"])
    if "transfer_failed" in entry:
        return TransferFailed(entry["transfer_failed"], entry["why"])
    given = dict(entry["submit"])
    params = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.pop("params").items()})
    source = given.pop("kv_from", None)
    kv_from = None if source is None else KVSource(handle=source[0], num_tokens=source[1])
    return Submit(
        Request(**{**given, "prompt": tuple(given["prompt"])}, params=params, arrival=entry["at"], kv_from=kv_from)
    )


def make_core(data: dict[str, Any]) -> Core:
    scheduler, kv_cache = data["core"]["scheduler"], data["core"]["kv_cache"]
    return Core(
        TECHNIQUES[scheduler[0]](TECHNIQUES[scheduler[0]].Options(**scheduler[1])),
        TECHNIQUES[kv_cache[0]](TECHNIQUES[kv_cache[0]].Options(**kv_cache[1])),
        Limits(**data["core"]["limits"]),
    )


def replay(data: dict[str, Any], snapshot_at: int | None = None) -> Iterator[str]:
    """What the core says, one line per answer; at event `snapshot_at` it is replaced by a restored copy."""
    core = make_core(data)
    for index, entry in enumerate(data["events"]):
        if index == snapshot_at:
            snapshot = core.snapshot()
            for seq in core.sequences.values():  # the old one must not matter any more
                seq.computed, seq.output[:] = -1, []
            core = make_core(data)
            core.restore(snapshot)
        event = decode(entry)
        if event is None:
            action = core.next_step(entry["at"])
            yield action.to_json() if isinstance(action, StepPlan) else repr(action)
        else:
            core.receive(event, entry["at"])
        for output in core.outputs():
            yield repr(output)


def main(arguments: list[str]) -> None:
    if arguments == ["--write"]:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        FOLDER.mkdir(exist_ok=True)
        for name in SCENARIOS:
            text = json.dumps(record(name), indent=None, separators=(",", ":"))
            # One event or line of the log per line of the file, so that a change can be read in a diff.
            for mark in ('"events":[', '"log":['):
                text = text.replace(mark, mark + "\n")
            text = text.replace('},{"at"', '},\n{"at"').replace('",' + '"', '",\n"')
            (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        return
    for path in arguments:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        sys.stdout.writelines(line + "\n" for line in replay(data))


if __name__ == "__main__":
    main(sys.argv[1:])
