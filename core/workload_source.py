"""Contract of workload plugins: where the requests of a `Workload` come from, and which plugin that is.

Invariants
* A source proposes (`Draft`); what is cut, scaled, repeated and timed is decided by `trace_rows.py` and `workload.py`.
* The workload names its source, or the first registered one that accepts it is taken.
* What a source raises, or answers that cannot be used, is a PluginError that names it (`CheckedSource`). Of a prompt the
  first token is looked at: most prompts are made when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError, PluginError
from twinfer.core.guard import Blaming, is_amount, unusable
from twinfer.core.params import is_finite
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


class CheckedSource:
    """`own`, a `WorkloadSource`, held to its contract.

    made_up, chances: None where it has no such method.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self.name: str = getattr(own, "name", type(own).__name__)
        with self._blaming("ignores"):
            ignores = getattr(own, "ignores", ())
        if not isinstance(ignores, tuple | list) or not {*map(type, ignores)} <= {str}:
            raise self._unusable("ignores", ignores, "names of fields of Workload, as a tuple")
        self.ignores: Sequence[str] = ignores
        self.made_up = self._made_up if hasattr(own, "made_up") else None
        self.chances = self._chances if hasattr(own, "chances") else None

    def drafts(self, workload: Workload, setting: Setting) -> list[Draft]:
        """At least one."""
        drafts: list[Draft] = self._listed("drafts", "a list of Draft, at least one", workload, setting)
        if not drafts:
            raise self._unusable("drafts", drafts, "at least one Draft")
        with self._blaming("drafts"):
            for draft in drafts:
                mistake = _mistake(draft)
                if mistake is not None:
                    raise self._unusable("drafts", *mistake)
        return drafts

    def arrivals(self, workload: Workload, num: int) -> list[float]:
        wanted = f"{num} times in s, from 0"
        times: list[float] = self._listed("arrivals", wanted, workload, num)
        if len(times) != num or not all(map(is_amount, times)):
            raise self._unusable("arrivals", times, wanted)
        return times

    def _made_up(self, number: int, length: int, workload: Workload, setting: Setting) -> Sequence[int]:
        with self._blaming("made_up"):
            prompt: Sequence[int] = self._own.made_up(number, length, workload, setting)
            fits = _is_prompt(prompt) and len(prompt) == length
        if not fits:
            raise self._unusable("made_up", prompt, f"{length} token ids")
        return prompt

    def _chances(self, stream: str, workload: Workload) -> Iterator[float]:
        wanted = "numbers in [0, 1) without end"
        chance: Any = None
        with self._blaming("chances"):
            for chance in self._own.chances(stream, workload):
                if not is_amount(chance) or chance >= 1:
                    break
                yield chance
        raise self._unusable("chances", chance, wanted)

    def _listed(self, method: str, wanted: str, *given: object) -> list[Any]:
        with self._blaming(method):
            answer = getattr(self._own, method)(*given)
            listed = list(answer) if isinstance(answer, Iterable) else None
        if listed is None:
            raise self._unusable(method, answer, wanted)
        return listed

    def _blaming(self, method: str) -> Blaming:
        return Blaming("workload", self._own, method)

    def _unusable(self, method: str, answer: object, wanted: str) -> PluginError:
        return unusable("workload", self._own, method, answer, wanted)


def _mistake(draft: Draft) -> tuple[object, str] | None:
    """What of `draft` cannot be used, and what belongs there."""
    if type(draft) is not Draft:
        return draft, "a list of Draft"
    if not _is_prompt(draft.prompt):
        return draft.prompt, "token ids, at least one, as prompt of a Draft"
    if type(draft.output_len) is not int or draft.output_len < 1:
        return draft.output_len, "a whole number of tokens, at least 1, as output_len of a Draft"
    if type(draft.shared) is not int or draft.shared < 0:
        return draft.shared, "a whole number of tokens as shared of a Draft"
    if draft.arrival is not None and not is_finite(draft.arrival):
        return draft.arrival, "a time in s or None as arrival of a Draft"
    if draft.temperature is not None and not is_amount(draft.temperature):
        return draft.temperature, "a number, at least 0, or None as temperature of a Draft"
    if draft.think_s is not None and not is_amount(draft.think_s):
        return draft.think_s, "a time in s, at least 0, or None as think_s of a Draft"
    if draft.session is not None and not isinstance(draft.session, str):
        return draft.session, "a name or None as session of a Draft"
    if draft.images != () and not (type(draft.images) is tuple and {*map(type, draft.images)} == {Image}):
        return draft.images, "a tuple of Image as images of a Draft"
    return None


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and type(prompt[0]) is int


_LONGEST_NAME = 255
"""Bytes of a file's name, on the file systems of today."""


def source_of(workload: Workload, registry: Registry | None = None) -> CheckedSource:
    """The plugin that serves `workload`: the one it names, else the first that accepts it."""
    if registry is None:
        from twinfer.core.registry import default_registry

        registry = default_registry()
    if any(len(part.encode(errors="surrogatepass")) > _LONGEST_NAME for part in Path(workload.trace or "").parts):
        raise ConfigError("--trace", workload.trace, "is too long for the name of a file", "check the path")
    if workload.source is not None:
        return CheckedSource(registry.build("workload", workload.source))
    for name in registry.names("workload"):
        asked = registry.get("workload", name)
        with Blaming("workload", asked, "accepts"):
            accepts = bool(asked.accepts(workload))
        if accepts:
            return CheckedSource(registry.build("workload", Choice(name=name)))
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


__all__ = ["CheckedSource", "Draft", "Encode", "Setting", "WorkloadSource", "source_of"]
