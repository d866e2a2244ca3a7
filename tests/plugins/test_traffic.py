"""Traffic from files and sessions: what a source reads, which part of it, scaled and repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinfer.core.errors import ConfigError
from twinfer.core.request import Request
from twinfer.core.workload import generate, make_workload

VOCAB = 49152


def made(context: int = 8192, **workload: object) -> list[Request]:
    return generate(make_workload(**workload), VOCAB, context)


def azure(tmp_path: Path, num: int = 10) -> str:
    rows = [f"2023-11-16 18:15:{i:02d}.0000000,{100 + i},{10 + i}" for i in range(num)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return str(path)


def test_burstgpt_rows_are_read_with_their_times_and_models(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n118,ChatGPT,417,276,693,API log\n"
    )
    requests = made(trace=str(path))
    assert [(r.arrival, len(r.prompt), r.params.max_tokens) for r in requests] == [
        (0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276),
    ]  # fmt: skip
    only = made(trace=str(path), source="burstgpt:model=ChatGPT")
    assert [len(r.prompt) for r in only] == [472, 417]
    with pytest.raises(ConfigError, match=r"no row of it.*it has ChatGPT, GPT-4"):
        made(trace=str(path), source="burstgpt:model=Claude")
    path.write_text("Timestamp,Model,Request tokens,Response tokens\nsoon,GPT-4,1,1\n")
    with pytest.raises(ConfigError, match="row 2: Timestamp='soon'"):
        made(trace=str(path))


def test_conversations_become_sessions(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    chats = [
        {"id": "a", "conversations": [
            {"from": "gpt", "value": "an answer to nothing"}, {"from": "human", "value": "x" * 40},
            {"from": "gpt", "value": "y" * 80}, {"from": "human", "value": "z" * 20}, {"from": "gpt", "value": "w" * 8},
            {"from": "human", "value": "never answered"},
        ]},
        {"id": "b", "conversations": [{"from": "human", "value": "q"}]},
        {"id": "c", "conversations": [{"from": "user", "value": "q" * 12}, {"from": "assistant", "value": "r" * 4}]},
    ]  # fmt: skip
    path.write_text(json.dumps(chats))
    requests = made(trace=str(path), rate=2.0, think_time=3.0)
    assert [(len(r.prompt), r.params.max_tokens) for r in requests] == [(10, 20), (5, 2), (3, 1)]
    assert requests[0].follows is None and requests[2].follows is None
    follows = requests[1].follows
    assert follows is not None and follows.request_id == "r0" and follows.history_tokens == 30 and follows.think_s > 0
    assert requests[1].max_length == 37
    assert len(made(trace=str(path), turns=1)) == 2 and len(made(trace=str(path), num_requests=2)) == 2
    for text, says in (
        ("{}", "no workload plugin"), ('[{"x": 1}]', "conversation 1 has no list"),
        ('[{"conversations": [{"from": "dog", "value": "?"}]}]', "message 1 is from 'dog'"), ("[", "is not JSON"),
        ("[]", "holds no requests"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            made(trace=str(path))


def test_a_log_of_an_engine_is_traffic(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    rows = [
        {"queued_ts": 107.5, "input_toks": 30, "output_toks": 4},
        {"queued_ts": 100.0, "input_toks": 20, "output_toks": 3},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [(r.arrival, len(r.prompt)) for r in made(trace=str(path))] == [(0.0, 20), (7.5, 30)]
    path.write_text(json.dumps(rows[0]) + '\n{"queued_ts": 1, "input_toks": 2}')
    with pytest.raises(ConfigError, match="line 2 has no output; name it one of"):
        made(trace=str(path))


def test_a_stored_run_is_traffic(tmp_path: Path) -> None:
    from twinfer.core.records import RequestRecord, RunRecord
    from twinfer.core.run_store import RunStore

    record = RunRecord(id="run-1", world="simulator", created="", config={}, complete=True)
    record.requests = [
        RequestRecord(request_id=f"r{i}", arrival=2.0 * i, num_prompt_tokens=50 + i, num_output_tokens=5)
        for i in range(3)
    ]
    RunStore(tmp_path).save(record)
    (folder,) = [p.parent for p in tmp_path.rglob("record.json")]
    requests = made(trace=str(folder), rate_scale=2.0)
    assert [(r.arrival, len(r.prompt), r.params.max_tokens) for r in requests] == [(0, 50, 5), (1, 51, 5), (2, 52, 5)]


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    trace = azure(tmp_path)
    part = made(trace=trace, trace_start=2.0, trace_end=5.0)
    assert [(r.arrival, len(r.prompt)) for r in part] == [(0.0, 102), (1.0, 103), (2.0, 104)]
    assert len(made(trace=trace, trace_start=2.0, num_requests=4)) == 4
    with pytest.raises(ConfigError, match=r"no request .* comes then; its requests come in 9 s"):
        made(trace=trace, trace_start=50.0)
    with pytest.raises(ConfigError, match=r"--trace-end=1:"):
        made(trace=trace, trace_start=2.0, trace_end=1.0)
    with pytest.raises(ConfigError, match=r"--repeat.*there is no trace"):
        made(repeat="loop", num_requests=5)


def test_more_requests_than_rows_are_refused_looped_or_sampled(tmp_path: Path) -> None:
    trace = azure(tmp_path)
    with pytest.raises(ConfigError, match=r"--requests=25: .*has 10; ask for at most 10, or give --repeat"):
        made(trace=trace, num_requests=25)
    looped = made(trace=trace, num_requests=25, repeat="loop")
    assert [len(r.prompt) for r in looped] == [100 + i % 10 for i in range(25)]
    assert [r.arrival for r in looped] == [float(i) for i in range(25)]
    assert len({tuple(r.prompt[:16]) for r in looped}) == 25, "a loop is no cache hit"
    sampled = made(trace=trace, num_requests=3000, repeat="sample", rate=5.0)
    assert len(sampled) == 3000 and {len(r.prompt) for r in sampled} == set(range(100, 110))
    assert all(len(r.prompt) - 100 == r.params.max_tokens - 10 for r in sampled), "a row's lengths belong together"
    assert sum(len(r.prompt) for r in sampled) / 3000 == pytest.approx(104.5, abs=0.2)
    with pytest.raises(ConfigError, match="give --rate or --concurrency"):
        made(trace=trace, num_requests=30, repeat="sample")


def test_a_loop_of_named_blocks_shares_within_each_round_only(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 1024, "output_length": 2, "hash_ids": [0, i + 1]} for i in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    a, b, c, d = (list(r.prompt) for r in made(trace=str(path), num_requests=4, repeat="loop"))
    assert a[:512] == b[:512] and a[512:] != b[512:] and c[:512] == d[:512]
    assert a[:16] != c[:16]


def test_lengths_are_scaled(tmp_path: Path) -> None:
    requests = made(trace=azure(tmp_path), input_scale=2.5, output_scale=0.5)
    assert [len(r.prompt) for r in requests] == [round((100 + i) * 2.5) for i in range(10)]
    assert [r.params.max_tokens for r in requests] == [round((10 + i) * 0.5) for i in range(10)]
    short = made(trace=azure(tmp_path), input_scale=0.1)
    assert list(short[0].prompt) == list(made(trace=azure(tmp_path))[0].prompt)[:10]


def test_synthetic_sessions_and_their_limits() -> None:
    requests = made(num_requests=7, turns=3, input_len=40, output_len=8, shared_prefix=16, think_time=1.0, rate=1.0)
    assert [r.follows is None for r in requests] == [True, False, False, True, False, False, True]
    assert requests[2].follows is not None and requests[2].follows.history_tokens == 40 + 8 + 40 + 8
    assert requests[0].prompt[:16] == requests[3].prompt[:16]
    with pytest.raises(ConfigError, match=r"--think-time.*no turn follows"):
        made(turns=1, think_time=1.0)
    with pytest.raises(ConfigError, match="no request fits"):
        made(num_requests=6, turns=3, input_len=40, output_len=8, too_long="filter", context=100)
