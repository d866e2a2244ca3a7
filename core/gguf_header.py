"""The header of a GGUF file: metadata and tensor list, read without the weights.

    magic "GGUF" | version u32 | tensor count u64 | key count u64 | keys | tensors | padding | data

Long arrays (the vocabulary) are skipped, so that a header is read in tens of milliseconds.
Layout: ggml/docs/gguf.md. Block sizes: ggml-common.h.

Invariants
* Whatever the bytes are, the outcome is a header or a ModelError: no other exception, no unbounded allocation.
* A file shorter than its tensor list says is a ModelError.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from twinfer.core.errors import ModelError

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
KEPT_ARRAY = 4096  # longer arrays are represented by their length, unless the caller wants them

# ggml type -> (name, values per block, bytes per block)
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


class Length(NamedTuple):
    """Stands for an array that was skipped."""

    num_entries: int


class TensorInfo(NamedTuple):
    """shape: row-major (outermost first), as torch has it.  nbytes: as stored."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    offset: int  # bytes from the start of the file

    @property
    def num_values(self) -> int:
        return prod(self.shape)


LONGEST_NAME = 256  # of a tensor; the format says 64


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_gguf_header(path: str | Path, kept_array: int = KEPT_ARRAY) -> GGUFHeader:
    """Metadata and tensors of the GGUF file at `path`; ModelError when it is missing, damaged or truncated.

    kept_array: longest array that is read in full.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(file, path, size, kept_array).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); give the path of a GGUF file") from None
    except (struct.error, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise ModelError(f"{path}: damaged GGUF file ({error}); download it again") from None


class _Reader:
    def __init__(self, file: BinaryIO, path: Path, size: int, kept_array: int) -> None:
        self.file, self.path, self.size, self.kept_array = file, path, size, kept_array

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}; download the file again")

    def bytes(self, count: int) -> bytes:
        if count > self.size:
            raise self.fail(f"damaged GGUF file (a length of {count} bytes in a file of {self.size})")
        data = self.file.read(count)
        if len(data) < count:
            raise self.fail("truncated GGUF file (it ends inside its header)")
        return data

    def number(self, fmt: str) -> Any:
        return struct.unpack(fmt, self.bytes(struct.calcsize(fmt)))[0]

    def text(self) -> str:
        return self.bytes(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth > 2:
            raise self.fail(f"damaged GGUF file (metadata value of unknown type {kind})")
        inner, count = self.number("<I"), self.number("<Q")
        if count > self.size:
            raise self.fail(f"damaged GGUF file (an array of {count} entries in a file of {self.size} bytes)")
        kept = count <= self.kept_array
        if inner in SCALARS:
            data = self.bytes(count * struct.calcsize(SCALARS[inner]))
            return list(struct.unpack(f"<{count}{SCALARS[inner][1]}", data)) if kept else Length(count)
        entries = self.texts(count, kept) if inner == STRING else [self.value(inner, depth + 1) for _ in range(count)]
        return entries if kept else Length(count)

    def texts(self, count: int, kept: bool) -> list[str]:
        """A vocabulary has a quarter of a million: this is the loop that a header is read in."""
        read, length_of, size = self.file.read, struct.Struct("<Q").unpack, self.size
        found = []
        for _ in range(count):
            (length,) = length_of(read(8))
            if length > size:
                raise self.fail(f"damaged GGUF file (a length of {length} bytes in a file of {size})")
            data = read(length)
            if len(data) < length:
                raise self.fail("truncated GGUF file (it ends inside its header)")
            if kept:
                found.append(data.decode("utf-8", "replace"))
        return found

    def header(self) -> GGUFHeader:
        if self.file.read(4) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it does not start with 'GGUF'); give a .gguf file")
        version = self.number("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; convert it to version 3")
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        if max(num_tensors, num_keys) > self.size:
            raise self.fail(f"damaged GGUF file ({num_tensors} tensors and {num_keys} keys in {self.size} bytes)")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            metadata[key] = self.value(self.number("<I"))
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.fail(f"damaged GGUF file (alignment {alignment!r})")
        start = -(-self.file.tell() // alignment) * alignment
        tensors = {info.name: info._replace(offset=start + info.offset) for info in infos}
        for info in tensors.values():
            if info.offset % alignment:
                raise self.fail(f"damaged GGUF file ({info.name} starts at byte {info.offset}, off its alignment)")
            if info.offset + info.nbytes > self.size:
                raise self.fail(
                    f"truncated GGUF file ({info.name} ends at byte {info.offset + info.nbytes} of {self.size})"
                )
        return GGUFHeader(metadata, tensors)

    def tensor(self) -> TensorInfo:
        name = self.text()
        if len(name) > LONGEST_NAME:
            raise self.fail(f"damaged GGUF file (a tensor's name of {len(name)} characters)")
        dims = self.number("<I")
        if dims > 4:
            raise self.fail(f"damaged GGUF file ({name!r} has {dims} dimensions)")
        shape = tuple(reversed([self.number("<Q") for _ in range(dims)]))
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in TYPES:
            known = ", ".join(t[0] for t in TYPES.values())
            raise ModelError(f"{self.path}: tensor {name!r} has unknown type {kind}; known: {known}")
        type_name, values, nbytes = TYPES[kind]
        if prod(shape) % values:
            raise self.fail(f"damaged GGUF file ({name!r} of shape {shape} does not fill blocks of {values})")
        return TensorInfo(name, shape, type_name, prod(shape) // values * nbytes, offset)
