"""A GPU, or a machine that keeps weights in SRAM or streams them through a dataflow chip: what follows from public numbers.

Of these chips sizes, bandwidths and peaks are public, and what their services deliver to one user; times of their kernels,
how models are laid over chips, and throughput of a whole machine are not. So the tables hold bounds from the first, the second beside
them, and what both together say. `PUBLISHED` names its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from what_if_runs import REFUSED, Engine, closed, run, table

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device


@dataclass(frozen=True, slots=True)
class Service:
    """Output tokens/s of one user. bits: of a weight.  devices: 0 where not published; then as many as hold the weights.
    together: all devices read their share at the same time (tensor parallel); else one stage after the other."""

    device: str
    model: str
    bits: int
    devices: int
    together: bool
    speed: float


PUBLISHED = (
    Service("sn40l", "llama-3.1-8b", 16, 16, True, 1042), Service("sn40l", "llama-3.1-70b", 16, 16, True, 457),
    Service("sn40l", "llama-3.1-405b", 16, 16, True, 129), Service("wse-3", "llama-3.1-8b", 16, 1, False, 1837),
    Service("wse-3", "llama-3.1-70b", 16, 0, False, 445), Service("groq-lpu", "llama-3.1-8b", 8, 0, False, 751),
    Service("groq-lpu", "llama-3.1-70b", 8, 0, False, 250), Service("h100-sxm", "llama-3.1-8b", 16, 1, True, 158.34),
    Service("h100-sxm", "llama-3.1-70b", 16, 8, True, 88.61),
)  # fmt: skip
"""SambaNova, Cerebras, Groq: rates per user as Artificial Analysis measured them, in SambaNova's comparison of 2024-09-10
(sambanova.ai/blog/sn40l-chip-best-inference-solution), which also gives the formats; 16 sockets are a rack (a node of Hot Chips 2024).
H100: the documents of SGLang (8B, batch 1, without speculation), and its pull request 4716 (Llama-3.3-70B, float16, eight H100)."""
TREE = ("8 H100, EAGLE-3 tree of 64", "llama-3.1-70b", 234.54)
"""Also from pull request 4716: the same machine with speculation."""


def weights(service: Service) -> float:
    """Bytes of the weights; embeddings and all count at `bits`."""
    return resolve_spec(service.model).num_params() * service.bits / 8


def num_devices(service: Service) -> int:
    return service.devices or math.ceil(weights(service) / load_device(service.device).memory_bytes)


def bound(service: Service) -> float:
    """Tokens/s of one user when nothing took time but reading all weights once a token, and the products."""
    device, count = load_device(service.device), num_devices(service)
    at_once = count if service.together else 1
    peak = device.peak_flops["float16"]
    flops = 2 * resolve_spec(service.model).num_params(active=True)
    return 1 / max(weights(service) / (at_once * device.memory_bandwidth), flops / (at_once * peak))


def ratios() -> None:
    machines: dict[str, Engine] = {
        "1 H100 SXM": {"device": "h100-sxm"}, "1 SN40L": {"device": "sn40l"},
        "128 Groq, tp 8 pp 16": {"device": "groq-lpu", "tp": 8, "pp": 16, "dtype": "float16"},
        "256 Groq, tp 8 pp 32": {"device": "groq-lpu", "tp": 8, "pp": 32, "dtype": "float16"},
        "1 WSE-3": {"device": "wse-3"},
    }  # fmt: skip
    batches = (2, 4, 16, 64)

    def rows() -> Iterable[list[str]]:
        for name, machine in machines.items():
            device = load_device(str(machine["device"]))
            ridge = device.peak_flops["float16"] / device.memory_bandwidth
            engine = {"model": "llama-3.1-8b", "max_model_len": 512, "max_num_batched_tokens": 256, **machine}
            one = run({**engine, "max_num_seqs": 1}, num_requests=1, input_len=64, output_len=192)
            room = REFUSED if one is None else f"{one.steps[0].total_blocks * one.steps[0].block_size:,}"
            alone = one.metrics["output_throughput"] if one is not None else math.nan
            times = []
            for n in batches:
                found = closed(engine, n, 64, 192, 1) if one is not None else None
                times.append(REFUSED if found is None else f"{found.metrics['output_throughput'] / alone:.1f}")
            yield [name, f"{ridge:,.1f}", room, *times]

    table(
        ["machine", "FLOPs per byte", "KV room, tokens", *(f"tok/s of {n} users / of 1" for n in batches)], rows(),
        "Llama-3.1-8B in 16 bits, prompts of 64 tokens and answers of 192:",
    )  # fmt: skip


def one_user() -> None:
    def rows() -> Iterable[list[str]]:
        for service in PUBLISHED:
            most, layers = bound(service), resolve_spec(service.model).num_layers
            yield [
                f"{num_devices(service)}{'' if service.devices else ' or more'} {service.device}", service.model, str(service.bits),
                f"{weights(service) / 1e9:,.1f}", f"{most:,.0f}", f"{service.speed:,.0f}", f"{service.speed / most:.1%}",
                f"{1e6 / service.speed / layers:,.0f}",
            ]  # fmt: skip

    table(
        ["devices", "model", "bits", "weights, GB", "bound, tok/s", "published, tok/s", "share of the bound",
         "us a layer, published"], rows(), "One user:",
    )  # fmt: skip


def gpus() -> None:
    def rows() -> Iterable[list[str]]:
        for tp in (1, 2, 4, 8):
            cells = []
            for engine in (
                {"model": "llama-3.1-8b"},
                {"model": "llama-3.1-70b"},
                {"model": "llama-3.1-70b", "quantizer": "fp8"},
            ):
                found = closed({**engine, "tp": tp, "max_model_len": 4096}, 1, 512, 256, 1)
                cells.append(REFUSED if found is None else f"{1 / found.metrics['tpot']['p50']:,.0f}")
            yield [f"{tp} H100", *cells]

    table(["machine", "8B, bf16", "70B, bf16", "70B, fp8"], rows(), "One user of GPUs, predicted, tokens/s:")


def many_users() -> None:
    """Llama-3.1-70B, requests of 2,048 tokens of KV: how many fit, and what a machine gives at most."""
    context, spec = 2048, resolve_spec("llama-3.1-70b")
    kv = spec.kv_bytes_per_token("float16") * context
    fixed = {s.device: s for s in PUBLISHED if s.model == "llama-3.1-70b"}

    def rows() -> Iterable[list[str]]:
        for device, count in (("groq-lpu", 320), ("groq-lpu", 576), ("wse-3", 4), ("wse-3", 6), ("sn40l", 16)):
            service, spec_ = fixed[device], load_device(device)
            fit = int((count * spec_.memory_bytes - weights(service)) // kv)
            watts = count * spec_.tdp_watts if spec_.tdp_watts else None
            a_token = max(  # products, and reading the KV, spread over all devices
                2 * spec.num_params() / spec_.peak_flops["float16"], kv * 9 / 16 / spec_.memory_bandwidth
            )
            most = min(fit * service.speed, count / a_token)
            yield [
                f"{count} {device}", str(service.bits), str(fit), f"{service.speed:,.0f}", f"at most {most:,.0f}",
                "not published" if watts is None else f"{watts / 1e3:,.1f}",
                "" if watts is None else f"at most {most / watts:.2f}",
            ]  # fmt: skip
        for engine, bits in (({}, 16), ({"quantizer": "fp8"}, 8)):
            base: Engine = {
                "model": "llama-3.1-70b", "tp": 8, "max_model_len": context, "max_num_batched_tokens": 8192, **engine
            }  # fmt: skip
            fit_run = run({**base, "max_num_seqs": 1}, num_requests=1, input_len=64, output_len=2)
            assert fit_run is not None
            fit = fit_run.steps[0].total_blocks * fit_run.steps[0].block_size // context
            for batch in (1, 16, 64, 256):
                record = closed(base, batch, 256, context - 256)
                assert record is not None
                speed, watts = record.metrics["output_throughput"], 8 * (load_device("h100-sxm").tdp_watts or 0)
                yield [
                    f"8 H100, batch {batch}", str(bits), str(fit), f"{1 / record.metrics['tpot']['p50']:,.0f}", f"{speed:,.0f}",
                    f"{watts / 1e3:,.1f}", f"{speed / watts:.2f}",
                ]  # fmt: skip

    table(
        ["machine", "bits", "requests that fit", "tok/s of a user", "tok/s of all", "kW", "tok/s/W"], rows(),
        "Llama-3.1-70B, requests of 256 tokens answered with 1,792:",
    )  # fmt: skip


def accelerators() -> None:
    """A GPU, or a machine of SRAM?"""
    ratios()
    one_user()
    gpus()
    many_users()
    name, model, speed = TREE
    print(f"\nPublished beside them: {name}, {model}: {speed:g} tokens/s.")
