"""Tensor parallelism with two CPU ranks over gloo: the same tokens as one rank, and ranks that die.

One pair of ranks serves several models one after the other, since starting a rank takes seconds. Several GPUs (nccl,
rank r on device r) take the same path but for the process group; no test here can run that.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_oracle import VOCAB, TinyModel

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError, EngineError, ModelError, RequestError
from twinfer.core.events import Finished, Submit, TokenDelta
from twinfer.core.executor import Executor
from twinfer.core.loop import LocalInbox, drive
from twinfer.core.memory_parts import why_indivisible
from twinfer.core.params import SamplingParams
from twinfer.core.plan import StepPlan
from twinfer.core.provision import provision
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime.llm import LLM
from twinfer.core.runtime.loading import load_share, torch_executor
from twinfer.core.runtime.parallel import Parallel
from twinfer.core.runtime.process_group import STUCK_S
from twinfer.core.runtime.run import run_engine
from twinfer.core.runtime.tensor_parallel import Ranks
from twinfer.core.runtime.tensor_parallel_rank import Step, weight_bytes
from twinfer.core.setup import Setup
from twinfer.core.workload import Workload

CPU = torch.device("cpu")
MLA = dict(
    num_key_value_heads=6, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, first_k_dense_replace=1,
    n_group=4, topk_group=2,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bias-qk-norm": ("Qwen3", dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    "mqa": ("Llama", dict(num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    "windows": ("Gemma3", dict(head_dim=12, query_pre_attn_scalar=20, sliding_window=7, sliding_window_pattern=3)),
    "moe": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mla": ("DeepseekV3", MLA),
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(entry_points=False)


@pytest.fixture(scope="module")
def pair(registry: Registry) -> Iterator[Ranks]:
    ranks = Ranks(2, CPU, registry, lambda phase: None)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def get(case: str) -> TinyModel:
        if case not in made:
            made[case] = TinyModel(tmp_path_factory.mktemp(case), *CASES[case])
        return made[case]

    return get


def setup_of(folder: Path, registry: Registry, tp: int, **fields: Any) -> Setup:
    """Small steps, few blocks: prompts are fed in chunks, and answers preempt each other."""
    small = dict(
        max_num_batched_tokens=12, max_num_seqs=3, num_kv_blocks=16, max_model_len=64,
        kv_cache="paged:block_size=4,headroom=0",
    )  # fmt: skip
    config = EngineConfig.model_validate({"model": str(folder), "tp": tp, **small, **fields})
    device = load_device("cpu", registry)
    return provision(config, resolve_spec(str(folder)), registry, device, world="engine")


def requests() -> list[Request]:
    """Prompts with a common start, greedy but for one whose two samples share their prompt's blocks."""
    rng = random.Random(3)
    start = [rng.randrange(3, VOCAB) for _ in range(18)]
    found = []
    for i, (own, length) in enumerate(((9, 20), (2, 25), (13, 12), (1, 20), (5, 8))):
        prompt = start + [rng.randrange(3, VOCAB) for _ in range(own)]
        sampled: dict[str, Any] = dict(n=2, temperature=0.9, seed=5) if i == 3 else {}
        params = SamplingParams(max_tokens=length, ignore_eos=True, **sampled)
        found.append(Request(id=f"r{i}", prompt=prompt, params=params))
    return found


def served(setup: Setup, executor: Executor, asked: Sequence[Request]) -> tuple[dict[str, list[int]], list[Finished]]:
    """Tokens of every sample, and how each ended."""
    tokens: dict[str, list[int]] = {}
    ends: list[Finished] = []

    def emit(outputs: Sequence[Any], now: float) -> None:
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens.setdefault(f"{output.request_id}/{output.index}", []).extend(output.tokens)
            elif isinstance(output, Finished):
                ends.append(output)

    inbox = LocalInbox([Submit(request) for request in asked])
    drive(setup.build_core(), executor, inbox, time.perf_counter, emit)
    return tokens, ends


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_say_what_one_says(
    case: str, tiny: Callable[[str], TinyModel], pair: Ranks, registry: Registry
) -> None:
    """Dense, MoE and MLA, through chunked prefill, prefix hits, preemption, copy-on-write, swap; odd vocabulary."""
    model = tiny(case)
    fields: dict[str, Any] = dict(preemption="swap", host_kv_bytes=2**16) if case == "mqa" else {}
    if case == "windows":  # its layers lie in two groups, which draw on one pool
        fields = dict(num_kv_blocks=24)
    alone, shared = (setup_of(model.folder, registry, tp, **fields) for tp in (1, 2))
    expected, _ = served(alone, torch_executor(alone, registry, model.model), requests())
    share = pair.load(shared, model.folder, lambda rank: load_share(shared, model.folder, registry, CPU, rank))
    inner = torch_executor(shared, registry, share)
    tokens, ends = served(shared, pair.executor(shared, inner), requests())
    assert tokens == expected
    assert len({tuple(t[:6]) for t in expected.values()}) > 3, "the texts should differ"
    assert sum(e.num_preemptions for e in ends) > 0 and sum(e.num_cached_tokens for e in ends) > 0

    spec = shared.model
    # rotary tables are computed, not weights
    rotary = sum(weight_bytes(part) for part in vars(share).values() if type(part).__module__.endswith(".rope"))
    assert weight_bytes(share) - rotary == spec.weight_bytes(2)
    back = spec.num_layers * spec.hidden_size * (spec.attention_out_bias + spec.mlp_bias)  # biases that rank 0 adds
    assert pair.weight_bytes == (weight_bytes(share) - 4 * back,)
    assert inner.kv.nbytes == shared.kv_pool_bytes
    if case != "windows":
        per_token = spec.kv_bytes_per_token(tp=2)
        assert shared.kv_pool_bytes == shared.limits.num_blocks * shared.block_size * per_token


def test_shares_of_a_tensor_are_the_whole() -> None:
    table = torch.arange(14.0).view(7, 2)
    ranks = [Parallel(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([r.cut_vocab(table) for r in ranks])[:7], table)
    assert not ranks[1].cut_vocab(table)[3].any() and len(ranks[1].cut_vocab(table)) == 4
    heads = torch.arange(24.0).view(6, 4)
    assert torch.equal(torch.cat([r.cut_heads(heads, 2) for r in ranks]), heads)
    assert all(torch.equal(Parallel(rank, 4).cut_heads(heads, 2), heads[3 * (rank // 2) :][:3]) for rank in range(4))
    with pytest.raises(ConfigError, match="--tp=2: does not divide the 7"):
        ranks[0].cut(table)


@pytest.mark.parametrize(
    ("model", "tp", "says"),
    [
        ("llama-3.1-8b", 8, ""),
        ("llama-3.1-8b", 16, ""),
        ("llama-3.1-8b", 3, "32 attention heads"),
        ("smollm2-135m", 3, ""),
        ("smollm2-135m", 9, "1536 MLP columns"),
        ("gemma-3-270m", 4, ""),
        ("deepseek-v3", 128, ""),
    ],
)
def test_what_ranks_can_share(model: str, tp: int, says: str) -> None:
    why = why_indivisible(resolve_spec(model), tp)
    assert says in why and bool(says) == bool(why)


def test_a_share_that_cannot_be_loaded_is_one_error(tiny_llama_dir: Path, registry: Registry, tmp_path: Path) -> None:
    """Only the other rank fails here: its files are gone."""
    setup = setup_of(tiny_llama_dir, registry, 2)
    ranks = Ranks(2, CPU, registry, lambda phase: None)
    with pytest.raises(ModelError, match=r"rank 1 of --tp 2: .*no such file"):
        ranks.load(setup, tmp_path / "none", lambda rank: load_share(setup, tiny_llama_dir, registry, CPU, rank))
    assert_ended(ranks)
    with pytest.raises(EngineError, match="ended"):
        ranks.load(setup, tiny_llama_dir, lambda rank: None)


def test_a_rank_that_dies_before_the_ranks_meet(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Ranks] = []

    class Doomed(Ranks):
        def _meet(self, store: str) -> Any:
            made.append(self)
            self.processes[0].kill()
            self.processes[0].wait()  # so that it cannot have come already
            return super()._meet(store)

    given_up = threading.Event()  # rank 0 goes on waiting for the other until this test has ended
    monkeypatch.setattr("twinfer.core.runtime.tensor_parallel.join", lambda *given: given_up.wait(600))
    try:
        with pytest.raises(EngineError, match=r"rank 1 of --tp 2 died meeting the others \(exit code -9"):
            Doomed(2, CPU, registry, lambda phase: None)
    finally:
        given_up.set()
    assert_ended(made[0])


def test_ranks_that_are_stopped_while_they_start_end_at_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They sleep through the end of their life line, as an interpreter does that imports torch."""
    monkeypatch.setattr("twinfer.core.runtime.tensor_parallel._BOOT", "import time; time.sleep(3600)")
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(ranks: Any, doing: str) -> None:
        started.extend(ranks.processes)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ranks, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ranks(2, CPU, registry, lambda phase: None)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_llm_on_two_ranks_and_a_rank_that_fails(tiny_llama_dir: Path) -> None:
    """The whole public path; then an exception on the other rank ends the engine, with its text."""
    prompts = [[5, 6, 7, 8, 9], [9] * 30]
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=("never said",))
    with LLM(str(tiny_llama_dir), num_kv_blocks=32) as llm:
        expected = [r.outputs[0].token_ids for r in llm.generate(prompts, params)]
    before = torch.get_num_threads()
    llm = LLM(str(tiny_llama_dir), num_kv_blocks=32, tp=2, num_devices=2)
    ranks = llm._engine.ranks
    assert ranks is not None
    said = llm._engine.environment()["tensor_parallel"]
    assert said == {"ranks": 2, "backend": "gloo", "threads_per_rank": max(1, before // 2)}
    assert [r.outputs[0].token_ids for r in llm.generate(prompts, params)] == expected
    with pytest.raises(RequestError):  # a mistake in a request harms nobody
        llm.generate([[999]])
    assert [r.outputs[0].token_ids for r in llm.generate(prompts[:1], params)] == expected[:1]
    ranks._tell(Step(99, StepPlan(0, ())))  # an executor that does not exist
    with pytest.raises(EngineError, match=r"rank 1 of --tp 2 failed in a step: KeyError: 99"):
        llm.generate(prompts, params)
    assert_ended(ranks)
    llm.close()
    assert torch.get_num_threads() == before


def test_a_killed_rank_ends_the_run_and_leaves_its_record(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Ranks] = []

    class Seen(Ranks):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr("twinfer.core.runtime.loading.Ranks", Seen)
    killed = 0.0
    phases: list[str] = []

    def on_progress(done: int, total: int, info: dict[str, Any]) -> None:
        nonlocal killed
        phases.append(str(info.get("doing", info["phase"])))
        if info["phase"] == "run" and info["steps"] >= 3 and not killed:
            killed = time.monotonic()
            made[0].processes[0].kill()

    config = EngineConfig.model_validate({"model": str(tiny_llama_dir), "tp": 2, "max_num_seqs": 2})
    with pytest.raises(EngineError, match=r"rank 1 of --tp 2 died in a step \(exit code -9, SIGKILL\)") as caught:
        run_engine(config, Workload(num_requests=200, input_len=20, output_len=30), on_progress=on_progress)
    assert time.monotonic() - killed < STUCK_S  # by its end, not by what it failed to do
    assert "starting 2 ranks" in phases and "loading the shares of 2 ranks" in phases
    assert_ended(made[0])
    record = caught.value.record
    assert record.world == "engine" and not record.complete and len(record.steps) >= 3
    assert (
        record.environment["tensor_parallel"]["ranks"] == 2 and record.config["tp"] == record.config["num_devices"] == 2
    )
    assert {"all_reduce", "all_gather"} <= set(record.steps[-1].ops)
    assert record.metrics["output_tokens"] > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_ranks_end_with_their_engine(how: signal.Signals, tiny_llama_dir: Path) -> None:
    """Killed, or stopped by Ctrl-C, which a terminal sends to the whole group of the engine."""
    code = (
        "import signal, sys\nfrom twinfer import LLM, SamplingParams\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test run in the background ignores it
        "llm = LLM(sys.argv[1], num_kv_blocks=64, tp=2)\nprint(llm._engine.ranks.processes[0].pid, flush=True)\n"
        "while True: llm.generate([[5, 6, 7]], SamplingParams(max_tokens=400, ignore_eos=True))\n"
    )
    command = [sys.executable, "-c", code, str(tiny_llama_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0) as engine:
        assert engine.stdout is not None and engine.stderr is not None
        line = engine.stdout.readline()
        assert line, engine.stderr.read().decode()
        rank = int(line)
        os.kill(rank, 0)
        assert os.getpgid(rank) == rank, "what a terminal sends to the engine's group does not reach it"
        if how is signal.SIGINT:
            os.killpg(engine.pid, how)
        else:
            os.kill(engine.pid, how)
        try:
            code_of_engine = engine.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(engine.pid, signal.SIGKILL)  # or leaving the block would wait for it
            raise
        errors = engine.stderr.read().decode()
    assert code_of_engine == -how, errors
    end = time.monotonic() + 120
    while _alive(rank) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _alive(rank)
    if how is signal.SIGINT:
        assert errors.count("Traceback") == 1, f"only the engine itself is interrupted:\n{errors}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_ended(ranks: Ranks) -> None:
    assert all(process.returncode is not None for process in ranks.processes)
    assert all(channel.closed for channel in ranks.channels)
