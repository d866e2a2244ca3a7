"""How a plan looks on a terminal.

Invariants
* What is not known says so; a fleet without a price has none, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinfer.cli import show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twinfer.core.goal import Goal
    from twinfer.simulator.plan_answer import Fleet
    from twinfer.simulator.plan_file import Plan

_FAR = "; far above: so slow that the trial was not run to its end, or not all was served"


def print_plan(found: Plan, path: Path) -> None:
    goals, answer = found.question.goals, found.answer
    if answer is not None:
        print(answer.sentence + "\n")
        if answer.fleets:
            show.print_table(_fleets_table(answer.fleets))
            show.print_table(_promises_table(answer.fleets, goals))
            if answer.fleets[0].command:
                print(f"the run behind its times: {answer.fleets[0].command}\n")
        if answer.changed:
            table = show.new_table("if something is different (the design stays)", "", "replicas", "US$/h", "")
            table.columns[3].justify = "left"
            for row in answer.changed:
                table.add_row(
                    row["case"], "none of those allowed" if row["replicas"] is None else str(row["replicas"]),
                    money(row["cost_per_hour"]), row["text"],
                )  # fmt: skip
            show.print_table(table)
        if answer.cheaper:
            table = show.new_table("why nothing cheaper will do: the most replicas that cost less", "", "US$/h", "")
            table.columns[2].justify = "left"
            for row in answer.cheaper:
                table.add_row(row["fleet"], money(row["cost_per_hour"]), row["why"])
            show.print_table(table)
        for device, why in answer.none.items():
            print(f"{device} is in no table: {why}")
        for source in dict.fromkeys(f"{f.device}: {f.price_source}" for f in answer.fleets if f.price_source):
            print(f"price of {source}")
        for text in answer.notes:
            print(f"note: {text}")
    state = "" if found.complete else f", stopped early: `twinfer plan --resume {path}` goes on"
    print(f"{len(found.points)} points in {path}{state}")


def money(value: float | None) -> str:
    return "no price" if value is None else f"{value:,.2f}"


def _fleets_table(fleets: Sequence[Fleet]) -> Any:
    table = show.new_table(
        "cheapest fleet of every device (* no other is better in cost, goodput and every promise); kW and J/tok at its busiest",
        "", "devices", "US$/h", "US$/1M tok", "goodput", "in use", "kW of all", "J/tok", "next limit",
    )  # fmt: skip
    table.columns[8].justify = "left"
    for fleet in fleets:
        table.add_row(
            f"{'*' if fleet.on_front else ' '} {fleet.label}", str(fleet.num_devices), money(fleet.cost_per_hour),
            money(fleet.cost_per_million), _goodput(fleet), show.percent(1 / (1 + fleet.headroom)),
            "not known" if fleet.watts is None else show.number(fleet.watts / 1e3),
            "not known" if fleet.joules_per_token is None else show.number(fleet.joules_per_token), _limit(fleet),
        )  # fmt: skip
    return table


def _limit(fleet: Fleet) -> str:
    """The promise that breaks and what its requests wait for, without the explanation: `TTFT p95: compute`."""
    return fleet.next_limit.partition(",")[0].replace("queueing on ", "")


def _goodput(fleet: Fleet) -> str:
    """The least of all looks, and the most where that is more."""
    least, most = (show.number(value) for value in fleet.goodput_spread)
    words = f"{least} /s" if least == most else f"{least} to {most} /s"
    return words if fleet.clients is None else f"{fleet.clients} clients, {words}"


def _promises_table(fleets: Sequence[Fleet], goals: Sequence[Goal]) -> Any:
    names = list(dict.fromkeys([*(g.name for g in goals), "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99"]))
    promised = {g.name: f" <= {show.seconds(g.limit)}" for g in goals}
    table = show.new_table(_times_title(fleets), "", *(show.title(n) + promised.get(n, "") for n in names), "in time")
    for fleet in fleets:
        cells = [f"{_seconds(fleet.values.get(n))}{_band(fleet, n)}" for n in names]
        table.add_row(fleet.label, *cells, show.percent(fleet.attained))
    return table


def _times_title(fleets: Sequence[Fleet]) -> str:
    seeds = max(fleet.seeds for fleet in fleets)
    draws = f", the worst of {seeds} draws of it" if seeds > 1 else ""
    far = any(high is None for fleet in fleets for _, high in fleet.band.values())
    return f"times at this traffic (80 % band{_FAR if far else ''}){draws}"


def _seconds(value: float | None) -> str:
    return "not served" if value is None else show.seconds(value)


def _band(fleet: Fleet, name: str) -> str:
    if name not in fleet.band:
        return ""
    low, high = fleet.band[name]
    return f" ({_seconds(low)} to {'far above' if high is None else show.seconds(high)})"


__all__ = ["money", "print_plan"]
