"""What a calibration is: tables of measured seconds by format, and corrections found in real runs.

A format is what decides which kernels run: the dtype of activations, how linears are stored and computed, and the
dtype of the KV cache. `calibrated.py` answers from this; `simulator/fit.py` and `simulator/attribute.py` write it.

Invariants
* Seconds in tables are of one launch and as measured; `level` turns them into what they take in whole runs.
* Formats are told apart by numbers of the model (`Format.of`), so that no name of a technique is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from twinfer.core.dtypes import dtype_bits, dtype_bytes

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import Op

VERSION = 2
MIN_DRIFT = 0.03
"""A machine's speed an hour from now is not known better, however steady it was for a minute."""


Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]
"""Relative to something, or seconds that may be none."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _check_points(x: Sequence[float], seconds: Sequence[float]) -> None:
    """ValueError unless there are as many `seconds` as `x`, which rise."""
    if not x or len(x) != len(seconds):
        raise ValueError(f"has {len(x)} points and {len(seconds)} times")
    if any(a >= b for a, b in itertools.pairwise(x)):
        raise ValueError("has points that do not rise")


class Format(_Stored):
    """dtype: of activations.  compute, bits: of block linears.  kv: dtype of the KV cache."""

    dtype: str
    compute: str
    bits: Positive
    kv: str

    @classmethod
    def of(cls, model: ModelSpec) -> Format:
        """The format of a model as its techniques leave it."""
        bits = model.weight_bits if model.weight_bits is not None else dtype_bits(model.dtype)
        return cls(
            dtype=model.dtype, compute=model.linear_dtype or model.dtype, bits=rounded(bits), kv=model.kv_dtype
        )  # fmt: skip

    def far(self, other: Format) -> tuple[float, ...]:
        """Sorts formats by how much of `other` they differ in: what decides most comes first."""
        ratio = max(self.bits, other.bits) / max(min(self.bits, other.bits), 1e-9)
        return (self.dtype != other.dtype, self.compute != other.compute, ratio, self.kv != other.kv)

    def __str__(self) -> str:
        linears = self.dtype if self.bits == dtype_bits(self.dtype) else f"{self.bits:g}-bit weights in {self.compute}"
        return f"{linears}, KV {self.kv}"


def rounded(bits: float) -> float:
    """Bits per weight, scales of long rows aside: what tells storage formats apart."""
    return round(bits, 1)


def weight_bits(op: Op) -> float:
    """Stored bits per weight of a gemm op; its inputs are read in the dtype it computes in."""
    m, n, k = op.shape[:3]
    return rounded(max(0.0, 8 * (op.bytes_read - m * k * dtype_bytes(op.dtype)) / (n * k)))


class GemmTable(_Stored):
    """Measured seconds of x[m, k] @ w[n, k].T by m; `spread`: relative standard deviation of the medians."""

    dtype: str
    bits: Positive
    n: int = Field(ge=1)
    k: int = Field(ge=1)
    m: tuple[Annotated[int, Field(ge=1)], ...]
    seconds: tuple[Positive, ...]
    spread: Share

    @model_validator(mode="after")
    def _check(self) -> GemmTable:
        _check_points(self.m, self.seconds)
        return self

    def moved(self, m: int, n: int, k: int) -> float:
        """Bytes of such a product."""
        return (m * k + m * n) * dtype_bytes(self.dtype) + n * k * self.bits / 8


class Curve(_Stored):
    """Measured seconds over x: bytes of elementwise work, or tokens of grouped products."""

    x: tuple[Positive, ...]
    seconds: tuple[Share, ...]
    spread: Share

    @model_validator(mode="after")
    def _check(self) -> Curve:
        _check_points(self.x, self.seconds)
        return self


class Fit(_Stored):
    """A non-negative linear fit; `spread`: relative standard deviation of its residuals."""

    terms: dict[str, Share]
    spread: Share
    num_points: int = 0


class Tables(_Stored):
    """What was measured of one format.

    attention: seconds per unit of `attention_features`.  curves: by op name.  inside: ops that were never told apart
    from their neighbours, whose times hold theirs.  host: seconds of a step that are in no op.  around: seconds of the
    loop between two steps.
    written, recorded: seconds that the first and the second step of a shape take longer where passes are recorded.
    level: whole runs over the sum of their steps as tabled.  level_spread: how far runs differ in that.
    drift, jitter: relative standard deviations of the machine's speed, over a minute and from step to step.
    """

    format: Format
    quantizer: str = ""
    model: str = ""
    created: str = ""
    gemm: tuple[GemmTable, ...] = ()
    attention: Fit | None = None
    curves: dict[str, Curve] = {}
    inside: tuple[str, ...] = ()
    host: Fit | None = None
    around: Fit | None = None
    written: Share = 0.0
    recorded: Share = 0.0
    level: Positive = 1.0
    level_spread: Share = 0.0
    drift: Share = 0.0
    jitter: Share = 0.0


def _small_first(sizes: tuple[tuple[float, float], tuple[float, float]]) -> Any:
    if sizes[0][0] >= sizes[1][0]:
        raise ValueError("has no small launch before a large one")
    return sizes


Sizes = Annotated[tuple[tuple[Positive, Positive], tuple[Positive, Positive]], AfterValidator(_small_first)]
"""(seconds of a launch as predicted, factor) of the small launches of an op, and of its large ones."""


class Correction(_Stored):
    """Factors on predicted op times that a real run of `format` gave; "*" is every other op.

    by_size: of ops that had small and large launches, as those of decode steps and of prompts are.  spreads: relative standard deviation left after them, from quantiles of the residuals.
    source: which run.
    """

    format: Format
    model: str
    factors: dict[str, Positive]
    by_size: dict[str, Sizes] = {}
    spreads: dict[str, Share]
    source: str
    date: str

    def factor(self, name: str, seconds: float) -> float | None:
        """Of an op whose launch is predicted to take `seconds`: what it takes lies on the line through small and large ones,
        whatever is smaller or larger than both has their factor. None for an op that the run says nothing about."""
        sizes = self.by_size.get(name)
        if sizes is None:
            return self.factors.get(name, self.factors.get("*"))
        (small, low), (large, high) = sizes
        if seconds <= small:
            return low
        share = min(1.0, (seconds - small) / (large - small))
        return (small * low + (large * high - small * low) * share) / min(seconds, large)


class Calibration(_Stored):
    """The `calibration` part of a device file.

    copy_bandwidth: B/s, for ops that no table knows.  fingerprint: what the tables hold for.
    """

    version: Literal[2] = 2
    created: str = ""
    tables: tuple[Tables, ...] = ()
    corrections: tuple[Correction, ...] = ()
    copy_bandwidth: Share = 0.0
    fingerprint: dict[str, Any] = {}

    def correction(self, model: ModelSpec | None) -> Correction | None:
        """The newest one of the model's format, that of the same model first."""
        if model is None:
            return None
        alike = [c for c in self.corrections if c.format == Format.of(model)]
        return max(alike, key=lambda c: (c.model == model.name, c.date), default=None)
