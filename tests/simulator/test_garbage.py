"""The collector of cyclic garbage is as it was once no simulation runs any more."""

from __future__ import annotations

import gc

import pytest

from twinfer.simulator.garbage import RARELY, collected_rarely


def test_it_is_as_before_after_the_last_of_overlapping_runs() -> None:
    before = gc.get_threshold()
    with collected_rarely():
        assert gc.get_threshold() == RARELY
        with pytest.raises(RuntimeError), collected_rarely():
            raise RuntimeError
        assert gc.get_threshold() == RARELY
    assert gc.get_threshold() == before


def test_who_has_turned_it_off_finds_it_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with collected_rarely():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
