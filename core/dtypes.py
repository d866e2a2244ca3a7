"""Names and sizes of number formats, for weights, activations and KV.

Invariants
* Sizes are of the values alone unless the format is a block format (`q8_0`, ...), whose scales are part of
  its name; scales of `int8`, `int4`, `fp8` are counted by the technique that adds them.
* One canonical name per format; aliases users type (`fp16`, `bf16`) are resolved at the edge.
"""

from __future__ import annotations

from difflib import get_close_matches

from twinfer.core.errors import ConfigError

# Block formats: values per block and bytes per block (GGUF layout, ggml-common.h).
BLOCKS = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "mxfp4": (32, 17),
}  # fmt: skip

BYTES = {
    "float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0,
    "fp8": 1.0, "fp8_e5m2": 1.0, "int8": 1.0, "int4": 0.5, "fp4": 0.5,
    **{name: size / values for name, (values, size) in BLOCKS.items()},
}  # fmt: skip
"""Bytes per value."""

ALIASES = {
    "fp64": "float64", "f64": "float64", "fp32": "float32", "f32": "float32", "float": "float32",
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16",
    "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip


def dtype_bytes(dtype: str) -> float:
    """Bytes per value of a canonical format; `int4` is half a byte."""
    try:
        return BYTES[dtype]
    except KeyError:
        return BYTES[canonical_dtype(dtype)]


def dtype_bits(dtype: str) -> float:
    """Bits per value."""
    return 8 * dtype_bytes(dtype)


def canonical_dtype(name: str, option: str = "dtype") -> str:
    """The one name of a format; raises ConfigError naming `option` for an unknown one."""
    key = name.lower().removeprefix("torch.").replace("-", "_")
    key = ALIASES.get(key, key)
    if key in BYTES:
        return key
    known = [*BYTES, *ALIASES]
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(option, name, "no such number format", f"{hint}known: {', '.join(BYTES)}")
