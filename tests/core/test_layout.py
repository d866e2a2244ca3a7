"""Layouts: which groups go together, and which layers a stage has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.layout import ALONE, Layout

sizes = st.sampled_from([1, 2, 3, 4, 8])


@given(tp=sizes, pp=sizes, cp=sizes, dp=sizes, ep=sizes)
def test_devices_and_who_shares_an_expert(tp: int, pp: int, cp: int, dp: int, ep: int) -> None:
    if tp * dp % ep:
        with pytest.raises(ConfigError, match="--ep"):
            Layout(tp, pp, cp, dp, ep)
        return
    layout = Layout(tp, pp, cp, dp, ep)
    assert layout.devices == tp * pp * cp * dp
    assert layout.expert_tp * ep == tp * dp
    assert (str(layout) == "1") == (layout == ALONE)


@given(num_layers=st.integers(1, 130), pp=st.integers(1, 20))
def test_stages_are_consecutive_and_as_equal_as_they_can_be(num_layers: int, pp: int) -> None:
    if pp > num_layers:
        with pytest.raises(ConfigError, match="--pp"):
            Layout(pp=pp).stages(num_layers)
        return
    stages = Layout(pp=pp).stages(num_layers)
    assert len(stages) == pp and [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths), "the head is on the last"
    if num_layers % pp < pp - 1:
        assert lengths[0] == min(lengths), "the embedding is on the first"


def test_a_known_split() -> None:
    """Of 61 layers on 4 stages the odd one goes before the last stage."""
    assert [len(stage) for stage in Layout(pp=4).stages(61)] == [15, 15, 16, 15]


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "dp", "ep"])
def test_no_size_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name}=0"):
        Layout(**{name: 0})


def test_a_configuration_has_a_layout_and_devices_for_whole_replicas() -> None:
    config = EngineConfig(model="m", tp=4, pp=2, dp=2, ep=8, num_devices=32)
    assert config.layout == Layout(4, 2, 1, 2, 8) and config.layout.flags == "--tp 4 --pp 2 --dp 2 --ep 8"
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert EngineConfig(model="m").layout == ALONE
    with pytest.raises(ConfigError, match=r"--num-devices=24: one replica --tp 4 --pp 2 .* takes 16 device.*give 16"):
        EngineConfig(model="m", tp=4, pp=2, dp=2, num_devices=24)
    with pytest.raises(ConfigError, match=r"--ep=3: the 4 ranks"):
        EngineConfig(model="m", tp=4, ep=3)
