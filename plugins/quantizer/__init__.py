"""Built-in weight and KV formats."""

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.quantizer.bf16 import BF16
from twinfer.plugins.quantizer.fp4 import MXFP4, NVFP4
from twinfer.plugins.quantizer.fp8 import FP8
from twinfer.plugins.quantizer.gguf import GGUF
from twinfer.plugins.quantizer.gguf_type import GGUFType
from twinfer.plugins.quantizer.int4 import Int4
from twinfer.plugins.quantizer.int8 import Int8
from twinfer.plugins.quantizer.kv_formats import KVFP4, KVFP8, KVInt4, KVInt8
from twinfer.plugins.quantizer.weight_only import AWQ, GPTQ


@hookimpl
def register_quantizer(register: Register) -> None:
    for technique in (
        GGUF, BF16, FP8, Int8, Int4, GPTQ, AWQ, NVFP4, MXFP4, GGUFType, KVFP8, KVInt8, KVInt4, KVFP4,
    ):  # fmt: skip
        register(technique)
