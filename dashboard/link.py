"""What a link says: the scenario and what is looked at, with one message for each parameter that cannot be used.

Invariants
* The rest of a link works, whatever is wrong with a parameter; none is dropped without a message.
* What is looked at is checked here, where it comes from a link; whether such a run exists is for its page to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from twinfer.core.errors import short
from twinfer.dashboard.quantities import CHARTED
from twinfer.dashboard.roofline_view import LARGEST_BATCH
from twinfer.dashboard.scenario import VERSION, Scenario

MOST = 12  # messages about one link
_SAFE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_ID = "is no id; take it from the list on the page"


def _is_id(text: str) -> bool:
    return len(text) <= 128 and set(text) <= _SAFE


def _is_batch(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= LARGEST_BATCH


VIEW: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "job": (_is_id, _ID), "real": (_is_id, _ID), "predicted": (_is_id, _ID),
    "metric": (lambda text: text in CHARTED, f"is none of its values; give {', '.join(CHARTED)}"),
    "axis": (lambda text: text in ("step", "time"), "is none of its values; give time or step"),
    "batch": (_is_batch, f"is no number of rows; give a whole number from 1 to {LARGEST_BATCH}"),
}  # fmt: skip
"""Query parameters that say what is looked at: what each may be, and the message where it is something else."""


def read(url: Mapping[str, Sequence[str]]) -> tuple[Scenario, dict[str, str], list[str]]:
    """The scenario and the view of a URL, whose parameters may have several values, and what could not be used of it."""
    problems = []
    last = {name: values[-1] for name, values in url.items() if values}
    for name, values in url.items():
        if len(values) > 1 and _known(name):
            problems.append(f"{name} is given {len(values)} times in the link: the last one is taken; give it once")
    if last.get("v", VERSION) != VERSION:
        problems.append(f"v={short(last['v'])} in the link: its version is not {VERSION}, check what it says")
    found, wrong = Scenario.from_params(last)
    problems += wrong
    looked_at = {}
    for name, (fits, words) in VIEW.items():
        if fits(last.get(name, "")) and last.get(name):
            looked_at[name] = last[name]
        elif name in last:
            problems.append(f"{name}={short(last[name])} in the link was ignored: {words}")
    for name in last:
        if not _known(name):
            close = get_close_matches(name, [*Scenario.model_fields, *VIEW], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            problems.append(f"{short(name)} in the link was ignored: there is no such parameter; {hint}")
    if len(problems) > MOST:
        problems = [*problems[: MOST - 1], f"... and {len(problems) - MOST + 1} more parameters of the link"]
    return found, looked_at, problems


def _known(name: str) -> bool:
    return name in Scenario.model_fields or name in VIEW or name == "v"


__all__ = ["VIEW", "read"]
