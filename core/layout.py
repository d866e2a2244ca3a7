"""How one replica is laid over devices: the sizes of its parallel groups.

    tp   tensor parallel: heads and MLP columns of every layer are split, KV heads replicate when there are fewer
    pp   pipeline parallel: consecutive layers on consecutive stages, activations handed on
    cp   context parallel: the tokens of a prompt are split, keys and values go round (ring attention)
    dp   attention data parallel: rows are split over groups of `tp` ranks that share the experts
    ep   expert parallel: whole experts are spread over `ep` of the dp * tp ranks of a stage; the rest of them split
         each expert

Invariants
* devices = tp * pp * cp * dp; `ep` divides tp * dp.
* Stages are consecutive, as equal as they can be; the first and the last, which also hold the embedding and the head,
  never have more layers than the others where that can be helped.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.errors import ConfigError, figure

MOST_RANKS = 1024  # of one group: more than any machine shares a replica over
SIZES = ("tp", "pp", "cp", "dp", "ep")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups of one replica; 1 is none."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}", getattr(self, name), "is no size of a group", "give 1 or more")
            if getattr(self, name) > MOST_RANKS:
                raise ConfigError(
                    f"--{name}", getattr(self, name), "is too large a group", f"give at most {figure(MOST_RANKS)}"
                )
        if self.tp * self.dp % self.ep:
            raise ConfigError(
                "--ep", self.ep, f"the {self.tp * self.dp} ranks of --tp {self.tp} x --dp {self.dp} do not divide by it",
                f"give a divisor of {self.tp * self.dp}",
            )  # fmt: skip

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tp * self.dp // self.ep

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """Layers of each pipeline stage. ConfigError when there are more stages than layers."""
        if self.pp > num_layers:
            raise ConfigError(
                "--pp", self.pp, f"there are {num_layers} layers, a stage needs one", f"give at most {num_layers}"
            )
        each, more = divmod(num_layers, self.pp)
        longer = range(self.pp - 1 - more, self.pp - 1)
        found, first = [], 0
        for stage in range(self.pp):
            last = first + each + (stage in longer)
            found.append(range(first, last))
            first = last
        return tuple(found)

    @property
    def flags(self) -> str:
        """As options of the command line: `--tp 4 --pp 2`."""
        return " ".join(f"--{n} {getattr(self, n)}" for n in SIZES if getattr(self, n) > 1) or "--tp 1"

    def __str__(self) -> str:
        return " ".join(f"{n}{getattr(self, n)}" for n in SIZES if getattr(self, n) > 1) or "1"


ALONE = Layout()

__all__ = ["ALONE", "SIZES", "Layout"]
