"""Acceptance from numbers and files: chances by hand, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.acceptance import Acceptance, by_depth, measured
from twinfer.core.errors import ConfigError


def file(folder: Path, content: Any) -> str:
    path = folder / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_ranks_that_are_not_given_share_what_is_left() -> None:
    found = by_depth((0.6, (0.5, 0.1)), again=0.25)
    assert found.chance(1) == 0.6 and found.chance(2, 1) == 0.1
    assert found.chance(1, 1) == pytest.approx(0.4 * 0.25)
    assert found.chance(1, 2) == pytest.approx(0.4 * 0.75 * 0.25)
    assert found.chance(2, 2) == pytest.approx(0.4 * 0.25)
    assert sum(found.chance(1, rank) for rank in range(200)) == pytest.approx(1)
    assert by_depth((0.6,)).chance(1, 1) == 0.0


def test_shares_by_position_become_chances(tmp_path: Path) -> None:
    """As published for an EAGLE-3 head of MiniCPM (vLLM pull request 24243): mean length 1 + their sum."""
    stayed = [0.58, 0.34, 0.22, 0.15, 0.11]
    found = measured(file(tmp_path, {"acceptance": stayed, "source": "somewhere"}), 5)
    reached, mean = 1.0, 1.0
    for depth, share in enumerate(stayed, 1):
        reached *= found.chance(depth)
        mean += reached
        assert reached == pytest.approx(share)
    assert mean == pytest.approx(1 + sum(stayed))
    assert measured(file(tmp_path, {"acceptance": stayed}), 2).depth == 2
    assert measured(file(tmp_path, {"acceptance": [0.5, 0, 0]}), 3).chance(3) == 0


def test_chances_by_rank_and_the_record_of_a_run(tmp_path: Path) -> None:
    assert measured(file(tmp_path, {"chances": [[0.5, 0.2], 0.4]}), 2) == Acceptance(((0.5, 0.2), (0.4,)))
    record = {"metrics": {"speculation": {"num_drafts": 9, "position_1": 0.8, "position_2": 0.4}}}
    assert measured(file(tmp_path, record), 2).known == ((0.8,), (0.5,))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ([0.5], "has none"),
        ({"acceptance": [0.5], "chances": [0.5]}, "acceptance and chances"),
        ({"acceptance": [0.5]}, "knows 1 depths, 2 tokens"),
        ({"acceptance": [0.5, 0.6]}, "do not rise"),
        ({"acceptance": [1.5, 0.6]}, "lie in 0 to 1"),
        ({"acceptance": "0.5"}, "a list"),
        ({"acceptance": [True, 0.1]}, "no number"),
        ({"chances": [[0.7, 0.7], 0.1]}, "add up to at most 1"),
        ({"chances": [[], 0.1]}, "none"),
        ({"metrics": {"ttft": {}}}, "checked no guesses"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: Any, words: str) -> None:
    path = file(tmp_path, content)
    with pytest.raises(ConfigError, match=words) as error:
        measured(path, 2)
    assert path in str(error.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        measured("nowhere.json", 2)
