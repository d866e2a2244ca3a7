"""Contract of workload plugins: where the requests of a `Workload` come from, and which plugin that is.

Invariants
* A source proposes (`Draft`); what is cut, scaled, repeated and timed is decided by `trace_rows.py` and `workload.py`.
* The workload names its source, or the first registered one that accepts it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
from twinfer.core.vision import Image

if TYPE_CHECKING:
    from twinfer.core.registry import Registry
    from twinfer.core.workload import Workload

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a workload plugin may depend on besides the workload.

    encode: text to token ids; None where no tokenizer is at hand (what-if runs without the model).
    first: number of the first request: sources that make prompts up number them from here.  loop: how often the trace
    has been read before.
    """

    vocab_size: int
    max_model_len: int
    encode: Encode | None = None
    eos_token_ids: tuple[int, ...] = ()
    first: int = 0
    loop: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A request as a plugin proposes it: `arrival` in s from any origin, None where it has no time.

    session: turns of one session have its name and come one after the other; only the first has a time, and `prompt` of
    the others is what they add.  think_s: seconds from the end of the turn before; None draws them (`think_time`).
    shared: tokens that it begins with and other prompts may, too.  images: those in `prompt`.
    """

    prompt: Sequence[int]
    output_len: int
    arrival: float | None = None
    temperature: float | None = None
    session: str | None = None
    think_s: float | None = None
    shared: int = 0
    images: tuple[Image, ...] = ()


class WorkloadSource(Protocol):
    """Contract of workload plugins (beside `Technique`'s attributes).

    A class may name in `ignores` the fields of `Workload` that mean nothing to it; the command line refuses them.
    Rows can be drawn at random from one with the methods `made_up(number, length, workload, setting)`, a prompt, and
    `chances(stream, workload)`, an iterator of numbers in [0, 1); the latter also times the turns of sessions.
    """

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        """Whether this source can serve `workload` when none was named (a look at its file is fine)."""
        ...

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        """The requests, in order of arrival when they have times. Raises ConfigError for a bad file."""
        ...

    def arrivals(self, workload: Workload, num: int) -> Sequence[float]:
        """`num` arrival times in s by the workload's rate, used where drafts have none or `rate` was given."""
        ...


def source_of(workload: Workload, registry: Registry | None = None) -> WorkloadSource:
    """The plugin that serves `workload`: the one it names, else the first that accepts it."""
    if registry is None:
        from twinfer.core.registry import default_registry

        registry = default_registry()
    if workload.source is not None:
        named: WorkloadSource = registry.build("workload", workload.source)
        return named
    for name in registry.names("workload"):
        if registry.get("workload", name).accepts(workload):
            found: WorkloadSource = registry.build("workload", Choice(name=name))
            return found
    if workload.trace is not None and not Path(workload.trace).is_file():
        problem = "is no regular file" if Path(workload.trace).exists() else "no such file"
        raise ConfigError("--trace", workload.trace, problem, "check the path")
    name = workload.trace or ""
    why = (
        ": it is empty"
        if name and not Path(name).stat().st_size
        else ": unpack it first"
        if name.endswith(".gz")
        else ""
    )
    raise ConfigError(
        "--trace", workload.trace, f"no workload plugin can read it{why}",
        f"give a file for one of: {', '.join(registry.names('workload'))}",
    )  # fmt: skip


__all__ = ["Draft", "Encode", "Setting", "WorkloadSource", "source_of"]
