"""Multi-head attention: every query head has its own KV head."""

from __future__ import annotations

from twinfer.core.spec import ModelSpec
from twinfer.plugins.attention.softmax import SoftmaxAttention


class MHA(SoftmaxAttention):
    name = "mha"
    summary = "Multi-head attention: one KV head per query head, the largest KV cache"
    reference = "Vaswani et al. 2017, arXiv:1706.03762"

    def num_kv_heads(self, model: ModelSpec) -> int:
        return model.num_heads
