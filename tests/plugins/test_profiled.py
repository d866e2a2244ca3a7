"""Op times from a layer profile: interpolation, mixed batches, and folders that are not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import OpTime, host_op
from twinfer.core.registry import Registry
from twinfer.core.work import Op, RowShape, StepShape
from twinfer.plugins.op_time.profiled import SKEW, Profiled, read_profile

DEVICE = load_device("rtx-pro-6000", Registry(entry_points=False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,10\nqkv_proj,9,18\nqkv_proj,17,34\n")
    (tmp_path / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,700\n")
    grid = [(0, 0, 2, 100, 20), (0, 0, 2, 200, 30), (16, 0, 0, 0, 8), (16, 0, 2, 100, 24), (16, 0, 2, 200, 40)]
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", *(",".join(map(str, row)) for row in grid)]
    (tmp_path / "attention.csv").write_text("\n".join(lines) + "\n")
    read_profile.cache_clear()
    return tmp_path


def ask(folder: Path, op: Op) -> OpTime:
    answer = Profiled(Profiled.Options(folder=str(folder))).time(op, DEVICE)
    assert answer is not None
    return answer


def gemm(m: int) -> Op:
    return Op("qkv_proj", "gemm", 1.0, 1.0, 1.0, "bfloat16", shape=(m, 8, 8))


@pytest.mark.parametrize(
    ("m", "us", "source"), [(9, 18, "measured"), (5, 14, "interpolated"), (21, 42, "extrapolated")]
)
def test_layers_are_linear_between_points_and_go_on_beyond(folder: Path, m: int, us: float, source: str) -> None:
    answer = ask(folder, gemm(m))
    assert (answer.seconds, answer.source) == (pytest.approx(us * 1e-6), source)


def attention(*rows: tuple[int, int]) -> Op:
    return Op("attention", "attention", 1.0, 1.0, 1.0, "bfloat16", shape=(32, 8, 128, 128, 0),
              rows=tuple(RowShape(*row) for row in rows))  # fmt: skip


def test_decode_rows_are_read_at_their_mean_context_and_skew_costs_a_little(folder: Path) -> None:
    assert ask(folder, attention((1, 150), (1, 150))).seconds == pytest.approx(25e-6)
    assert ask(folder, attention((1, 100), (1, 200))).seconds == pytest.approx((25 + SKEW * 5) * 1e-6)


def test_mixed_batches_are_read_from_the_grid(folder: Path) -> None:
    assert ask(folder, attention((16, 16), (1, 100), (1, 100))).seconds == pytest.approx(24e-6)
    assert ask(folder, attention((16, 16))).seconds == pytest.approx(8e-6)


def test_what_is_not_profiled_goes_to_the_next_model(folder: Path) -> None:
    model = Profiled(Profiled.Options(folder=str(folder)))
    assert model.time(host_op(StepShape.decode(5)), DEVICE) is None
    assert model.time(Op("all_reduce", "comm", 0, 1, 1, "bfloat16", shape=(2,), comm_bytes=8), DEVICE) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("dense.csv", "layer,tokens\n", "no column 'time_us'"), ("attention.csv", None, "cannot be read"),
     ("per_sequence.csv", "layer,sequences,time_us\nlm_head,one,3\n", "sequences='one' is not a number")],
)  # fmt: skip
def test_a_folder_that_is_no_profile_is_refused_by_file(
    folder: Path, name: str, text: str | None, message: str
) -> None:
    path = folder / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ask(folder, gemm(1))
    assert name in str(caught.value)


def test_without_a_folder_it_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match="profiled:folder=DIR"):
        Profiled().time(gemm(1), DEVICE)
