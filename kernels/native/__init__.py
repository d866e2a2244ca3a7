"""CPU kernels in C++: built once by the system's compiler, loaded through ctypes.

`load()` is the library or None; `why_not()` says in words why there is none. Every caller has a torch twin to fall back
to, so a missing or failing compiler costs speed and nothing else.

Invariants
* A plain C ABI of pointers, sizes and strides: no headers of Python or torch are needed to build it.
* Built files lie in the user's cache folder, keyed by sources, flags, compiler and CPU. They are written under another
  name and renamed, so processes may build at the same time and none reads half a file.
* A file's name ends in the digest of its content: one that was cut short or changed (a full disk, a copied folder) is
  built again, not mapped, for the loader would end the process.
* OpenMP is the runtime that torch has loaded: torch is imported first, and both name it alike. Kernels take the number
  of threads as an argument and change no setting of that runtime.
* Without OpenMP (a compiler that refuses the flag) kernels run on one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinfer.core.cache_folder import cache_dir
from twinfer.core.host import COMPILERS

if TYPE_CHECKING:
    from torch import Tensor

    from twinfer.kernels.native.program import Program

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
"""Tried in this order until the compiler takes them."""

TIMEOUT_S = 180

log = logging.getLogger(__name__)


class Function:
    """A C function of the library. While a program is recorded, calls are noted in it as well as made."""

    __slots__ = ("_raw", "name", "words")

    def __init__(self, name: str, raw: Any, words: Any) -> None:
        self.name, self._raw = name, raw
        self.words: int = ctypes.cast(words, ctypes.c_void_p).value or 0 if words is not None else 0
        """Address of its `TW_RECORDABLE` twin, 0 without one."""

    def __call__(self, *args: Any) -> Any:
        if _recording is not None and _recording.is_here():
            _recording.add(self.name, self.words, self._raw.argtypes, args)
        return self._raw(*args)


@dataclass(slots=True)
class Library:
    """The loaded kernels. `flags`: what they were built with."""

    path: Path
    flags: tuple[str, ...]
    _dll: ctypes.CDLL
    _functions: dict[str, Function] = field(default_factory=dict)

    @property
    def threaded(self) -> bool:
        """Whether kernels use more than one thread."""
        return "-fopenmp" in self.flags

    def function(self, name: str, argtypes: Sequence[Any], restype: Any = None) -> Function:
        """The C function `name`; looked up and typed the first time. AttributeError when there is none.

        Addresses are passed as integers. One with a `TW_RECORDABLE` twin can be part of a program (`program.h`).
        """
        found = self._functions.get(name)
        if found is None:
            raw = getattr(self._dll, name)
            raw.argtypes, raw.restype = list(argtypes), restype
            found = self._functions[name] = Function(name, raw, getattr(self._dll, f"{name}_words", None))
        return found


_lock = threading.Lock()
_tried = False
_library: Library | None = None
_reason = ""
_disabled = False
_recording: Program | None = None


def load() -> Library | None:
    """The library, built on the first call of the first process; None when it cannot be had (see `why_not`)."""
    global _tried, _library, _reason
    if _disabled:
        return None
    if not _tried:
        with _lock:
            if not _tried:
                try:
                    _library, _reason = build(cache_dir() / "native")
                except OSError as error:
                    _library = None
                    _reason = f"{error}; {cache_dir()} must be a folder that can be written and run from"
                except Exception as error:  # whatever a compiler or a library does: there are torch twins
                    _library, _reason = None, f"native kernels cannot be built: {error}"
                if _library is None:
                    log.warning("native CPU kernels are not used: %s", _reason)
                _tried = True
    return _library


def why_not() -> str:
    """Why `load()` gives None; empty when it gives a library."""
    return "switched off" if _disabled else ("" if load() is not None else _reason)


@contextmanager
def disabled() -> Iterator[None]:
    """Within it there is no library: everything runs on the torch twins. For whole models: see `ops` for when."""
    global _disabled
    before, _disabled = _disabled, True
    try:
        yield
    finally:
        _disabled = before


def empty(rows: int, width: int) -> Tensor:
    """A float32 `[rows, width]` for the result of a kernel; while a program is recorded, of the program's memory."""
    if _recording is not None and _recording.is_here():
        return _recording.empty(rows, width)
    import torch

    return torch.empty((rows, width), dtype=torch.float32)


@contextmanager
def recording(program: Program) -> Iterator[None]:
    """Within it, calls of this thread are noted in `program`. One program at a time."""
    global _recording
    assert _recording is None
    _recording = program
    try:
        yield
    finally:
        _recording = None


# --- building -------------------------------------------------------------------------------------


def build(folder: Path, compilers: Sequence[str] = COMPILERS) -> tuple[Library | None, str]:
    """(library, "") or (None, reason), with the built file in `folder`."""
    import torch  # noqa: F401 - its OpenMP runtime has to be there before ours is looked for

    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        return None, f"no C++ compiler found (looked for {', '.join(compilers)})"
    key = _key(compiler)
    for optional in OPTIONAL_FLAGS:
        flags = FLAGS + optional
        for path in sorted(folder.glob(f"{_stem(key, flags)}-*.so")):
            if _is_whole(path):
                return Library(path, flags, ctypes.CDLL(str(path))), ""
    folder.mkdir(parents=True, exist_ok=True)
    log.warning("building the native CPU kernels with %s (once, a few seconds)", compiler)
    reason = ""
    for optional in OPTIONAL_FLAGS:
        flags = FLAGS + optional
        built, error = _compile([compiler, *flags], sources, folder / _stem(key, flags))
        if built is not None:
            return Library(built, flags, ctypes.CDLL(str(built))), ""
        reason = reason or f"{Path(compiler).name}: {error}"
    return None, reason


def _stem(key: str, flags: Sequence[str]) -> str:
    return f"{key}-{_digest(' '.join(flags).encode())[:8]}"


def _is_whole(path: Path) -> bool:
    """Whether the content of a built file is what its name says."""
    try:
        return path.stem.rpartition("-")[2] == _digest(path.read_bytes())[:16]
    except OSError:
        return False


def _compile(command: Sequence[str], sources: Sequence[Path], stem: Path) -> tuple[Path | None, str]:
    """(`stem` with the digest of what was built, "") or (None, the compiler's last word)."""
    partial = stem.with_name(f"{stem.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        done = subprocess.run(
            [*command, *map(str, sources), "-o", str(partial)],
            capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            path = stem.with_name(f"{stem.name}-{_digest(partial.read_bytes())[:16]}.so")
            partial.replace(path)
            return path, ""
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        return None, lines[-1].strip() if lines else f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    finally:
        partial.unlink(missing_ok=True)


def _key(compiler: str) -> str:
    """Digest of everything the built code depends on besides the flags."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=TIMEOUT_S).stdout
    digest.update(compiler.encode() + version + _cpu().encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What `-march=native` looks at: two machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "cpu family", "model\t", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
