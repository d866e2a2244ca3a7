"""What the answer becomes when something is different: more traffic, less bandwidth, other promises, a lost replica.

Invariants
* The design stays; only the number of its replicas changes, and it keeps the promises in every draw of the traffic.
"""

from __future__ import annotations

from typing import Any

from twinfer.simulator.plan_answer import SLOW_END
from twinfer.simulator.plan_drive import Drive
from twinfer.simulator.plan_search import Z80, Found, Search, drawn, needed, why_not
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_trial import FLEET, Evaluator, Outcome, Trial


def cases_of(evaluator: Evaluator, best: Found) -> dict[str, Search[Any]]:
    """Searches for the replicas of the best design that are needed when something is different."""
    question = evaluator.question
    assert best.outcome is not None
    looser = tuple(g.scaled(1.2) for g in question.goals)
    tighter = tuple(g.scaled(0.8) for g in question.goals)
    width = 1 + Z80 * best.outcome.sigma
    return {
        "traffic +20 %" if question.workload.concurrency is None else "clients +20 %": needed(
            best, question, question.goals, evaluator, load=1.2
        ),
        "memory bandwidth -10 %": needed(best, question, question.goals, evaluator, bandwidth=0.9),
        "promises 20 % tighter": needed(best, question, tighter, evaluator),
        "promises 20 % looser": needed(best, question, looser, evaluator, easier=True),
        f"steps {100 * (width - 1):.0f} % slower ({SLOW_END})": needed(
            best, question, question.goals, evaluator, steps=width
        ),
    }


def changes_of(evaluator: Evaluator, drive: Drive, best: Found) -> list[dict[str, Any]]:
    """How many replicas of the best design are needed when something is different, and what one failure does."""
    question, design, n = evaluator.question, best.design, best.replicas
    assert design is not None and best.outcome is not None
    cases = cases_of(evaluator, best)
    answers = drive.run(cases)
    price = evaluator.devices[design.device].price_per_hour

    def row(case: str, replicas: int | None, text: str = "") -> dict[str, Any]:
        cost = None if price is None or replicas is None else price * design.num_devices * replicas
        return {"case": case, "replicas": replicas, "cost_per_hour": cost, "text": text}

    rows = [row(case, answers[case]) for case in cases if case in answers]
    if n > 1:
        lost = drive.run({"lost": losing_one(evaluator, best)})
        if "lost" in lost:
            words = _after_loss(lost["lost"][0], question)
            rows.append(row("one replica fails (N+1 to buy)", n + 1, f"without N+1: {words}"))
    else:
        rows.append(row("one replica fails (N+1 to buy)", 2, "without N+1: nothing is left to serve"))
    return rows


def _after_loss(outcome: Outcome, question: Question) -> str:
    words = why_not(outcome, question.goals, 1).removeprefix("with 1 replica ")
    return words or "the promises are kept all the same"


def losing_one(evaluator: Evaluator, best: Found) -> Search[list[Outcome]]:
    """What becomes of the promises with a replica less."""
    design, n = best.design, best.replicas - 1
    assert design is not None
    trial = Trial(design=design.index, replicas=n, level=FLEET)
    return (yield from drawn(trial, evaluator.looks(FLEET, design, n), evaluator.question.goals))


__all__ = ["cases_of", "changes_of", "losing_one"]
