"""What a machine says of itself."""

from __future__ import annotations

import pytest

from twinfer.core import host

AVX2 = "fpu avx avx2 fma f16c"


@pytest.mark.parametrize(
    ("flags", "found"),
    [(f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni", "AVX-512 VNNI"), (f"{AVX2} avx512f", "AVX2"),
     (AVX2, "AVX2"), ("fpu avx fma", "none"), ("", "none")],
)  # fmt: skip
def test_packed_products_follow_the_flags(flags: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cpu", lambda: {"flags": flags} if flags else {})
    monkeypatch.setattr(host.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "g++" else None)
    assert host.packed_products() == found


def test_no_packed_products_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cpu", lambda: {"flags": AVX2})
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    assert host.packed_products() == "none"
