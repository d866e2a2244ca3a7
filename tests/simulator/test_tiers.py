"""Memories of several speeds in a simulation: a decode step takes as long as its weights are read from where they lie."""

from __future__ import annotations

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import load_device
from twinfer.core.workload import Workload
from twinfer.simulator.run import simulate


@pytest.mark.parametrize(("model", "tier"), [("llama-3.1-8b", "HBM"), ("llama-3.1-70b", "DDR")])
def test_decoding_on_one_sn40l_reads_the_weights_from_their_tier(model: str, tier: str) -> None:
    spec, device = resolve_spec(model), load_device("sn40l")
    (memory,) = [t for t in device.tiers if t.name == tier]
    config = EngineConfig(model=model, device="sn40l", max_model_len=64)
    record = simulate(config, Workload(num_requests=1, input_len=16, output_len=4))
    read = spec.weight_bytes() - spec.vocab_size * spec.hidden_size * 2  # all but the token table
    assert record.metrics["tpot"]["mean"] == pytest.approx(read / memory.bandwidth, rel=0.02)


def test_a_model_is_spread_over_as_many_groq_chips_as_hold_it() -> None:
    config = EngineConfig(
        model="llama-3.1-8b", device="groq-lpu", tp=8, pp=32, max_num_batched_tokens=256, max_num_seqs=8,
        max_model_len=64, memory_fraction=1.0,
    )  # fmt: skip
    record = simulate(config, Workload(num_requests=1, input_len=16, output_len=4))
    whole = resolve_spec("llama-3.1-8b").weight_bytes()
    assert whole / config.layout.devices < load_device("groq-lpu").memory_bytes
    assert whole / config.layout.devices / 80e12 < record.metrics["tpot"]["mean"] < 1e-3
