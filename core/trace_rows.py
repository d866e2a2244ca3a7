"""What becomes of the rows of a trace: a part of them, scaled, repeated, put together into sessions.

Invariants
* Nothing is dropped but what `trace_start`, `trace_end` and `num_requests` leave out; sessions stay whole.
* Repeated rows get new prompts, so that a loop is no cache hit; what rows of one round share, they share in every round.
* Chance is the source's (`chances`); none is made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from twinfer.core.errors import ConfigError
from twinfer.core.session import History
from twinfer.core.workload import MAX_TOKENS, Workload
from twinfer.core.workload_source import CheckedSource, Draft, Setting


def drafts_of(source: CheckedSource, workload: Workload, setting: Setting) -> list[Draft]:
    """The requests that `source` proposes, cut, scaled and repeated as `workload` says."""
    asked = workload.num_requests
    sliced = workload.trace_start > 0 or workload.trace_end is not None
    whole = workload.model_copy(update={"num_requests": None}) if sliced or workload.repeat != "none" else workload
    rows = _scaled(_slice(source.drafts(whole, setting), workload), workload)
    if asked is None or len(rows) >= asked:
        return rows if workload.repeat != "sample" else _sampled(source, rows, workload, setting)
    if workload.trace is None:
        return rows
    if workload.repeat == "none":
        raise ConfigError(
            "--requests", asked, f"{workload.trace} has {len(rows)}" + (" in that time" if sliced else ""),
            f"ask for at most {len(rows)}, or give --repeat loop or sample",
        )  # fmt: skip
    if workload.repeat == "sample":
        return _sampled(source, rows, workload, setting)
    return _looped(source, rows, whole, workload, setting)


def _slice(rows: list[Draft], workload: Workload) -> list[Draft]:
    if workload.trace_start <= 0 and workload.trace_end is None:
        return rows
    times = [row.arrival for row in rows if row.arrival is not None]
    begin, end = workload.trace_start, workload.trace_end
    if not times or any(row.arrival is None and row.session is None for row in rows):
        option, value = ("--trace-start", begin) if begin else ("--trace-end", end)
        raise ConfigError(option, value, f"the requests of {workload.trace} have no times", "leave it out")
    origin = min(times)
    kept: list[Draft] = []
    inside: dict[str, bool] = {}  # sessions go by their first turn
    for row in rows:
        if row.arrival is None:
            keep = inside.get(row.session or "", False)
        else:
            when = row.arrival - origin
            keep = begin <= when and (end is None or when < end)
            if row.session is not None:
                inside[row.session] = keep
        if keep:
            kept.append(row)
    if not kept:
        raise ConfigError(
            "--trace-start", begin, f"no request of {workload.trace} comes then",
            f"its requests come in {max(times) - origin:.6g} s",
        )  # fmt: skip
    asked = workload.num_requests
    return kept if asked is None or workload.repeat != "none" else kept[:asked]


def _scaled(rows: list[Draft], workload: Workload) -> list[Draft]:
    if workload.input_scale == 1 and workload.output_scale == 1:
        return rows
    scaled = []
    for row in rows:
        length = min(MAX_TOKENS, max(1, round(len(row.prompt) * workload.input_scale)))
        output = min(MAX_TOKENS, max(1, round(row.output_len * workload.output_scale)))
        shared = min(length, round(row.shared * workload.input_scale))
        scaled.append(replace(row, prompt=_resized(row.prompt, length), output_len=output, shared=shared))
    return scaled


def _resized(prompt: Sequence[int], length: int) -> Sequence[int]:
    """The first `length` tokens of `prompt`, which is repeated where it is shorter."""
    if length <= len(prompt):
        return prompt[:length]
    rounds, rest = divmod(length, len(prompt))
    return History(*[prompt] * rounds, prompt[:rest])


def _sampled(source: CheckedSource, rows: list[Draft], workload: Workload, setting: Setting) -> list[Draft]:
    """Lengths of rows drawn at random, with prompts that are made up."""
    make = source.made_up
    if make is None or any(row.session is not None for row in rows):
        why = "its rows are turns of sessions" if make is not None else "its source makes no prompts up"
        raise ConfigError("--repeat", "sample", f"{workload.trace} cannot be drawn from: {why}", "use --repeat loop")
    chances = chances_of(source, "rows", workload)
    drawn = []
    for number in range(workload.num_requests or len(rows)):
        row = rows[int(next(chances) * len(rows))]
        prompt = make(number, len(row.prompt), workload, setting)
        drawn.append(Draft(prompt, row.output_len, None, row.temperature))
    return drawn


def _looped(
    source: CheckedSource, rows: list[Draft], whole: Workload, workload: Workload, setting: Setting
) -> list[Draft]:
    """`rows` over and over, with new prompts; the gap between two rounds is the mean gap of the trace."""
    asked = workload.num_requests or 0
    times = [row.arrival for row in rows if row.arrival is not None]
    span = max(times) - min(times) if times else 0.0
    period = span * len(times) / (len(times) - 1) if len(times) > 1 else 0.0
    found = list(rows)
    number = setting.first
    loop = 0
    while len(found) < asked:
        loop += 1
        number += len(rows)
        again = replace(setting, first=number, loop=loop)
        fresh = _scaled(_slice(source.drafts(whole, again), workload), workload)
        for row in fresh[: asked - len(found)]:
            arrival = None if row.arrival is None else row.arrival + loop * period
            session = None if row.session is None else f"{row.session}/{loop}"
            found.append(replace(row, arrival=arrival, session=session))
    return found


def chances_of(source: CheckedSource, stream: str, workload: Workload) -> Iterator[float]:
    """The source's random numbers in [0, 1); ConfigError for a source that has none."""
    if source.chances is None:
        raise ConfigError(
            "--workload", source.name, "has no `chances` to draw from",
            "leave --repeat sample and --think-time out",
        )  # fmt: skip
    return source.chances(stream, workload)


def sessions_of(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Requests alone, and the turns of each session, in the order of the first ones."""
    found: list[list[Draft]] = []
    named: dict[str, list[Draft]] = {}
    for draft in drafts:
        turns = named.get(draft.session) if draft.session is not None else None
        if turns is not None:
            turns.append(draft)
            continue
        found.append([draft])
        if draft.session is not None:
            named[draft.session] = found[-1]
    return found


__all__ = ["chances_of", "drafts_of", "sessions_of"]
