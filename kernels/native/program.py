"""A recorded list of kernel calls that runs as one call: what a captured graph is on a GPU.

A decode step of a small model is some hundred kernels of a few microseconds, and calling them from Python takes as
long as they do. `Program.record` runs a function once, noting every native call with its arguments; `run` repeats
those calls.

Invariants
* Nothing but native calls may compute: any operation of torch that is not a view refuses the recording, with its name
  in `refusal`. So a complete recording does all that the function did.
* Results of kernels lie in memory of the program, which returns to its pool when the last view of it dies; the same
  calls in the same order never meet a buffer that is still needed.
* Inputs are the tensors that the recorded function read: new ones are copied into them before `run`. Whatever the
  function held on to (weights, caches, structures) must stay where it is.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinfer.kernels import native

_LINE = 16  # floats


class Program:
    """Calls with fixed arguments."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why it cannot be run; empty when it can."""
        self.marks: list[str] = []
        self._calls: list[tuple[int, list[int]]] = []
        self._buffers: dict[int, list[NDArray[np.float32]]] = {}
        self._stamps = np.zeros(0, dtype=np.int64)
        self._thread = threading.get_ident()

    # --- recording ----------------------------------------------------------------------------------

    @classmethod
    def record(cls, function: Callable[[Callable[[str], None]], Tensor]) -> tuple[Program, Tensor]:
        """(program, result) of `function(mark)`; its marks become time stamps."""
        program = cls()
        with native.recording(program), _OnlyViews(program):
            result = function(program._mark)
        program._finish()
        return program, result

    def is_here(self) -> bool:
        """Whether this thread is the one that records."""
        return threading.get_ident() == self._thread

    def add(self, name: str, words: int, argtypes: Sequence[Any], args: Sequence[Any]) -> None:
        """Note a call; `words` is the address of the function's `TW_RECORDABLE` twin."""
        if not words:
            self.refuse(name)
            return
        self._calls.append((words, [_word(t, a) for t, a in zip(argtypes, args, strict=True)]))

    def empty(self, rows: int, width: int) -> Tensor:
        """Memory that is free until the last view of the result dies."""
        size = -(-rows * width // _LINE) * _LINE + _LINE
        free = self._buffers.setdefault(size, [])
        buffer = free.pop() if free else np.zeros(size, dtype=np.float32)
        skip = -buffer.ctypes.data // 4 % _LINE
        piece = buffer[skip : skip + rows * width]
        weakref.finalize(piece, free.append, buffer).atexit = False
        return torch.from_numpy(piece).view(rows, width)

    def refuse(self, why: str) -> None:
        self.refusal = self.refusal or why

    def _mark(self, name: str) -> None:
        self.marks.append(name)
        self._calls.append((0, []))  # filled in by `_finish`

    def _finish(self) -> None:
        library = native.load()
        if library is None:
            self.refuse("no native kernels")
            return
        self._stamps = np.zeros(len(self.marks) + 1, dtype=np.int64)
        self._mark_names = list(dict.fromkeys(self.marks))
        self._mark_index = np.array([self._mark_names.index(mark) for mark in self.marks], dtype=np.int64)
        at = self._stamps.ctypes.data
        stamp = library.function("tw_stamp", (ctypes.c_void_p,)).words
        calls = [(stamp, [at])]
        for address, words in self._calls:
            if not address:
                at += 8
            calls.append((address, words) if address else (stamp, [at]))
        self._words = np.array([word for _, words in calls for word in words], dtype=np.uint64)
        offsets = np.cumsum([0] + [len(words) for _, words in calls[:-1]], dtype=np.int64)
        pairs = [
            (address, self._words.ctypes.data + 8 * int(o)) for (address, _), o in zip(calls, offsets, strict=True)
        ]
        self._table = np.array(pairs, dtype=np.uint64)
        self._address = self._table.ctypes.data
        self._run = library.function("tw_run", (ctypes.c_void_p, ctypes.c_int64))

    # --- running ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Repeat the calls."""
        assert not self.refusal
        self._run(self._address, len(self._table))

    def seconds(self) -> dict[str, float]:
        """Time by mark of the last run: what passed since the mark before belongs to a mark."""
        if not self.marks:
            return {}
        sums = np.bincount(self._mark_index, np.diff(self._stamps) * 1e-9)
        return dict(zip(self._mark_names, sums.tolist(), strict=True))


class _OnlyViews(TorchDispatchMode):
    """Refuses the recording at the first operation that makes or changes data."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view and all(_same_memory(args[0], r) for r in _tensors(result))):
            self.program.refuse(str(func))
        return result


def _tensors(result: Any) -> Sequence[Tensor]:
    return result if isinstance(result, list | tuple) else (result,)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _word(kind: Any, value: Any) -> int:
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0) & 0xFFFFFFFFFFFFFFFF


__all__ = ["Program"]
