"""Building and loading the native kernels: cached, safe beside other processes, and never in the way of a run."""

from __future__ import annotations

import ctypes
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinfer.core.host import packed_products
from twinfer.kernels import gemm, native, ops, torch_ops


def need_library() -> native.Library:
    library = native.load()
    assert library is not None, native.why_not()
    return library


def test_library_is_there_and_says_so() -> None:
    assert need_library().path.is_file()
    assert native.why_not() == ""


def test_the_machine_tells_the_instructions_without_the_library() -> None:
    need_library()
    assert packed_products() == (gemm.instructions() or "none")


def test_disabled_runs_the_twins() -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    with native.disabled():
        assert native.load() is None
        assert native.why_not() == "switched off"
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    assert native.load() is not None


def test_no_compiler(tmp_path: Path) -> None:
    library, why = native.build(tmp_path, ("no-such-compiler",))
    assert library is None
    assert why == "no C++ compiler found (looked for no-such-compiler)"


def fake_compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "fake-c++"
    path.write_text(f"#!{sys.executable}\nimport subprocess, sys\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def quick_compiler(tmp_path: Path) -> str:
    """Builds a library of one function, whatever it is given."""
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    return fake_compiler(
        tmp_path,
        f"sys.exit(subprocess.call(['c++', '-shared', '-fPIC', '-o', sys.argv[-1], {str(source)!r}]) "
        "if '-o' in sys.argv else 0)",
    )


def test_built_once_and_found_again(tmp_path: Path) -> None:
    cache, quick = tmp_path / "cache", quick_compiler(tmp_path)
    first, _ = native.build(cache, (quick,))
    assert first is not None
    written = first.path.stat().st_mtime_ns
    second, _ = native.build(cache, (quick,))
    assert second is not None
    assert second.path == first.path
    assert first.path.stat().st_mtime_ns == written
    assert [p.name for p in cache.iterdir()] == [first.path.name], "no half-built file is left"


def test_failing_compiler_says_why(tmp_path: Path) -> None:
    broken = fake_compiler(tmp_path, "sys.stderr.write('file.cpp:1: error: no such thing\\nbye\\n'); sys.exit(1)")
    library, why = native.build(tmp_path / "cache", (broken,))
    assert library is None
    assert why == "fake-c++: file.cpp:1: error: no such thing"
    assert list((tmp_path / "cache").iterdir()) == []


def test_refused_flags_are_left_out(tmp_path: Path) -> None:
    picky = fake_compiler(
        tmp_path,
        "if '-fopenmp' in sys.argv: sys.exit('error: unsupported option -fopenmp')\n"
        "sys.exit(subprocess.call(['c++', *sys.argv[1:]]))",
    )
    library, why = native.build(tmp_path / "cache", (picky,))
    assert library is not None, why
    assert "-fopenmp" not in library.flags
    assert not library.threaded
    again, _ = native.build(tmp_path / "cache", (picky,))
    assert again is not None
    assert again.path == library.path


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these instructions are of x86")
@pytest.mark.parametrize("cpu", ["cascadelake", "haswell", "x86-64"])
def test_products_compile_for_other_cpus(cpu: str) -> None:
    """AVX-512 VNNI, AVX2 and neither: a machine runs one of them."""
    compiler = next(found for name in native.COMPILERS if (found := shutil.which(name)))
    for source in Path(native.__file__).parent.glob("gemm*.cpp"):
        command = [compiler, "-std=c++17", f"-march={cpu}", "-fsyntax-only", str(source)]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize("left", [0, 5000])
def test_a_damaged_file_is_built_again(left: int, tmp_path: Path) -> None:
    """Mapping a library that was cut short ends the process with a bus error."""
    cache, quick = tmp_path / "cache", quick_compiler(tmp_path)
    first, why = native.build(cache, (quick,))
    assert first is not None, why
    whole = first.path.read_bytes()
    first.path.unlink()  # this process has it mapped
    first.path.write_bytes(whole[:left])
    second, why = native.build(cache, (quick,))
    assert second is not None, why
    assert second.path.read_bytes() == whole
    assert second.function("one", (), ctypes.c_int)() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory map")
def test_one_openmp_runtime() -> None:
    code = (
        "import torch; from twinfer.kernels import native; native.load(); torch.ones(1 << 20).sum();"
        "print(*sorted({l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l or 'iomp' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1
