"""What the inputs of attention look like: means and second moments over a text, layer by layer.

Conversions weigh their errors by them: a direction that never occurs may be lost for free.

Invariants
* The model runs as it was trained, in float32, through the engine's own steps; nothing of a later run is touched.
* The default text needs no download: Python's own help texts (`pydoc_data.topics`), English prose about a language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.plan import Need
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.convert import Checkpoint
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.linear import Linear, dense
from twinfer.core.runtime.perplexity import BLOCK_SIZE, plans
from twinfer.core.runtime.tokenizer import load_tokenizer

NUM_TOKENS = 8192
CHUNK = 512
_QKV = re.compile(r"model\.layers\.(\d+)\.qkv_proj$")


@dataclass(slots=True)
class Inputs:
    """Normed inputs `x [hidden]` of one layer's attention. Sums are on the CPU, in float64."""

    count: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(0))
    products: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, x: Tensor) -> None:
        """Take in `x [tokens, hidden]`."""
        if not self.count:
            self.total = torch.zeros(x.shape[1], dtype=torch.float64)
            self.products = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
        x = x.float()
        self.count += x.shape[0]
        self.total += x.double().sum(0).cpu()
        self.products += (x.t() @ x).double().cpu()

    @property
    def mean(self) -> Tensor:
        """E[x] `[hidden]`."""
        return self.total / self.count

    @property
    def second_moment(self) -> Tensor:
        """E[x x^T] `[hidden, hidden]`."""
        return self.products / self.count

    @classmethod
    def unknown(cls, hidden: int) -> Inputs:
        """Inputs of which nothing is known: centred, all directions alike. Enough where a conversion is exact."""
        return cls(1, torch.zeros(hidden, dtype=torch.float64), torch.eye(hidden, dtype=torch.float64))


def attention_inputs(checkpoint: Checkpoint, text: str | None = None, num_tokens: int = NUM_TOKENS) -> list[Inputs]:
    """Statistics of every layer over the first `num_tokens` tokens of `text` (None: the default text).

    Raises ConfigError for a text that is too short to say anything.
    """
    spec = checkpoint.spec
    inputs = [Inputs() for _ in range(spec.num_layers)]

    def watched(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        inner, layer = dense(name, weight, bias), _QKV.match(name)
        if layer is None:
            return inner
        seen = inputs[int(layer.group(1))]

        def linear(x: Tensor) -> Tensor:
            seen.add(x)
            return inner(x)

        return linear

    chunk = min(CHUNK, spec.max_context)
    ids = load_tokenizer(checkpoint.source.path).encode(text or default_text(), add_special_tokens=False)[:num_tokens]
    if text is not None and len(ids) < min(spec.hidden_size, num_tokens):
        raise ConfigError(
            "calibration", f"a text of {len(ids)} tokens", f"says too little of {spec.hidden_size} dimensions",
            "give a longer one, or leave it out",
        )  # fmt: skip
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    model = checkpoint.build(watched)
    blocks = -(-chunk // BLOCK_SIZE)
    together = max(1, min(2, len(chunks)))
    executor = TorchExecutor(model, attention_of(spec), together * blocks, BLOCK_SIZE)
    try:
        for plan in plans(executor, chunks, together, together * chunk, Need.NONE):
            executor.execute(plan)
    finally:
        executor.close()
    silent = [i for i, seen in enumerate(inputs) if not seen.count]
    if silent:
        raise ModelError(f"{spec.name}: layers {silent} have no joint projection to queries, keys and values to watch")
    return inputs


def default_text() -> str:
    """Python's help texts, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_calibration(path: str | Path) -> str:
    """The UTF-8 text in `path`; ConfigError when it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", str(path), f"cannot be read ({error})", "give a file of UTF-8 text") from None


__all__ = ["Inputs", "attention_inputs", "default_text", "read_calibration"]
