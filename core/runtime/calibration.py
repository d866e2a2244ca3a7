"""What the inputs of attention look like over a text, layer by layer: each token's own, and as attention averages them.

Conversions weigh their errors by these moments: a direction that never occurs may be lost for free.

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
from twinfer.core.runtime.rope import Rotary, rotary_of, rotate
from twinfer.core.runtime.tokenizer import load_tokenizer
from twinfer.core.runtime.weights import Loader
from twinfer.core.spec import ModelSpec

CALIBRATION = "--attention mla:calibration"
NUM_TOKENS = 8192
CHUNK = 512
STRIDE = 8  # every how many positions attention is looked at
_QKV = re.compile(r"model\.layers\.(\d+)\.qkv_proj$")


@dataclass(slots=True)
class Moments:
    """First and second moments of vectors `x [hidden]`. Sums are on the CPU, in float64."""

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

    @property
    def covariance(self) -> Tensor:
        """`[hidden, hidden]`."""
        return self.second_moment - self.mean[:, None] * self.mean


@dataclass(slots=True)
class Inputs:
    """Inputs of one layer's attention, normed.

    tokens: of each token.  attended: of what the query heads make of them, sums over tokens of attention times x, at
    some positions.  head_totals: sums of the latter by head `[heads, hidden]`.
    """

    tokens: Moments = field(default_factory=Moments)
    attended: Moments = field(default_factory=Moments)
    head_totals: Tensor = field(default_factory=lambda: torch.zeros(0))

    def attend(self, x: Tensor) -> None:
        """Take in attended inputs `x [heads, positions, hidden]`."""
        total = x.double().sum(1).cpu()
        self.head_totals = total if not self.attended.count else self.head_totals + total
        self.attended.add(x.flatten(0, 1))

    @property
    def head_means(self) -> Tensor:
        """Mean of what each head attends to, `[heads, hidden]`."""
        return self.head_totals * len(self.head_totals) / self.attended.count

    @property
    def attended_covariance(self) -> Tensor:
        """Of what heads attend to, around the mean of each head, `[hidden, hidden]`."""
        means = self.head_means
        return self.attended.second_moment - means.t() @ means / len(means)

    @classmethod
    def unknown(cls, spec: ModelSpec) -> Inputs:
        """Inputs of which nothing is known: centred, all directions alike. Enough where a conversion is exact."""
        zero = torch.zeros(spec.num_heads, spec.hidden_size, dtype=torch.float64)
        alike = Moments(1, zero[0], torch.eye(spec.hidden_size, dtype=torch.float64))
        return cls(alike, alike, zero)


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
            qkv = inner(x)
            seen.tokens.add(x)
            for row, out in zip(x.split(chunk), qkv.split(chunk), strict=True):
                if len(row) == chunk:
                    seen.attend(_attended(row, out, spec, rotary))
            return qkv

        return linear

    chunk = min(CHUNK, spec.max_context)
    ids = load_tokenizer(checkpoint.source.path).encode(
        default_text() if text is None else text, add_special_tokens=False
    )[:num_tokens]
    if text is not None and len(ids) < min(spec.hidden_size, num_tokens):
        raise ConfigError(
            CALIBRATION, None, f"a text of {len(ids)} tokens says too little of {spec.hidden_size} dimensions",
            "give a longer one, or leave it out",
        )  # fmt: skip
    chunk = min(chunk, len(ids))
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    rotary = rotary_of(spec, Loader(checkpoint.source, torch.float32, checkpoint.device))
    model = checkpoint.build(watched)
    blocks = -(-chunk // BLOCK_SIZE)
    together = max(1, min(2, len(chunks)))
    executor = TorchExecutor(model, attention_of(spec), together * blocks, BLOCK_SIZE)
    try:
        for plan in plans(executor, chunks, together, together * chunk, Need.NONE):
            executor.execute(plan)
    finally:
        executor.close()
    silent = [i for i, seen in enumerate(inputs) if not seen.tokens.count]
    if silent:
        raise ModelError(f"{spec.name}: layers {silent} have no joint projection to queries, keys and values to watch")
    return inputs


def _attended(x: Tensor, qkv: Tensor, spec: ModelSpec, rotary: Rotary) -> Tensor:
    """Attention-weighted means of `x [tokens, hidden]` for every head and every `STRIDE`th query: `[heads, n, hidden]`.

    qkv: its projections `[tokens, (heads + 2 kv_heads) * head_dim]`.
    """
    tokens, heads, kv_heads, dim = len(x), spec.num_heads, spec.num_kv_heads, spec.head_dim
    where = torch.arange(STRIDE - 1, tokens, STRIDE, device=x.device)
    cos, sin = rotary(torch.arange(tokens, device=x.device))
    by_head = qkv.view(tokens, -1, dim)
    k = rotate(by_head[:, heads : heads + kv_heads], (cos, sin))
    q = rotate(by_head[where, :heads], (cos[where], sin[where]))
    q = q.view(len(where), kv_heads, heads // kv_heads, dim)
    scale = spec.query_scale if spec.query_scale is not None else dim**-0.5
    scores = torch.einsum("qngd,knd->ngqk", q, k) * scale
    later = torch.arange(tokens, device=x.device) > where[:, None]
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return weights.flatten(0, 1) @ x


def default_text() -> str:
    """Python's help texts, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_calibration(path: str | Path) -> str:
    """The UTF-8 text in `path`; ConfigError when it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(CALIBRATION, str(path), f"cannot be read ({error})", "give a file of UTF-8 text") from None


__all__ = ["Inputs", "Moments", "attention_inputs", "default_text", "read_calibration"]
