"""`plan`: which devices, how many, laid out how, for this traffic at this SLO, for what money.

    question -> designs -> one search per device type (`plan_search`) -> trials (`plan_trial`) in a pool (`plan_pool`)
             -> the answer (`plan_answer`), and a file with every point

The file is valid at any moment (`plan_file.py`). To resume is to ask the same question again with its outcomes known.

Invariants
* Equal questions give byte-identical files, whatever the number of processes and however often it was stopped.
* Nothing is proposed that was not simulated as a whole fleet and kept every promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry, default_registry
from twinfer.simulator.op_time import build_chain, host_words
from twinfer.simulator.plan_answer import Answer, Fleet, fleet_of, front_of, price_rank, ranked, sentence_of
from twinfer.simulator.plan_bound import demand_of
from twinfer.simulator.plan_changes import cases_of, changes_of
from twinfer.simulator.plan_command import command_of
from twinfer.simulator.plan_designs import sorted_by_device
from twinfer.simulator.plan_drive import Drive, OnProgress
from twinfer.simulator.plan_edge import Search
from twinfer.simulator.plan_file import Plan, check_out, read_plan
from twinfer.simulator.plan_neighbours import cheaper_fleets
from twinfer.simulator.plan_pool import open_pool
from twinfer.simulator.plan_search import Found, confirm_device, drawn, finish_device, screen_device
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_trial import FLEET, PROOF, Evaluator, Outcome, ShouldStop, Trial


def plan(
    question: Question,
    registry: Registry | None = None,
    *,
    known: Plan | None = None,
    workers: int | None = 1,
    ray: str | None = None,
    out: Path | None = None,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
) -> Plan:
    """Search for the cheapest fleet of every device type that keeps the promises of `question`.

    known: an earlier plan of the same question, whose outcomes are used.  workers: processes; 1 is this one, None as
    many as there are cores.  ray: address of a cluster instead.  out: a file that always holds what is known; it is new or an earlier plan.
    on_progress(done, all, info) counts stages of devices.  should_stop() is asked all the time; a stopped plan is
    valid and not `complete`.
    Raises ConfigError, ModelError or RequestError for a question that cannot be asked.
    """
    registry = registry or default_registry()
    if out is not None:
        check_out(out)
    if known is not None and known.question.plain() != question.plain():
        raise ConfigError("--resume", None, "the file answers another question", "ask the one that is in it")
    evaluator = Evaluator(question, registry)
    _check_traffic(evaluator)
    _check_designs(evaluator)
    result = Plan(question, dict(known.points) if known is not None else {}, [d.key for d in evaluator.designs])
    with open_pool(evaluator, workers, ray, should_stop) as pool:
        drive = Drive(evaluator, pool, result, out, on_progress or (lambda done, total, info: None), should_stop)
        try:
            _search(evaluator, drive, result)
        finally:
            if out is not None:
                result.write(out)
    return result


def _check_designs(evaluator: Evaluator) -> None:
    """Where every design is a mistake, so is the question: raise that of the first."""
    first = evaluator.mistake(evaluator.designs[0])
    if first is not None and all(evaluator.mistake(design) is not None for design in evaluator.designs[1:]):
        raise first


def _check_traffic(evaluator: Evaluator) -> None:
    question, demand = evaluator.question, evaluator.demand
    if evaluator.traffic.sessions and demand.num > 1 and demand.turns == demand.num:
        raise ConfigError(
            "--requests", demand.num, "all of them are turns of one session, so there is no rate to keep up with",
            f"give more than {demand.num}, or fewer --turns",
        )  # fmt: skip
    if evaluator.traffic.clients is None and demand.span <= 0:
        raise ConfigError(
            "--rate", question.workload.rate, "all requests arrive at once, so there is no rate to keep up with",
            "give --rate, or a trace with times",
        )  # fmt: skip
    for goal in question.goals:
        if goal.metric in ("tpot", "itl") and demand.longest_output < 2:
            raise ConfigError(
                "--slo", str(goal), f"answers of one token have no {goal.metric}", "promise ttft or e2e instead"
            )


def _search(evaluator: Evaluator, drive: Drive, result: Plan) -> None:
    question = evaluator.question
    groups = sorted_by_device(evaluator.designs)
    screened = drive.run({name: screen_device(name, ds, question, evaluator) for name, ds in groups.items()})
    chosen = _cheapest(screened, evaluator)
    ended: dict[str, Found] = drive.run({n: confirm_device(screened[n], question, evaluator) for n in chosen})
    found = {name: ended.get(name, f) for name in groups if (f := screened.get(name)) is not None}  # in order
    rate = evaluator.demand.rate
    fleets, proof = _proved(evaluator, drive, found)
    for item in found.values():
        result.verdicts |= item.verdicts
    front = front_of(fleets, question.goals)
    fleets = [replace(fleet, on_front=i in front) for i, fleet in enumerate(fleets)]
    done = not drive.stopped
    none = {name: _why_none(f, name in ended or not f.screened, done) for name, f in found.items() if f.design is None}
    none |= dict.fromkeys((name for name in groups if name not in found), "not searched to the end")
    answer = Answer(sentence="", fleets=fleets, none=none)
    if proof is not None:
        values = ", ".join(f"{g.name} {v:.3g} s" for g in question.goals if (v := proof.values.get(g.name)) is not None)
        answer.notes.append(
            f"times are those of the busiest {_seen(found[fleets[0].device]):,} requests; on all {len(evaluator.requests):,} the "
            f"cheapest fleet has {values}"
        )
    if fleets and done:
        best = found[fleets[0].device]
        answer.changed = changes_of(evaluator, drive, best)
        done = not drive.stopped
        known = [point for key, point in sorted(result.points.items()) if key in drive.asked]
        answer.cheaper = cheaper_fleets(best, found, evaluator.designs, evaluator.devices, known, question.goals)
    if fleets and (words := _host_words(fleets[0], evaluator)):
        answer.notes.append(words)
    unpriced = [f.device for f in fleets if f.cost_per_hour is None]
    if unpriced:
        answer.notes.append(
            f"no price is known for {', '.join(unpriced)}: ranked apart, by number of devices (--price DEVICE=USD)"
        )
    answer.sentence = sentence_of(fleets, question, rate, done, answer.changed)
    if done:  # a resumed file is then the one of a search that was never stopped
        result.points = {key: point for key, point in result.points.items() if key in drive.asked}
    result.answer, result.complete = answer, done


def _host_words(fleet: Fleet, evaluator: Evaluator) -> str:
    config, device = EngineConfig.model_validate(fleet.config), evaluator.devices[fleet.device]
    return host_words(config, device, build_chain(config.op_time, device, evaluator.registry))


def _seen(found: Found) -> int:
    """Requests that a fleet was confirmed with."""
    return found.outcome.num_requests if found.outcome is not None else 0


def _proved(evaluator: Evaluator, drive: Drive, found: dict[str, Found]) -> tuple[list[Fleet], Outcome | None]:
    """The fleets found, best first; the best one keeps its promises on all of the traffic, as its outcome there says.

    One that does not is searched again with more replicas, until the best one does; None when all traffic was used. What is
    said of the answer (goodput, band) is said of its whole fleet, of the others by some of their replicas.
    """
    question, demand = evaluator.question, evaluator.demand
    part = demand_of(evaluator.traffic.part(0))

    def told_of(searched: Iterable[Found]) -> list[Fleet]:
        return ranked(
            replace(
                fleet_of(f, question, evaluator.devices[f.device], demand, part),
                command=command_of(f, question, evaluator.traffic),
            )
            for f in searched
        )

    def finish(searched: Iterable[Found]) -> dict[str, Search[Any]]:
        return {f.device: finish_device(f, question, evaluator) for f in searched if not f.loads}

    while True:
        good = [f for f in found.values() if f.design is not None]
        fleets = told_of(good)
        if not fleets:
            return fleets, None
        if len(fleets) > 1 and price_rank(fleets[0]) == price_rank(fleets[1]):  # the one with the most room comes first
            drive.run(finish(found[f.device] for f in fleets if price_rank(f) == price_rank(fleets[0])))
            fleets = told_of(good)
        best = found[fleets[0].device]
        assert best.design is not None
        level = evaluator.level(PROOF, best.replicas)
        trial = Trial(design=best.design.index, replicas=best.replicas, level=level)
        proving = drawn(trial, evaluator.looks(level, best.design, best.replicas), question.goals)
        others = [f for f in good if f is not best]
        told = drive.run({  # side by side, what takes longest first: what is found is remembered
            **({} if level == FLEET else {"proof": proving}), best.device: finish_device(best, question, evaluator, whole=True),
            **finish(others), **cases_of(evaluator, best),
        })  # fmt: skip
        proof: Outcome | None = told.get("proof", [None])[0]
        if proof is None or proof.keeps(question.goals):
            return told_of([best]) + told_of(others), proof
        again = drive.run({best.device: confirm_device(best, question, evaluator)})
        if not again:  # stopped
            return told_of(others), None


def _cheapest(screened: Mapping[str, Found], evaluator: Evaluator) -> list[str]:
    """The device types worth confirming: those with a price first, cheapest first; at most `top`."""

    def cost(name: str) -> tuple[bool, float, str]:
        best, price = screened[name].screened[0], evaluator.devices[name].price_per_hour
        devices = best.replicas * best.design.num_devices
        return (price is None, devices * (price if price is not None else 1.0), name)

    return sorted((name for name, f in screened.items() if f.screened), key=cost)[: evaluator.question.top]


def _why_none(found: Found, ended: bool, done: bool) -> str:
    """Why there is no fleet of the device: of a design that came far enough to be simulated, else of the last one."""
    if not ended:
        best = found.screened[0]
        number = best.replicas * best.design.num_devices
        why = (
            "it was not confirmed, cheaper ones were (--top confirms more device types)"
            if done
            else "the search was stopped before it was confirmed"
        )
        return f"about {number} device{'s' * (number > 1)} ({best.design.key}) may do, by a first look alone; {why}"
    reasons = [(key, why) for key, why in found.verdicts.items() if why]
    simulated = [r for r in reasons if r[1].startswith("with ")]
    key, why = (simulated or reasons)[-1]
    return f"{key}: {why}"


__all__ = ["Plan", "plan", "read_plan"]
