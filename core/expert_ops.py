"""Ops of the routed experts of sparse layers, on the rank that gets most of the tokens.

    router, [latent_down,] [moe_dispatch | moe_gather,] experts, mlp_act, [moe_combine | moe_scatter,] [latent_up]

    dp = 1       every rank of the tensor-parallel group has all tokens: it computes its experts, the layer's all-reduce
                 adds them up, nothing is sent
    ep > 1       tokens go to the ranks that hold their experts and come back: two all-to-alls
    ep = 1       all ranks share every expert: tokens are gathered, partial sums are scattered

Invariants
* `experts` counts what the busiest of the `ep` ranks is expected to get (`expert_load.rank_load`): pairs of token and
  expert, and the weights of the experts that are touched, read once.
* FLOPs of all ranks add up to those of one rank times that imbalance; weights of all ranks to those of one rank.
* Messages count each pair of token and rank once, however many of its experts are there.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.expert_load import rank_load
from twinfer.core.layout import Layout
from twinfer.core.spec import ModelSpec
from twinfer.core.work import Linear, MoEShape, Op

ACT_FLOPS = 5  # per element: sigmoid-like function and product
SCALE_BYTES = 4 / 128  # per element sent in 8 bits: one float32 scale per 128


@dataclass(frozen=True, slots=True)
class Experts:
    """What the experts of `count` layers on one rank depend on besides the step."""

    model: ModelSpec
    layout: Layout
    count: int
    width: int  # of one expert on this rank
    token: int  # width of what an expert takes and gives
    expert_bytes: float  # stored bytes of one expert on this rank
    router: Linear
    latent: tuple[Linear, ...]  # projections to and from a latent that experts work on, or none
    act: float
    sent: float  # bytes per element of what is sent to experts

    @classmethod
    def of(cls, model: ModelSpec, layout: Layout, count: int) -> Experts:
        e = model.moe
        assert e is not None
        act, h = dtype_bytes(model.dtype), model.hidden_size
        if e.num_experts % layout.ep:
            raise ConfigError(
                "--ep", layout.ep, f"{model.name} has {e.num_experts} experts, which do not divide over it",
                f"give a divisor of {e.num_experts}",
            )  # fmt: skip
        width, token = -(-e.intermediate_size // layout.expert_tp), e.latent_size or h
        matrices = 3 if model.gated_mlp else 2
        outputs = e.num_experts + e.shared_gate
        router = Linear("router", outputs, h, outputs * h * act, model.dtype, count)
        bits, dtype = model.linear_bits / 8, model.linear_dtype or model.dtype
        latent = (
            (Linear("latent_down", token, h, token * h * bits, dtype, count),
             Linear("latent_up", h, token, token * h * bits, dtype, count))
            if e.latent_size else ()
        )  # fmt: skip
        narrow = dtype_bytes(model.expert_dtype or dtype) < 2
        return cls(
            model, layout, count, width, token, matrices * token * width * model.routed_bits / 8, router, latent, act,
            1.0 + SCALE_BYTES if narrow else act,
        )  # fmt: skip


def expert_ops(c: Experts, t: int, all_tokens: int) -> list[Op]:
    """Ops for `t` tokens of this rank's group out of `all_tokens` that share the experts."""
    model, moe, layout, act = c.model, c.model.moe, c.layout, c.act
    assert moe is not None
    h, width = c.token, c.width
    up = 2 * width if model.gated_mlp else width
    pairs, touched = rank_load(moe.num_experts, moe.top_k, all_tokens, layout.ep, moe.skew)
    m = max(1, round(pairs))
    dtype = model.expert_dtype or model.linear_dtype or model.dtype
    shape = MoEShape(
        all_tokens, moe.top_k, moe.num_experts, h, moe.intermediate_size, layout.expert_tp, layout.ep, moe.skew,
        model.gated_mlp, model.routed_bits, dtype,
    )  # fmt: skip
    experts = Op(
        "experts",
        "gemm", 2.0 * pairs * h * (up + width),
        touched * c.expert_bytes + pairs * (h + width) * act, pairs * (up + h) * act,
        dtype, c.count, (m, up + width, h, max(1, round(touched))), 0.0, (), "", shape,
    )  # fmt: skip
    acted = Op(
        "mlp_act", "elementwise", float(ACT_FLOPS * pairs * width), pairs * up * act, pairs * width * act, model.dtype,
        c.count, (m, width), 0.0, (), "", shape,
    )  # fmt: skip
    ops = [c.router.op(t, act)]
    if c.latent:
        ops.append(c.latent[0].op(t, act))
    if layout.dp == 1:
        ops += [experts, acted]
    else:
        there, back = _exchanges(c, shape, t, pairs)
        ops += [there, experts, acted, back]
    if c.latent:
        ops.append(c.latent[1].op(t, act))
    return ops


def _exchanges(c: Experts, shape: MoEShape, t: int, pairs: float) -> tuple[Op, Op]:
    """What moves the tokens of all groups to their experts and back; the tokens of a group are cut over its ranks."""
    model, layout, h, all_tokens = c.model, c.layout, c.token, shape.tokens
    ranks = layout.tp * layout.dp
    mine = -(-t // layout.tp)
    if layout.ep == 1:
        part, whole = mine * h * c.act, all_tokens * h * c.act
        return (
            Op("moe_gather", "comm", 0.0, part, whole, model.dtype, c.count, (ranks,), part),
            Op("moe_scatter", "comm", 0.0, whole, part, model.dtype, c.count, (ranks,), whole),
        )
    copies = ranks_of_token(shape.num_experts, shape.top_k, layout.ep) * layout.expert_tp
    uneven = pairs * layout.ep / (all_tokens * shape.top_k)
    there, back = mine * copies * h * c.sent * uneven, mine * copies * h * c.act * uneven
    mine_only = shape._replace(tokens=mine)
    return (
        Op("moe_dispatch", "comm", 0.0, there, there, shape.dtype, c.count, (ranks,), there,
           (), "", mine_only),
        Op("moe_combine", "comm", 0.0, back, back, model.dtype, c.count, (ranks,), back, (), "", mine_only),
    )  # fmt: skip


def ranks_of_token(num_experts: int, top_k: int, ranks: int) -> float:
    """Expected number of ranks that hold at least one of a token's experts, experts alike and drawn without repeat."""
    here = num_experts // ranks
    none = 1.0
    for i in range(top_k):
        none *= max(0, num_experts - here - i) / (num_experts - i)
    return ranks * (1.0 - none)


__all__ = ["Experts", "expert_ops", "ranks_of_token"]
