"""`plan`: which devices, how many, laid out how, for this traffic at this SLO, for what money.

    question -> designs -> one search per device type (`plan_search`) -> trials (`plan_trial`) in a pool (`plan_pool`)
             -> the answer (`plan_answer`), and a file with every point

The file is valid at any moment: it holds the question, every outcome so far, and the answer once there is one. To
resume is to ask the same question again with these outcomes known.

Invariants
* Equal questions give byte-identical files, whatever the number of processes and however often it was stopped.
* Nothing is proposed that was not simulated as a whole fleet and kept every promise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry, default_registry
from twinfer.core.run_files import plain
from twinfer.simulator.plan_answer import Answer, Fleet, fleet_of, front_of, ranked, sentence_of
from twinfer.simulator.plan_pool import Pool, open_pool
from twinfer.simulator.plan_search import Z80, Found, Search, confirm_device, needed, screen_device, why_not
from twinfer.simulator.plan_space import Question, sorted_by_device
from twinfer.simulator.plan_trial import (
    ASSESS,
    FLEET,
    PROOF,
    Evaluator,
    Outcome,
    ShouldStop,
    Trial,
    outcome_of,
    plain_trial,
    trial_of,
)

SCHEMA = 1
WRITE_EVERY_S = 2.0

OnProgress = Callable[[int, int, dict[str, Any]], None]


@dataclass(slots=True)
class Plan:
    """A search and its result. `points`: every trial with its outcome. `complete` is False when it was stopped."""

    question: Question
    points: dict[str, tuple[Trial, Outcome]] = field(default_factory=dict)
    designs: list[str] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)
    answer: Answer | None = None
    complete: bool = False

    def plain(self) -> dict[str, Any]:
        """JSON data, points in the order of designs; `read_plan` gives the plan back."""
        goals = self.question.goals
        points = []
        for key in sorted(self.points):
            trial, outcome = self.points[key]
            why = outcome.problem if trial.level == ASSESS else why_not(outcome, goals, trial.replicas)
            points.append({
                "trial": plain_trial(trial), "design": self.designs[trial.design], "outcome": outcome.plain(),
                "rejected": why,
            })  # fmt: skip
        data: dict[str, Any] = plain({
            "schema": SCHEMA, "kind": "plan", "complete": self.complete, "question": self.question.plain(),
            "answer": None if self.answer is None else self.answer.plain(), "verdicts": self.verdicts, "points": points,
        })  # fmt: skip
        return data

    def write(self, path: Path) -> None:
        """Replace the file at `path` in one move."""
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.plain(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise ConfigError(
                "--out", str(path), f"cannot be written ({error.strerror})", "give another file"
            ) from None


def read_plan(path: str | Path) -> Plan:
    """The plan in a file: its question and what was found so far. Raises ConfigError for a file of another kind."""
    path = Path(path)
    fix = "give a file that `twinfer plan` wrote"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--resume", str(path), f"cannot be read ({error.strerror})", fix) from None
    except ValueError as error:
        raise ConfigError("--resume", str(path), f"is not a JSON file ({error})", fix) from None
    try:
        if found["kind"] != "plan" or found["schema"] != SCHEMA:
            raise KeyError("kind")
        question = Question.from_plain(found["question"])
        points = [(trial_of(p["trial"]), outcome_of(p["outcome"])) for p in found["points"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("--resume", str(path), f"holds no plan that this version can read ({error})", fix) from None
    return Plan(question=question, points={trial.key: (trial, outcome) for trial, outcome in points})


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
    many as there are cores.  ray: address of a cluster instead.  out: a file that always holds what is known.
    on_progress(done, all, info) counts stages of devices.  should_stop() is asked all the time; a stopped plan is
    valid and not `complete`.
    Raises ConfigError, ModelError or RequestError for a question that cannot be asked.
    """
    registry = registry or default_registry()
    if known is not None and known.question.plain() != question.plain():
        raise ConfigError("--resume", None, "the file answers another question", "ask the one that is in it")
    evaluator = Evaluator(question, registry)
    _check_traffic(evaluator)
    result = Plan(question, dict(known.points) if known is not None else {}, [d.key for d in evaluator.designs])
    with open_pool(evaluator, workers, ray, should_stop) as pool:
        drive = _Drive(evaluator, pool, result, out, on_progress or (lambda done, total, info: None), should_stop)
        try:
            _search(evaluator, drive, result)
        finally:
            if out is not None:
                result.write(out)
    return result


def _check_traffic(evaluator: Evaluator) -> None:
    question, demand = evaluator.question, evaluator.demand
    if demand.span <= 0:
        raise ConfigError(
            "--rate", question.workload.rate, "all requests arrive at once, so there is no rate to keep up with",
            "give --rate, or a trace with times",
        )  # fmt: skip
    for goal in question.goals:
        if goal.metric in ("tpot", "itl") and demand.longest_output < 2:
            raise ConfigError(
                "--slo", str(goal), f"answers of one token have no {goal.metric}", "promise ttft or e2e instead"
            )


def _search(evaluator: Evaluator, drive: _Drive, result: Plan) -> None:
    question = evaluator.question
    groups = sorted_by_device(evaluator.designs)
    screened = drive.run({name: screen_device(name, ds, question, evaluator.level) for name, ds in groups.items()})
    chosen = _cheapest(screened, evaluator)
    ended: dict[str, Found] = drive.run({n: confirm_device(screened[n], question, evaluator.level) for n in chosen})
    found = {name: ended.get(name, f) for name in groups if (f := screened.get(name)) is not None}  # in order
    for item in found.values():
        result.verdicts |= item.verdicts
    rate = evaluator.demand.rate
    fleets, proof = _proved(evaluator, drive, found)
    front = front_of(fleets, question.goals)
    fleets = [replace(fleet, on_front=i in front) for i, fleet in enumerate(fleets)]
    done = not drive.stopped
    none = {name: _why_none(f, name in ended or not f.screened, done) for name, f in found.items() if f.design is None}
    none |= dict.fromkeys((name for name in groups if name not in found), "not searched to the end")
    answer = Answer(sentence="", fleets=fleets, none=none)
    if proof is not None:
        values = ", ".join(f"{g.name} {v:.3g} s" for g in question.goals if (v := proof.values.get(g.name)) is not None)
        answer.notes.append(
            f"times are those of the busiest {len(evaluator.whole):,} requests; on all {len(evaluator.requests):,} the "
            f"cheapest fleet has {values}"
        )
    if fleets and done:
        answer.changed = _what_if(evaluator, drive, found[fleets[0].device])
        done = not drive.stopped
    unpriced = [f.device for f in fleets if f.cost_per_hour is None]
    if unpriced:
        answer.notes.append(
            f"no price is known for {', '.join(unpriced)}: ranked apart, by number of devices (--price DEVICE=USD)"
        )
    answer.sentence = sentence_of(fleets, question, rate, done)
    if done:  # a resumed file is then the one of a search that was never stopped
        result.points = {key: point for key, point in result.points.items() if key in drive.asked}
    result.answer, result.complete = answer, done


def _proved(evaluator: Evaluator, drive: _Drive, found: dict[str, Found]) -> tuple[list[Fleet], Outcome | None]:
    """The fleets found, best first; the best one keeps its promises on all of the traffic, as its outcome there says.

    One that does not is searched again with more replicas, until the best one does; None when all traffic was used.
    """
    question, rate = evaluator.question, evaluator.demand.rate
    while True:
        good = {name: f for name, f in found.items() if f.design is not None}
        fleets = ranked(fleet_of(f, question, evaluator.devices[name], rate) for name, f in good.items())
        if not fleets:
            return fleets, None
        best = found[fleets[0].device]
        assert best.design is not None
        level = evaluator.level(PROOF, best.replicas)
        if level == FLEET:
            return fleets, None
        proving = {"proof": _one(Trial(design=best.design.index, replicas=best.replicas, level=level))}
        told = drive.run({**_cases(evaluator, best), **proving})  # side by side: what is found is remembered
        proof: Outcome | None = told.get("proof")
        if proof is None or proof.keeps(question.goals):
            return fleets, proof
        again = drive.run({best.device: confirm_device(best, question, evaluator.level)})
        if not again:  # stopped
            return fleets[1:], None


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
            "not confirmed (--top confirms more device types)"
            if done
            else "the search was stopped before more was known"
        )
        return f"about {number} device{'s' * (number > 1)} ({best.design.key}) would do at a first look; {why}"
    reasons = [(key, why) for key, why in found.verdicts.items() if why]
    simulated = [r for r in reasons if r[1].startswith("with ")]
    key, why = (simulated or reasons)[-1]
    return f"{key}: {why}"


def _cases(evaluator: Evaluator, best: Found) -> dict[str, Search[Any]]:
    """Searches for the replicas of the best design that are needed when something is different."""
    question, design, n = evaluator.question, best.design, best.replicas
    assert design is not None and best.outcome is not None
    looser = tuple(g.scaled(1.2) for g in question.goals)
    tighter = tuple(g.scaled(0.8) for g in question.goals)
    width = 1 + Z80 * best.outcome.sigma
    return {
        "traffic +20 %": needed(design, n, question, question.goals, load=1.2),
        "memory bandwidth -10 %": needed(design, n, question, question.goals, bandwidth=0.9),
        "promises 20 % tighter": needed(design, n, question, tighter),
        "promises 20 % looser": needed(design, n, question, looser),
        f"steps {100 * (width - 1):.0f} % slower (end of the 80 % band)": needed(
            design, n, question, question.goals, steps=width
        ),
    }


def _what_if(evaluator: Evaluator, drive: _Drive, best: Found) -> list[dict[str, Any]]:
    """How many replicas of the best design are needed when something is different, and what one failure does."""
    question, design, n = evaluator.question, best.design, best.replicas
    assert design is not None and best.outcome is not None
    cases = _cases(evaluator, best)
    answers = drive.run(cases)
    price = evaluator.devices[design.device].price_per_hour

    def row(case: str, replicas: int | None, text: str = "") -> dict[str, Any]:
        cost = None if price is None or replicas is None else price * design.num_devices * replicas
        return {"case": case, "replicas": replicas, "cost_per_hour": cost, "text": text}

    rows = [row(case, answers[case]) for case in cases if case in answers]
    if n > 1:
        lost = drive.run({"lost": _one(Trial(design=design.index, replicas=n - 1, level=FLEET))})
        if "lost" in lost:
            rows.append(
                row("one replica fails (N+1 to buy)", n + 1, f"without N+1: {_after_loss(lost['lost'], question)}")
            )
    else:
        rows.append(row("one replica fails (N+1 to buy)", 2, "without N+1: nothing is left to serve"))
    return rows


def _after_loss(outcome: Outcome, question: Question) -> str:
    words = why_not(outcome, question.goals, 1).removeprefix("with 1 replicas ")
    return words or "the promises are kept all the same"


def _one(trial: Trial) -> Search[Outcome]:
    (outcome,) = yield [trial]
    return outcome


class _Drive:
    """Runs searches side by side: hands their trials to the pool, each once, and their outcomes back."""

    def __init__(
        self, evaluator: Evaluator, pool: Pool, result: Plan, out: Path | None, on_progress: OnProgress,
        should_stop: ShouldStop | None,
    ) -> None:  # fmt: skip
        self._pool, self._result, self._out = pool, result, out
        self._on_progress, self._should_stop = on_progress, should_stop
        self._known = {key: outcome for key, (_, outcome) in result.points.items()}
        self.asked: set[str] = set()
        self._passed: set[tuple[str, str]] = set()  # (search, stage)
        num = len({d.device for d in evaluator.designs})
        self._total = 2 * num + 2 * min(num, evaluator.question.top) + 1
        self._ended = 0
        self._wrote = time.monotonic()
        self._best = ""
        self.stopped = False

    def run(self, searches: Mapping[str, Search[Any]]) -> dict[str, Any]:
        """The results of those searches that came to their end."""
        results: dict[str, Any] = {}
        wants: dict[str, list[Trial]] = {}
        queue: list[Trial] = []
        running: set[str] = set()

        def advance(name: str, outcomes: list[Outcome] | None) -> None:
            """Let a search go on until it wants what is not known yet."""
            search = searches[name]
            while True:
                try:
                    trials = next(search) if outcomes is None else search.send(outcomes)
                except StopIteration as end:
                    results[name] = end.value
                    self._tell(name, None, end.value)
                    return
                self._tell(name, trials[0], None)
                missing = [t for t in trials if t.key not in self._known]
                self.asked |= {t.key for t in trials}
                if missing:
                    wants[name] = trials
                    waiting = {t.key for t in queue} | running
                    queue.extend(t for t in missing if t.key not in waiting)
                    return
                outcomes = [self._known[t.key] for t in trials]

        for name in searches:
            advance(name, None)
        while wants and not self._stop():
            while queue and self._pool.room > 0:
                trial = queue.pop(0)
                running.add(trial.key)
                self._pool.submit(trial)
            for trial, outcome in self._pool.collect():
                running.discard(trial.key)
                self._known[trial.key] = outcome
                self._result.points[trial.key] = (trial, outcome)
            for name in [n for n, trials in wants.items() if all(t.key in self._known for t in trials)]:
                advance(name, [self._known[t.key] for t in wants.pop(name)])
            self._write()
        return results

    def _stop(self) -> bool:
        self.stopped = self.stopped or (self._should_stop is not None and self._should_stop())
        return self.stopped

    def _tell(self, name: str, trial: Trial | None, value: Any) -> None:
        if isinstance(value, Found):
            self._ended += 1
            if value.design is not None:
                self._best = f"{value.replicas * value.design.num_devices} {value.device} will do"
        if trial is not None and trial.level != ASSESS:
            self._passed.add((name, "confirmed" if trial.steps != 1 or trial.load != 1 else "assessed"))
        done = len(self._passed) + self._ended
        self._on_progress(
            min(done, self._total), self._total, {"points": len(self._result.points), "found": self._best}
        )

    def _write(self) -> None:
        if self._out is not None and time.monotonic() - self._wrote >= WRITE_EVERY_S:
            self._result.write(self._out)
            self._wrote = time.monotonic()


__all__ = ["Plan", "plan", "read_plan"]
