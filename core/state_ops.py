"""Ops of layers that carry a state of fixed size instead of keys and values (linear attention).

    linear_in_proj    queries, keys, values, gate and the numbers per head, in one product
    linear_conv       causal convolution over queries, keys and values, with the inputs that it remembers
    linear_x_proj, linear_dt_proj    Mamba alone: steps, keys and queries from the convolved inputs
    linear_attention  per value head: decay of the state, what the token changes in it, and the query's read
    linear_gate       norm and gate of the output
    linear_out_proj

Sources: gated delta networks arXiv:2412.06464, Mamba-2 arXiv:2405.21060, lightning attention arXiv:2501.08313.

Invariants
* A row reads and writes its state once a step, however many tokens it feeds and however long it is.
* FLOPs are those of the recurrence, so that cutting a prompt into chunks changes none.
* Heads are split over tensor-parallel ranks; the state of a row follows its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.spec import ModelSpec
from twinfer.core.work import Linear, Op, RowShape, StateShape

STATE_FLOPS = {"gated_delta_net": 7, "mamba2": 5, "lightning": 5, "mamba": 6}
"""FLOPs per state element and token: decay 1, outer product 2, read 2; the delta rule reads once more for its error,
Mamba's decay is of every element."""

GATE_FLOPS = 9  # per element: norm 4, sigmoid-like function and product 5


@dataclass(frozen=True, slots=True)
class StateLayers:
    """What `count` such layers of one rank depend on besides the step."""

    count: int
    shape: StateShape
    in_proj: Linear
    out_proj: Linear
    steps: tuple[Linear, ...]  # Mamba: steps, B and C from the convolved inputs, and steps back to channels
    channels: int  # of the convolution, on this rank
    inner: int  # width of all values of this rank
    state: float  # elements of the state of one row and layer
    state_bytes: float  # bytes of one element
    conv_bytes: float  # what the convolution remembers of one row and layer
    act: float
    dtype: str

    @classmethod
    def of(cls, model: ModelSpec, tp: int, count: int) -> StateLayers:
        s = model.linear_attention
        assert s is not None
        act, h = dtype_bytes(model.dtype), model.hidden_size
        keys, values = -(-s.key_heads // tp), -(-s.value_heads // tp)
        inner = values * s.value_dim
        channels = inner if s.kind == "mamba" else 2 * keys * s.key_dim + inner
        per_head = (s.in_width - s.conv_channels - s.inner) // s.value_heads
        width = channels + inner + values * per_head
        bits, dtype = model.linear_bits / 8, model.linear_dtype or model.dtype
        return cls(
            count, StateShape(s.kind, h, keys, values, s.key_dim, s.value_dim, s.conv_width),
            Linear("linear_in_proj", width, h, width * h * bits, dtype, count),
            Linear("linear_out_proj", h, inner, h * inner * bits, dtype, count),
            tuple(
                Linear(name, n, k, n * k * bits, dtype, count)
                for name, n, k in (("linear_x_proj", s.step_width, inner), ("linear_dt_proj", inner, s.step_rank))
                if s.step_width
            ),
            channels, inner, s.state_values(tp), dtype_bytes(s.state_dtype), s.conv_values(tp) * act, act, model.dtype,
        )  # fmt: skip


def state_ops(c: StateLayers, rows: tuple[RowShape, ...], t: int, cp: int = 1) -> list[Op]:
    """Ops of all rows; `t`: tokens on this rank (of `cp` ranks that share the tokens, each carries the state on)."""
    n, act = len(rows), c.act
    fed = tuple(RowShape(queries, queries) for queries, _ in rows)  # the work does not depend on what came before
    inputs = t * c.channels * act
    flops = STATE_FLOPS[c.shape.kind] * c.state * sum(queries for queries, _ in rows) / cp
    state = n * c.state * c.state_bytes
    ops = [c.in_proj.op(t, act)]
    if c.shape.conv_width > 1:
        taps, held = 2.0 * t * c.channels * c.shape.conv_width, n * c.conv_bytes
        ops.append(
            Op("linear_conv", "elementwise", taps, inputs + held, inputs + held, c.dtype, c.count, (t, c.channels), 0.0,
               fed, "", c.shape)
        )  # fmt: skip
    ops += [linear.op(t, act) for linear in c.steps]
    ops += [
        Op(
            "linear_attention", "scan", flops, inputs + state, t * c.inner * act + state, c.dtype, c.count,
            (t, c.inner), 0.0, fed, "", c.shape,
        ),
        Op(
            "linear_gate", "elementwise", float(GATE_FLOPS * t * c.inner), 2 * t * c.inner * act, t * c.inner * act,
            c.dtype, c.count, (t, c.inner),
        ),
        c.out_proj.op(t, act),
    ]  # fmt: skip
    return ops


__all__ = ["STATE_FLOPS", "StateLayers", "state_ops"]
