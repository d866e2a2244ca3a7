"""Recorded conversations as sessions of several turns: ShareGPT JSON.

    [{"id": "a", "conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}, ...]}, ...]

A turn is a question with its answer: the question's tokens are what the turn adds to the prompt, the answer's are the
length of the output (with answers of one's own: the model says something else, of that length). No chat template is
applied. Conversations have no times; they come by `rate` or `concurrency`.

Invariants
* A question without an answer is no turn, nor is what an answerer says before the first question; both are left out, as
  nothing was served there. A conversation without turns is left out.
* `num_requests` counts turns; the last session is cut where they are enough.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twinfer.core.errors import ConfigError
from twinfer.core.workload import Workload
from twinfer.core.workload_source import Draft, Setting
from twinfer.plugins.workload.prompts import encoded
from twinfer.plugins.workload.synthetic import PoissonArrivals
from twinfer.plugins.workload.traces import _nonempty, _reading

ASKERS, ANSWERERS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")


class ShareGPT(PoissonArrivals):
    name = "sharegpt"
    summary = "ShareGPT conversations: JSON list of conversations of human and gpt turns, replayed as sessions"
    reference = "the file format of the ShareGPT datasets; sessions as in their conversations"

    ignores = ("output_len", "input_len", "lengths", "spread", "shared_prefix", "num_prefixes")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        if workload.trace is None or not workload.trace.endswith(".json"):
            return False
        with _reading(workload) as path, path.open(encoding="utf-8-sig") as file:
            return file.read(4096).lstrip().startswith("[")

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        drafts: list[Draft] = []
        for number, turns in enumerate(self._conversations(workload)):
            for question, answer in turns[: workload.turns]:
                if len(drafts) == workload.num_requests:
                    break
                where = f"conversation {number + 1}"
                prompt = encoded(question, where, setting.first + len(drafts), workload, setting)
                output = len(encoded(answer, where, 0, workload, setting))
                drafts.append(Draft(prompt, output, session=f"c{number}"))
        return _nonempty(workload, drafts)

    def _conversations(self, workload: Workload) -> list[list[tuple[str, str]]]:
        with _reading(workload) as path:
            try:
                found = json.loads(path.read_text(encoding="utf-8-sig"))
            except (ValueError, RecursionError) as error:
                if isinstance(error, UnicodeDecodeError):
                    raise
                raise ConfigError("--trace", workload.trace, f"is not JSON ({error})", "repair the file") from None
        if not isinstance(found, list):
            raise ConfigError("--trace", workload.trace, "is no list of conversations", "give a ShareGPT file")
        kept = []
        for number, conversation in enumerate(found, 1):
            said = conversation.get("conversations") if isinstance(conversation, dict) else None
            if not isinstance(said, list):
                raise ConfigError(
                    "--trace", workload.trace, f"conversation {number} has no list 'conversations'",
                    'each needs {"conversations": [{"from": "human", "value": TEXT}, ...]}',
                )  # fmt: skip
            turns = _turns(said, number, workload)
            if turns:
                kept.append(turns)
        return kept


def _turns(said: list[Any], number: int, workload: Workload) -> list[tuple[str, str]]:
    """(question, answer) of a conversation; several messages of one side in a row are joined."""
    turns: list[tuple[str, str]] = []
    question = answer = ""
    for place, message in enumerate(said, 1):
        who = message.get("from", message.get("role")) if isinstance(message, dict) else None
        text = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if not isinstance(who, str) or not isinstance(text, str):
            raise ConfigError(
                "--trace", workload.trace, f"conversation {number}: message {place} has no 'from' or no 'value'",
                "repair that conversation",
            )  # fmt: skip
        if who in ASKERS or who == "system":
            if question and answer:
                turns.append((question, answer))
                question = ""
            answer = ""
            question = f"{question}\n{text}" if question else text
        elif who in ANSWERERS:
            answer += text
        else:
            raise ConfigError(
                "--trace", workload.trace, f"conversation {number}: message {place} is from {who!r}",
                f"known: system, {', '.join((*ASKERS, *ANSWERERS))}",
            )  # fmt: skip
    if question and answer:
        turns.append((question, answer))
    return turns


__all__ = ["ShareGPT"]
