"""Calls into plugins: what one raises, or answers that nobody could use, becomes a PluginError that names it.

Invariants
* A plugin's fault is every exception and the end of the process (`sys.exit`); Ctrl-C stays Ctrl-C.
* A TwinferError that a technique raises was said to the user, and passes as it is.
* Answers are looked at for what their callers rely on; whether they are sensible is the plugin's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from twinfer.core.errors import PluginError, TwinferError, figure, short
from twinfer.core.work import Op

if TYPE_CHECKING:
    from twinfer.core.policy import KVCache, Limits
    from twinfer.core.spec import ModelSpec
    from twinfer.core.technique import Needs
    from twinfer.core.work import StepShape

FAULTS = (Exception, SystemExit)
"""What a plugin may raise that is its fault."""
MOST = 10**18
"""Tokens, bytes, seconds and blocks that nothing has: numbers far beyond are none that can be computed with."""


class Blaming:
    """`with Blaming("router", router, "pick"):` what is raised there is the fault of that technique's method."""

    __slots__ = ("_kind", "_method", "_technique")

    def __init__(self, kind: str, technique: Any, method: str) -> None:
        self._kind, self._technique, self._method = kind, technique, method

    def __enter__(self) -> None:
        pass

    def __exit__(self, raised: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FAULTS) and not isinstance(error, TwinferError):
            raise fault(self._kind, self._technique, self._method, error) from error


def fault(kind: str, technique: Any, method: str, error: BaseException) -> PluginError:
    """That `technique` raised `error`. kind: one of `KINDS`."""
    return PluginError(f"{_named(kind, technique)} failed in {method}: {raised(error)}")


def raised(error: BaseException) -> str:
    """An error that others wrote, perhaps over several lines, or with no words that can be had, in one."""
    try:
        words = " ".join(str(error).split())
    except FAULTS:
        words = "(its text cannot be had)"
    return f"{type(error).__name__}: {words}"


def unusable(kind: str, technique: Any, method: str, answer: object, wanted: str) -> PluginError:
    """That `technique` answered with what is not `wanted`."""
    return PluginError(f"{_named(kind, technique)} gave {short(answer)} in {method}; give {wanted}")


def whole(kind: str, technique: Any, method: str, least: int, *given: object) -> int:
    """The whole number, `least` or more, that a method answers to `given`."""
    try:
        answer = getattr(technique, method)(*given)
    except TwinferError:
        raise
    except FAULTS as error:
        raise fault(kind, technique, method, error) from error
    if type(answer) is not int or not least <= answer <= MOST:
        raise unusable(kind, technique, method, answer, f"a whole number, at least {least}, at most {figure(MOST)}")
    return answer


def flag(kind: str, technique: Any, name: str, *default: bool) -> bool:
    """The attribute `name`, True or False, of `technique`; `default` where it need not have it."""
    with Blaming(kind, technique, name):
        answer = getattr(technique, name, *default)
    if not isinstance(answer, bool):
        raise unusable(kind, technique, name, answer, "True or False")
    return answer


def reasons_against(kind: str, technique: Any, needs: Needs) -> list[str]:
    """Why `technique`, a class or one with its options, cannot serve `needs`."""
    with Blaming(kind, technique, "why_not"):
        reasons = technique.why_not(needs)
        listed: list[Any] = list(reasons) if isinstance(reasons, Iterable) else [None]
    if isinstance(reasons, str) or not all(isinstance(reason, str) for reason in listed):
        raise unusable(kind, technique, "why_not", reasons, "a list of reasons in words, empty when it can serve")
    return listed


def adapted_model(kind: str, technique: Any, model: ModelSpec) -> ModelSpec:
    """`model` as `technique` leaves it."""
    with Blaming(kind, technique, "adapt_model"):
        adapted = technique.adapt_model(model)
    if not isinstance(adapted, type(model)):
        raise unusable(kind, technique, "adapt_model", adapted, "a ModelSpec, the one it was given or a changed copy")
    return adapted


def adapted_ops(techniques: Iterable[Any], ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
    """`ops` as the techniques leave them, one after the other."""
    for technique in techniques:
        with Blaming("technique", technique, "adapt_ops"):
            adapted = technique.adapt_ops(ops, model, shape)
        if not are_ops(adapted):
            raise unusable("technique", technique, "adapt_ops", adapted, "a list of Op")
        if not adapted and not shape.rows_only:
            raise unusable(
                "technique", technique, "adapt_ops", adapted, "the ops of a step, which is never without work"
            )
        ops = adapted
    return ops


def are_ops(answer: object) -> bool:
    """Whether `answer` is a list of Op, perhaps an empty one."""
    return isinstance(answer, Sequence) and {*map(type, answer)} <= {Op}


def is_amount(answer: object, least: float = 0.0) -> bool:
    """Whether `answer` is a number, at least `least` and of use."""
    return isinstance(answer, int | float) and not isinstance(answer, bool) and least <= answer and abs(answer) <= MOST


def block_size_of(cache: KVCache, limits: Limits) -> int:
    """Tokens per block of `cache`, whose flags are looked at, too."""
    for name in ("shares_prefixes", "copies_on_write"):
        flag("kv_cache", cache, name)
    return whole("kv_cache", cache, "block_size", 1, limits)


def _named(kind: str, technique: Any) -> str:
    name = getattr(technique, "name", None) or getattr(technique, "__name__", type(technique).__name__)
    return f"{'KV cache' if kind == 'kv_cache' else kind.replace('_', ' ')} {name!r}"


__all__ = [
    "FAULTS", "Blaming", "adapted_model", "adapted_ops", "are_ops", "block_size_of", "fault", "flag", "is_amount", "raised", "reasons_against",
    "unusable", "whole",
]  # fmt: skip
