"""Workloads: equal inputs give equal requests, distributions have the asked means, bad files are typed errors."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.errors import ConfigError, RequestError, TwinferError
from twinfer.core.request import Request
from twinfer.core.workload import Workload, generate, make_workload

VOCAB = 49152


def made(workload: Workload, vocab: int = VOCAB, context: int = 8192, **more: object) -> list[Request]:
    return generate(workload, vocab, context, **more)  # type: ignore[arg-type]


def first_blocks(prompt: Sequence[int], size: int = 16) -> tuple[int, ...]:
    return tuple(prompt[:size])


def test_equal_workloads_give_equal_requests_and_seeds_differ() -> None:
    workload = Workload(num_requests=50, rate=3.0, lengths="lognormal", spread=0.5)
    assert made(workload) == made(Workload(**workload.plain()))
    assert made(workload) != made(workload.model_copy(update={"seed": 1}))


def test_synthetic_requests_have_the_asked_lengths_and_arrive_at_once_by_default() -> None:
    requests = made(Workload(num_requests=7, input_len=33, output_len=5))
    assert [r.id for r in requests] == [f"r{i}" for i in range(7)]
    assert {len(r.prompt) for r in requests} == {33}
    assert {r.params.max_tokens for r in requests} == {5}
    assert all(r.params.ignore_eos and r.arrival == 0 for r in requests)


@pytest.mark.parametrize(("lengths", "spread"), [("uniform", 0.5), ("lognormal", 0.7)])
def test_mean_length_is_kept(lengths: str, spread: float) -> None:
    requests = made(make_workload(num_requests=4000, input_len=400, output_len=80, lengths=lengths, spread=spread))
    mean_in = sum(len(r.prompt) for r in requests) / len(requests)
    mean_out = sum(r.params.max_tokens for r in requests) / len(requests)
    assert mean_in == pytest.approx(400, rel=0.05)
    assert mean_out == pytest.approx(80, rel=0.05)
    if lengths == "uniform":
        assert min(len(r.prompt) for r in requests) >= 200 and max(len(r.prompt) for r in requests) <= 600


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    requests = made(Workload(num_requests=5000, rate=4.0))
    gaps = [b.arrival - a.arrival for a, b in itertools.pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert requests[0].arrival == 0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.08)


def test_rate_does_not_change_lengths() -> None:
    slow = made(Workload(num_requests=30, rate=1.0, lengths="uniform", spread=0.9))
    fast = made(Workload(num_requests=30, rate=9.0, lengths="uniform", spread=0.9))
    assert [r.prompt for r in slow] == [r.prompt for r in fast]


@pytest.mark.parametrize("vocab", [128, 1000, VOCAB])
@pytest.mark.parametrize("length", [16, 100, 3000])
def test_prompts_stay_in_the_vocabulary_and_share_no_block(vocab: int, length: int) -> None:
    requests = made(Workload(num_requests=300, input_len=length, output_len=1), vocab=vocab)
    assert all(min(r.prompt) >= 0 and max(r.prompt) < vocab and len(r.prompt) == length for r in requests)
    assert len({first_blocks(r.prompt) for r in requests}) == 300


def test_shared_prefix_is_shared_within_its_group_only() -> None:
    requests = made(Workload(num_requests=20, input_len=64, shared_prefix=48, num_prefixes=2))
    assert {len(r.prompt) for r in requests} == {64}
    assert len({tuple(r.prompt[:48]) for r in requests}) == 2
    assert len({tuple(r.prompt) for r in requests}) == 20


def test_bad_numbers_name_the_option() -> None:
    for given, option in (
        ({"rate": -1}, "--rate"), ({"rate": 0}, "--rate"), ({"rate": float("nan")}, "--rate"),
        ({"num_requests": 0}, "--requests"), ({"input_len": 0}, "--input-len"), ({"output_len": -3}, "--output-len"),
        ({"spread": 0.5}, "--spread"), ({"lengths": "uniform", "spread": 1.5}, "--spread"),
        ({"shared_prefix": 512}, "--shared-prefix"), ({"rate": "fast"}, "--rate"), ({"lengths": "zipf"}, "--lengths"),
        ({"nonsense": 1}, "nonsense"), ({"trace": "x.csv", "prompts": ["a"]}, "--trace"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            make_workload(**given)
        assert error.value.option == option
        assert "\n" not in str(error.value)


def test_infinite_rate_survives_json() -> None:
    workload = Workload(rate=math.inf, num_requests=3)
    assert Workload(**json.loads(json.dumps(workload.plain()))) == workload


# --- traces ---------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""


def test_azure_trace_keeps_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    requests = made(Workload(trace=str(path)))
    assert [len(r.prompt) for r in requests] == [374, 396, 879]
    assert [r.params.max_tokens for r in requests] == [44, 109, 1]  # no answer counts as one token
    assert [r.arrival for r in requests] == pytest.approx([0, 4.314579, 4.541977], abs=2e-6)
    assert len(made(Workload(trace=str(path), num_requests=2))) == 2
    assert {r.arrival for r in made(Workload(trace=str(path), rate=math.inf))} == {0.0}


def test_filter_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    assert len(made(Workload(trace=str(path), too_long="filter"), context=600)) == 2
    assert len(made(Workload(trace=str(path)), context=600)) == 3
    with pytest.raises(ConfigError, match="no request fits"):
        made(Workload(trace=str(path), too_long="filter"), context=10)


def test_mooncake_blocks_give_equal_tokens_for_equal_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1500, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 3500, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 11]},
        {"timestamp": 3500, "input_length": 20, "output_length": 4},
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    a, b, c = made(Workload(trace=str(path)))
    assert [a.arrival, b.arrival, c.arrival] == [0.0, 2.5, 2.5]
    assert a.prompt[:1024] == b.prompt[:1024]
    assert a.prompt[1024:1040] != b.prompt[1024:1040]
    assert len(a.prompt) == 1500 and len(list(a.prompt)) == 1500 and a.prompt[1499] == a.prompt[-1]
    assert a.prompt[510:514] == [a.prompt[i] for i in range(510, 514)]
    assert a.prompt[0:600:7] == list(a.prompt)[0:600:7]
    assert len(c.prompt) == 20


def test_prompts_file_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "hello wide world", "output_len": 9}\n\n'
        '{"prompt": [5, 6, 7], "temperature": 0.5}\n{"prompt_len": 40, "_note": "synthetic"}\n'
    )
    workload = Workload(trace=str(path), output_len=4)
    requests = made(workload, encode=lambda text: [len(word) for word in text.split()])
    assert list(requests[0].prompt) == [5, 4, 5]
    assert [r.params.max_tokens for r in requests] == [9, 4, 4]
    assert requests[1].params.temperature == 0.5
    assert len(requests[2].prompt) == 40
    assert len(made(workload)[0].prompt) == 4  # no tokenizer: 16 bytes / 4
    texts = made(Workload(prompts=("abcdefgh", "x"), output_len=2))
    assert [len(r.prompt) for r in texts] == [2, 1]
    assert [tuple(r.prompt) for r in made(Workload(prompt_tokens=((1, 2), (3,))))] == [(1, 2), (3,)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", None, "no such file"),
        ("a.txt", None, "no such file"),
        (".", None, "is no regular file"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "column GeneratedTokens is missing"),
        ("a.csv", "", "column TIMESTAMP is missing"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,many,3\n", "row 5: ContextTokens='many'"),
        ("a.csv", AZURE + "yesterday,4,3\n", "row 5: TIMESTAMP='yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,4\n", "row 5 has no GeneratedTokens"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 4}\n', "line 1 has no 'output_length'"),
        ("a.jsonl", '{"timestamp": "x", "input_length": 4, "output_length": 1}\n', "line 1: timestamp"),
        ("a.jsonl", '{"input_length": -4, "timestamp": 0, "output_length": 1}\n', "input_length=-4"),
        ("a.jsonl", "{not json\n", "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "not a JSON object"),
        ("a.jsonl", "", "no workload plugin can read it"),
        ("a.txt", "hello", "no workload plugin can read it"),
        ("a.jsonl", '{"prompt": ""}\n', "line 1 is empty"),
        ("a.jsonl", '{"prompt": [99999999]}\n', "token id 99999999"),
        ("a.jsonl", '{"prompt": 5}\n', "neither a text nor a list"),
        ("a.jsonl", '{"prompt": "x", "max_tokens": 5}\n', "unknown field 'max_tokens'"),
        ("a.jsonl", '{"prompt": "x", "arrival": -5}\n', "arrival=-5"),
        ("a.jsonl", '{"prompt": "x", "arrival": NaN}\n', "arrival=nan"),
        ("a.jsonl", '{"prompt": "x", "arrival": 1}\n{"prompt": "x"}\n', "1 of 2 requests have an arrival time"),
        ("a.jsonl", '{"prompt": "x", "prompt_len": 9}\n', "prompt and prompt_len"),
        ("a.jsonl", '{"prompt": "\\ud800"}\n', "surrogate"),
        ("a.jsonl", '{"prompt_len": 9999999999}\n', "prompt_len=9999999999"),
        ("a.jsonl", '{"prompt_len": 2.5}\n', "prompt_len=2.5"),
        ("a.jsonl", '{"prompt_len": ' + "9" * 5000 + "}\n", "not JSON"),
        ("a.jsonl", "[" * 100_000, "not JSON"),
        ("a.jsonl", '{"timestamp": NaN, "input_length": 4, "output_length": 1}\n', "line 1: timestamp"),
        ("a.jsonl", '{"timestamp": 0, "input_length": Infinity, "output_length": 1}\n', "input_length=inf"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [Infinity]}', "hash_ids"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,99999999999999999999,3\n", "ContextTokens='99999999999999999999'"),
        ("a.csv", AZURE + f"2023-11-16 18:15:51,{'9' * 5000},3\n", "999...' is not a count of tokens"),
        ("a.csv", AZURE + "0001-01-01 00:00:00,5,3\n", "s after the first; give times in seconds, at most 1e9 apart"),
        (
            "a.jsonl",
            f'{{"arrival": 1{"0" * 400}, "prompt_tokens": 5, "output_tokens": 2}}',
            "000...0 is not a number of seconds",
        ),
    ],
)
def test_bad_files_are_one_line_errors(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(TwinferError) as error:
        made(Workload(trace=str(path)))
    assert says in str(error.value) and "\n" not in str(error.value)
    assert isinstance(error.value, ConfigError | RequestError)


def test_a_file_that_is_no_text_is_a_one_line_error(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(AZURE.encode() + b"\xff\xfe\x00\x84")
        with pytest.raises(ConfigError, match="not a UTF-8 text file"):
            made(Workload(trace=str(tmp_path / name)))


@pytest.mark.parametrize(
    "given",
    [{"num_requests": 10**22}, {"input_len": 10**9}, {"output_len": 10**30}, {"rate": 1e-320}, {"trace": ""}],
)
def test_numbers_beyond_any_use_are_refused_at_once(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_workload(**given)


def test_a_long_prompt_costs_no_memory_and_its_slices_agree() -> None:
    (request,) = made(Workload(num_requests=1, input_len=2**24), vocab=100)
    prompt = request.prompt
    assert len(prompt) == 2**24 and set(prompt[:200]) == set(range(100))
    assert [prompt[i] for i in range(90, 130)] == list(prompt[90:130]) and prompt[-1] == prompt[2**24 - 1]


def test_unknown_source_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known: .*synthetic"):
        made(make_workload(source="nobody"))


def test_azure_conversation_trace_is_read_whole(shared_dir: Path) -> None:
    requests = made(Workload(trace=str(shared_dir / "data/traces/azure_2023_conv.csv")), context=16384)
    assert len(requests) == 19366
    assert sum(len(r.prompt) for r in requests) / len(requests) == pytest.approx(1154.7, abs=0.1)


def test_mooncake_trace_shares_prefixes(shared_dir: Path) -> None:
    requests = made(Workload(trace=str(shared_dir / "data/traces/mooncake_synthetic.jsonl"), num_requests=500))
    firsts = [tuple(r.prompt[:512]) for r in requests]
    assert len(set(firsts)) < len(firsts)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variance_that_was_asked_for(burstiness: float) -> None:
    workload = Workload(num_requests=20_000, rate=5.0, burstiness=burstiness)
    times = [r.arrival for r in generate(workload, 100, 10_000)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    assert statistics.variance(gaps) / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    workload = Workload(num_requests=20_000, rate=10.0, ramp_to=30.0)
    times = [r.arrival for r in generate(workload, 100, 10_000)]
    assert times == sorted(times) and times[-1] == pytest.approx(2 * 20_000 / 40.0, rel=0.03)
    first, last = sum(t < 50 for t in times), sum(times[-1] - 50 < t for t in times)
    assert first / 50 == pytest.approx(10.5, rel=0.15) and last / 50 == pytest.approx(29.5, rel=0.1)


@pytest.mark.parametrize(
    ("given", "option"),
    [({"concurrency": 0}, "--concurrency"), ({"concurrency": 2, "rate": 3.0}, "--concurrency"),
     ({"burstiness": 0.5}, "--burstiness"), ({"burstiness": 0.0, "rate": 1.0}, "--burstiness"),
     ({"ramp_to": 3.0}, "--ramp-to"), ({"ramp_to": 0.0, "rate": 1.0}, "--ramp-to"),
     ({"ramp_to": 3.0, "rate": math.inf}, "--rate")],
)  # fmt: skip
def test_loads_that_contradict_themselves_are_refused(given: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        make_workload(**given)


MOONCAKE = '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": %s}\n'


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", AZURE.replace(",", ";"), "commas must be between columns, not ';'"),
        ("a.csv", AZURE.replace(",", "\t"), "commas must be between columns, not '\\t'"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,4,3,9,9\n", "row 5 has 2 cells more than the header"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,1_0,3\n", "row 5: ContextTokens='1_0'"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,\u0661\u0662,3\n", "row 5: ContextTokens="),
        ("a.csv", AZURE + "2023-11-16 18:15:51,,3\n", "row 5: ContextTokens=''"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,nan,3\n", "row 5: ContextTokens='nan'"),
        ("a.csv", "TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", "column ContextTokens is there twice"),
        ("a.csv", "2023-11-16 18:15:51,4,3\n", "column TIMESTAMP is missing"),
        ("a.jsonl", MOONCAKE % ("true", "[1, 2]"), "line 1: timestamp=True"),
        ("a.jsonl", MOONCAKE % (0, "[1.5, 2]"), "line 1: hash_ids=[1.5, 2]"),
        ("a.jsonl", MOONCAKE % (0, '"12"'), "line 1: hash_ids='12'"),
        ("a.jsonl", MOONCAKE % (0, "[1]"), "1 hash_ids of 512 tokens do not cover input_length=600"),
        ("a.jsonl", "", "it is empty"),
        ("a.csv.gz", "\x1f", "unpack it first"),
    ],
)
def test_nothing_of_a_dirty_file_is_dropped_in_silence(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        made(Workload(trace=str(path)))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_compressed_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(gzip.compress(AZURE.encode()))
    with pytest.raises(ConfigError, match="gunzip"):
        made(Workload(trace=str(tmp_path / "a.csv")))


@pytest.mark.parametrize("change", [lambda s: "\ufeff" + s, lambda s: s.replace("\n", "\r\n"), lambda s: s + "\n\n"])
def test_marks_line_ends_and_blank_lines_change_nothing(tmp_path: Path, change: Any) -> None:
    for name, text in (("a.csv", AZURE), ("a.jsonl", MOONCAKE % (0, "[1, 2]") + MOONCAKE % (5, "[1, 3]"))):
        requests = []
        for content in (text, change(text)):
            (tmp_path / name).write_bytes(content.encode())
            requests.append(made(Workload(trace=str(tmp_path / name))))
        assert requests[0] == requests[1] and len(requests[0]) > 1


def test_rows_in_any_order_and_times_of_no_zone_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2023-03-26 clocks of Berlin went from 2:00 to 3:00: a trace knows nothing of that."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        rows = ["2023-03-26 03:30:00,30,1", "2023-03-26 01:30:00,10,1", "2023-03-26 02:30:00+00:00,20,1"]
        (tmp_path / "a.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
        requests = made(Workload(trace=str(tmp_path / "a.csv")))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [(r.arrival, len(r.prompt)) for r in requests] == [(0.0, 10), (3600.0, 20), (7200.0, 30)]
