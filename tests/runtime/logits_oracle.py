"""Tiny random checkpoints in transformers and here, and logits of both, float32.

`run` feeds ragged packed batches through a paged cache whose blocks are scattered; `TinyModel.expected` asks
transformers for one whole sequence.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from twinfer.core.hf_config import spec_from_hf
from twinfer.core.plan import Need
from twinfer.core.registry import Registry
from twinfer.core.runtime.attention_latent import LatentAttention
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.batch import PackedRow, pack
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.kv_storage import KVStorage, Table
from twinfer.core.runtime.profile import silent
from twinfer.core.spec import ModelSpec

TOLERANCE = 1e-4
VOCAB = 97
BASE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    pad_token_id=2,
)  # fmt: skip


class TinyModel:
    """A random checkpoint of `{architecture}ForCausalLM` in both implementations.

    context: what the engine would be told to serve, where it is less than the model's.
    """

    def __init__(
        self, folder: Path, architecture: str, changes: dict[str, Any], *, shards: int = 1, context: int | None = None
    ) -> None:
        from dataclasses import replace

        import transformers

        kind = "Gemma3Text" if architecture == "Gemma3" else architecture
        self.config = getattr(transformers, f"{kind}Config")(**(BASE | changes))
        self.config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.reference = getattr(transformers, f"{architecture}ForCausalLM")(self.config).float().eval()
            for name, tensor in (*self.reference.named_parameters(), *self.reference.named_buffers()):
                if name.endswith(("bias", "norm.weight")):  # both are constants in a fresh model
                    tensor.data.add_(torch.randn_like(tensor) * 0.2)
        size = sum(t.nbytes for t in self.reference.parameters())
        self.reference.save_pretrained(
            folder, max_shard_size=f"{size // shards // 1000 + 1}KB" if shards > 1 else "1GB"
        )
        self.folder = folder
        spec = spec_from_hf(self.config.to_dict() | {"architectures": [f"{architecture}ForCausalLM"]}, "tiny")
        self.spec = replace(spec, max_context=context) if context is not None else spec
        self.model = load_model(self.spec, folder, Registry(entry_points=False))

    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """transformers' logits of the whole sequence at once, `[tokens, vocab]`."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(tokens)])).logits[0]


def tables_for(kv: KVStorage, lengths: Sequence[int], order: str) -> list[Table]:
    """Block tables that hold `lengths` tokens: "contiguous", or "shuffled" over the whole pool."""
    blocks = list(range(kv.num_blocks))
    if order == "shuffled":
        random.Random(5).shuffle(blocks)
    free = iter(blocks)
    tables = [kv.new_table() for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        table.append(list(itertools.islice(free, -(-length // kv.block_size))))
    return tables


def step_attention(spec: ModelSpec) -> Any:
    """The torch attention that serves `spec`."""
    return LatentAttention(spec) if spec.mla is not None and spec.mla.absorbed else attention_of(spec)


def marks_of(tiny: TinyModel, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Ops that a step over whole `sequences` reports, in order."""
    kv = KVStorage.of(tiny.spec, 32, 4)
    tables = tables_for(kv, [len(s) for s in sequences], "shuffled")
    batch = pack([PackedRow(s, 0, Need.LAST, table) for s, table in zip(sequences, tables, strict=True)])
    marks: list[str] = []
    with torch.inference_mode():
        step = step_attention(tiny.spec).step(batch, kv)
        tiny.model.forward(batch.tokens, batch.positions, step, batch.logits_index, marks.append)
    return marks


def run(
    tiny: TinyModel,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
    order: str,
    block_size: int = 4,
    kv_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """All logits of each sequence, fed in `chunks[i]` pieces; step n feeds the nth chunk of every sequence."""
    kv = KVStorage.of(tiny.spec, 128, block_size, kv_dtype or tiny.model.dtype)
    tables = tables_for(kv, [len(s) for s in sequences], order)
    attention = step_attention(tiny.spec)
    done = [0] * len(sequences)
    out: list[list[torch.Tensor]] = [[] for _ in sequences]
    with torch.inference_mode():
        for sizes in itertools.zip_longest(*chunks, fillvalue=0):
            fed = [i for i, size in enumerate(sizes) if size]
            rows = [PackedRow(sequences[i][done[i] : done[i] + sizes[i]], done[i], Need.ALL, tables[i]) for i in fed]
            batch = pack(rows)
            step = attention.step(batch, kv)
            logits = tiny.model.forward(batch.tokens, batch.positions, step, batch.logits_index, silent)
            for i, part in zip(fed, logits.split([sizes[i] for i in fed]), strict=True):
                out[i].append(part.clone())
                done[i] += sizes[i]
    assert done == [len(s) for s in sequences]
    return [torch.cat(parts) for parts in out]


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, with a check that the logits say something at all."""
    assert expected.std() > 0.1
    return float((got - expected).abs().max())


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def chunked(length: int, size: int) -> list[int]:
    return [min(size, length - at) for at in range(0, length, size)]
