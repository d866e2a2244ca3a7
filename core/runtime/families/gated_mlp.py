"""The dense gated MLP block: `down_proj(act(gate) * up)` with gate, up = gate_up_proj(x) (arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor

from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import RankLoader, Shapes, linear_shapes
from twinfer.core.spec import ModelSpec
from twinfer.kernels import ops


class GatedMLP:
    """See `MLPBlock`. Tensors lie under `{prefix}{part}` in the checkpoint; gate and up are one product.

    op: what the names of the two linears have between prefix and name.
    """

    def __init__(self, weights: RankLoader, prefix: str, op: str = "", part: str = "mlp.") -> None:
        self.act, self.parallel = weights.spec.hidden_act, weights.parallel
        name, op = f"{prefix}{part}", f"{prefix}{op}"
        self.gate_up_proj = weights.columns(f"{op}gate_up_proj", [f"{name}gate_proj", f"{name}up_proj"])
        self.down_proj = weights.rows(f"{op}down_proj", f"{name}down_proj")

    @staticmethod
    def shapes(spec: ModelSpec, prefix: str) -> Shapes:
        """What the checkpoint holds for one layer."""
        name, h, width, bias = f"{prefix}mlp.", spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        return (
            linear_shapes(f"{name}gate_proj", width, h, bias)
            | linear_shapes(f"{name}up_proj", width, h, bias)
            | linear_shapes(f"{name}down_proj", h, width, bias)
        )

    def __call__(self, x: Tensor, mark: Mark) -> Tensor:
        return self.parallel.all_reduce(self.partial(x, mark), mark)

    def partial(self, x: Tensor, mark: Mark) -> Tensor:
        """This rank's part of the sum."""
        x = self.gate_up_proj(x)
        mark("gate_up_proj")
        x = ops.gated(x, self.act)
        mark("mlp_act")
        x = self.down_proj(x)
        mark("down_proj")
        return x


__all__ = ["GatedMLP"]
