"""What all kits share: how a technique is built, what it declares, and how a broken contract is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from twinfer.core.config import Choice
from twinfer.core.guard import reasons_against
from twinfer.core.registry import validate_options
from twinfer.core.technique import Needs


class ConformanceError(AssertionError):
    """A technique broke its contract; the text says where and how to see it again."""


def require(ok: object, message: str) -> None:
    """Raise ConformanceError(message) unless `ok`; unlike `assert` it also counts under `python -O`."""
    if not ok:
        raise ConformanceError(message)


class Kit:
    """What the kits share."""

    technique: ClassVar[type[Any]]
    options: ClassVar[Mapping[str, Any]] = {}
    seeds: ClassVar[range] = range(16)

    def build(self) -> Any:
        """The technique with its options, as a run would build it."""
        cls = type(self).technique
        choice = Choice(name=cls.name, options=dict(self.options))
        return cls(validate_options(cls.name, choice, cls.Options))

    def test_declaration(self) -> None:
        """A name, a summary and options that have defaults and descriptions: what lists and controls are made of."""
        cls = type(self).technique
        require(cls.summary and "\n" not in cls.summary, f"{cls.name}: summary must be one line of text")
        cls.Options()  # raises when an option has no default
        for name, info in cls.Options.model_fields.items():
            require(info.description, f"{cls.name}: option {name} has no description")
        self.build()
        reasons_against("technique", cls, Needs())  # raises when it does not answer with a list of texts
