"""What formats with native CPU kernels ask of the engine.

Invariants
* The engine holds what `adapt_model` counts where the native kernels run (biases, routers and what absorbed MLA folds
  into attention aside: they stay float32); where they cannot be built it holds the same values in float32, and the
  run's reasons say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinfer.core.technique import Needs


def engine_reasons(name: str, needs: Needs) -> list[str]:
    """Why the engine cannot run the native kernels of `name` for `needs`."""
    if needs.world != "engine":
        return []
    reasons = []
    if needs.device != "cpu":
        reasons.append(f"{name} has kernels for CPUs only; the simulator can show what it would do elsewhere")
    if needs.dtype != "float32":
        reasons.append(f"{name} takes float32 activations, not {needs.dtype}; use --dtype float32 (or auto)")
    return reasons
