"""One engine in a process of its own, started by `bench/peers.py` with the Python of the environment it lives in.

    python -P peer_engines.py ENGINE '{"threads": 2, ...options}'

Reads one JSON line per workload, {"requests": [[prompt ids, output tokens], ...]}, serves all requests as if they had
arrived together, greedily and past every end-of-text, and writes {"seconds": ..., "cpu": ..., "outputs": [[ids], ...]}.
Imports the standard library and the engine, nothing of this repository but through it.

Every engine batches requests by itself but for transformers, which takes equal lengths only, and llama.cpp, whose
continuous batching lies in its server: `Llama` below feeds its C interface as that does.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import deque
from typing import Any

Requests = list[tuple[list[int], int]]
Outputs = list[list[int]]


class Unserved(Exception):
    """This engine cannot serve the workload; says why."""


class Twinfer:
    """format: a dtype, or the name of a quantizer."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from twinfer import LLM

        torch.set_num_threads(options["threads"])
        name = options["format"]
        chosen = {"dtype": name} if name in ("float32", "bfloat16", "float16") else {"quantizer": name}
        self.llm = LLM(
            options["model"], max_num_seqs=options["max_num_seqs"], max_model_len=options["max_model_len"], **chosen
        )

    def run(self, requests: Requests) -> Outputs:
        from twinfer import SamplingParams

        params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in requests]
        return [list(r.outputs[0].token_ids) for r in self.llm.generate([ids for ids, _ in requests], params)]


class Transformers:
    """`generate` on a static batch; dtype: of the weights."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options["threads"])
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"]))
        self.model.eval()

    def run(self, requests: Requests) -> Outputs:
        torch = self.torch
        lengths = {(len(ids), n) for ids, n in requests}
        if len(lengths) > 1:
            raise Unserved("a static batch has one length")
        ((length, n),) = lengths
        ids = torch.tensor([ids for ids, _ in requests])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, min_new_tokens=n,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [row[length:].tolist() for row in out]


class VLLM:
    """vLLM's CPU build, compiled; dtype: of weights and activations."""

    def __init__(self, options: dict[str, Any]) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        self.llm = LLM(
            model=options["model"], dtype=options["dtype"], max_num_seqs=options["max_num_seqs"],
            max_model_len=options["max_model_len"], enable_prefix_caching=False, seed=0,
        )  # fmt: skip

    def run(self, requests: Requests) -> Outputs:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        return [list(r.outputs[0].token_ids) for r in self.llm.generate(prompts, params, use_tqdm=False)]


class Llama:
    """llama.cpp through llama-cpp-python's C interface: slots that decode together while new prompts are fed."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self.c, self.numpy = llama_cpp, numpy
        self.slots, self.budget = options["slots"], 2048
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            options["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"{options['model']} cannot be loaded")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.slots * options["max_model_len"]
        params.n_batch, params.n_ubatch, params.n_seq_max = self.budget, 512, self.slots
        params.n_threads = params.n_threads_batch = options["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("no context can be made of these options")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.budget, 0, 1)

    def _add(self, token: int, position: int, slot: int, wanted: bool) -> int:
        batch, i = self.batch, self.batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = slot
        batch.n_tokens += 1
        return i

    def run(self, requests: Requests) -> Outputs:
        outputs: Outputs = [[] for _ in requests]
        waiting = deque(range(len(requests)))
        free = deque(range(self.slots))
        running: dict[int, int] = {}  # request -> slot
        fed: dict[int, int] = {}  # request -> prompt tokens in the cache
        while waiting or running:
            while waiting and free:
                request = waiting.popleft()
                running[request], fed[request] = free.popleft(), 0
            self.batch.n_tokens = 0
            answers: list[tuple[int, int]] = []
            for request, slot in running.items():
                prompt, done = requests[request][0], outputs[request]
                if done:
                    answers.append((request, self._add(done[-1], len(prompt) + len(done) - 1, slot, True)))
            for request, slot in running.items():
                prompt = requests[request][0]
                while fed[request] < len(prompt) and self.batch.n_tokens < self.budget:
                    last = fed[request] == len(prompt) - 1
                    at = self._add(prompt[fed[request]], fed[request], slot, last)
                    fed[request] += 1
                    if last:
                        answers.append((request, at))
            code = self.c.llama_decode(self.context, self.batch)
            if code:
                raise RuntimeError(f"llama_decode gave {code}")
            for request, at in answers:
                logits = self.c.llama_get_logits_ith(self.context, at)
                outputs[request].append(int(self.numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
                if len(outputs[request]) == requests[request][1]:
                    slot = running.pop(request)
                    self.c.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    free.append(slot)
        return outputs


ENGINES = {"twinfer": Twinfer, "transformers": Transformers, "vllm": VLLM, "llama.cpp": Llama}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints is no answer
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: this process may be stopped when its parent dies
    options = json.loads(sys.argv[2])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options["threads"]])

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    engine = ENGINES[sys.argv[1]](options)
    tell({"ready": True})
    for line in sys.stdin:
        requests = [(ids, n) for ids, n in json.loads(line)["requests"]]
        try:
            cpu, begin = time.process_time(), time.perf_counter()
            outputs = engine.run(requests)
            seconds = time.perf_counter() - begin
            tell({"seconds": seconds, "cpu": time.process_time() - cpu, "outputs": outputs})
        except Unserved as error:
            tell({"unserved": str(error)})


if __name__ == "__main__":
    main()
