"""Multi-query attention: all query heads share one KV head."""

from __future__ import annotations

from twinfer.core.spec import ModelSpec
from twinfer.plugins.attention.softmax import SoftmaxAttention


class MQA(SoftmaxAttention):
    name = "mqa"
    summary = "Multi-query attention: one KV head for all query heads, the smallest KV cache"
    reference = "Shazeer 2019, arXiv:1911.02150"

    def num_kv_heads(self, model: ModelSpec) -> int:
        return 1
