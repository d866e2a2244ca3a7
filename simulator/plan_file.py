"""A search and its result, and the file that holds both.

The file is valid at any moment: it holds the question, every outcome so far, and the answer once there is one. To
resume is to ask the same question again with these outcomes known.

Invariants
* Outcomes are believed only beside the question that they were made for: a digest of both stands in the file.
* Equal questions give byte-identical files, whatever the number of processes and however often it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinfer.core.errors import ConfigError
from twinfer.core.replace_file import check_replaceable, replace_file
from twinfer.core.run_files import plain
from twinfer.simulator.plan_answer import Answer
from twinfer.simulator.plan_search import why_not
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_trial import ASSESS, Outcome, Trial, outcome_of, plain_trial, trial_of

SCHEMA = 3
_BEGIN = re.compile(r'\s*\{\s*"schema":\s*\d+,\s*"kind":\s*"plan"')


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
        question = self.question.plain()
        data: dict[str, Any] = plain({
            "schema": SCHEMA, "kind": "plan", "complete": self.complete, "digest": _digest(question, points), "question": question,
            "answer": None if self.answer is None else self.answer.plain(), "verdicts": self.verdicts, "points": points,
        })  # fmt: skip
        return data

    def write(self, path: Path) -> None:
        """Replace the file at `path`. Raises ConfigError."""
        try:
            replace_file(path, json.dumps(self.plain(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(
                "--out", str(path), f"cannot be written ({error.strerror})", "give another file"
            ) from None


def check_out(path: Path) -> None:
    """Raise ConfigError unless a plan may be written to `path`."""
    check_replaceable("--out", path, "a plan", lambda begin: _BEGIN.match(begin) is not None)


def _digest(question: Mapping[str, Any], points: Sequence[Any]) -> str:
    """Of all that a resumed search believes."""
    text = json.dumps(plain({"question": question, "points": points}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(path: str | Path) -> Plan:
    """The plan in a file: its question and what was found so far. Raises ConfigError for a file of another kind, or one
    that was changed: its outcomes would answer a question that was never asked."""
    path = Path(path)
    fix = "give a file that `twinfer plan` wrote"
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError("--resume", str(path), "is no regular file", fix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--resume", str(path), f"cannot be read ({error.strerror})", fix) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("--resume", str(path), f"is not a JSON file ({error})", fix) from None
    try:
        if found["kind"] != "plan" or found["schema"] != SCHEMA:
            raise KeyError("kind")
        if found["digest"] != _digest(found["question"], found["points"]):
            raise ConfigError(
                "--resume", str(path), "was changed after it was written", "ask its question anew, without --resume"
            )
        question = Question.from_plain(found["question"])
        if not isinstance(question.base["model"], str):
            raise TypeError("model")
        points = [(trial_of(p["trial"]), outcome_of(p["outcome"])) for p in found["points"]]
        known = {trial.key: (trial, outcome) for trial, outcome in points}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("--resume", str(path), f"holds no plan that this version can read ({error})", fix) from None
    return Plan(question=question, points=known)


__all__ = ["SCHEMA", "Plan", "check_out", "read_plan"]
