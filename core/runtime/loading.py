"""The one place that builds an engine: from a configuration to weights, executor, tokenizer and Core.

Invariants
* Whatever cannot work is refused before weights are read; nothing asked for is left out silently.
* The result owns all memory of the engine; `close` gives it back and may be called twice.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from twinfer.core.catalog import fetch_weights, resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.core import Core
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.executor import Executor
from twinfer.core.guard import Blaming, unusable
from twinfer.core.host import cpu_name
from twinfer.core.observers import Observers
from twinfer.core.provision import provision
from twinfer.core.registry import Registry, default_registry
from twinfer.core.runtime.convert import differs
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.families import DecoderModel, load_model
from twinfer.core.runtime.linear import LinearFactory
from twinfer.core.runtime.parallel import ALONE, Parallel
from twinfer.core.runtime.rope import is_long
from twinfer.core.runtime.sampler import Samples
from twinfer.core.runtime.stop_strings import StoppingExecutor
from twinfer.core.runtime.tensor_parallel import Ranks
from twinfer.core.runtime.tokenizer import Tokenizer, load_tokenizer
from twinfer.core.runtime.weights import OnLayer
from twinfer.core.setup import Setup
from twinfer.core.spec import ModelSpec
from twinfer.kernels import gemm, native
from twinfer.kernels.cpu_attention import LANES

LongestRequest = Callable[[ModelSpec, Tokenizer], int]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with everything that runs it. `setup.config` has every "auto" decided."""

    setup: Setup
    registry: Registry
    device: DeviceSpec
    spec: ModelSpec
    weights: Path
    tokenizer: Tokenizer
    model: DecoderModel
    executor: Executor
    ranks: Ranks | None = None
    """The other ranks, with `--tp`; they end with the last executor on them."""

    def build_core(self) -> Core:
        """A fresh Core; only one at a time may drive the executor."""
        return self.setup.build_core()

    def reconfigured(self, config: EngineConfig, longest_request: LongestRequest | None = None) -> Engine:
        """Another engine on the same weights, with its own KV pool; ConfigError when they do not serve `config`."""
        setup = _setup(config, self.spec, self.registry, self.device, self.tokenizer, longest_request)
        for option in ("model", "device", "dtype", "quantizer"):
            if getattr(setup.config, option) != getattr(self.setup.config, option):
                raise ConfigError(
                    option, getattr(setup.config, option), "differs from the loaded engine's",
                    f"use {getattr(self.setup.config, option)!r} or load another engine",
                )  # fmt: skip
        if setup.config.tp != self.setup.config.tp:
            raise ConfigError(
                "--tp", setup.config.tp, "differs from the loaded engine's", f"use {self.setup.config.tp}"
            )
        if is_long(_served(setup)) != is_long(_served(self.setup)):
            raise ConfigError(
                "--max-model-len", setup.limits.max_model_len,
                f"the model turns positions otherwise there than within the {self.setup.limits.max_model_len} tokens "
                "it was loaded for (longrope)", "load another engine",
            )  # fmt: skip
        if differs(setup.model, self.setup.model) or setup.model.kv_shape() != self.setup.model.kv_shape():
            raise ConfigError(
                "--attention", str(setup.config.attention or setup.model.variant),
                f"the loaded model is {self.setup.model.variant} and caches {self.setup.model.kv_shape()[0]} KV heads",
                "load another engine",
            )  # fmt: skip
        if "quantizer" in self.setup.reasons:
            setup = replace(setup, reasons={**setup.reasons, "quantizer": self.setup.reasons["quantizer"]})
        executor = _executor(setup, self.registry, self.model, self.tokenizer, self.ranks)
        return replace(self, setup=setup, executor=executor)

    @property
    def observers(self) -> Observers | None:
        """Relay for `on_step` and `on_request`; None when no plugin listens."""
        return self.registry.observers

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the tokenizer's and the configuration's."""
        return tuple(sorted({*self.tokenizer.eos_token_ids, *self.setup.model.eos_token_ids}))

    def environment(self) -> dict[str, Any]:
        """What a run depends on besides its configuration."""
        found = environment() | {"device": self.device.name, "weights": self.weights.name}
        return found if self.ranks is None else found | {"tensor_parallel": self.ranks.environment}

    def close(self) -> None:
        self.executor.close()


def load_engine(
    config: EngineConfig,
    registry: Registry | None = None,
    *,
    longest_request: LongestRequest | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> Engine:
    """Load `config.model` and build what runs it.

    longest_request: answers the prompt plus output tokens of the longest request, when the workload is known.
    on_phase: told what is being done, where that takes long.
    Raises ConfigError for options that cannot work here, ModelError for a model that cannot be loaded and EngineError
    when a rank of `tp` dies.
    """
    _refuse_unserved(config)
    registry = registry if registry is not None else default_registry()
    tell = on_phase or (lambda phase: None)
    spec = resolve_spec(config.model)
    device = load_device(config.device, registry)
    target = _torch_device(config, device)
    tell(f"finding the weights of {config.model}")
    weights = fetch_weights(config.model)
    tell(f"reading the tokenizer of {config.model}")
    tokenizer = load_tokenizer(weights)
    setup = _setup(config, spec, registry, device, tokenizer, longest_request)
    tell("loading the CPU kernels")
    native.load()  # built here, so that no step waits for a compiler
    linear = linears_of(setup, registry, target)
    ranks = None
    if setup.config.tp > 1:
        ranks = Ranks(setup.config.tp, target, registry, tell)

    def on_layer(layer: int) -> None:
        tell(f"reading the weights of {config.model}: layer {layer + 1} of {spec.num_layers}")

    def load(parallel: Parallel = ALONE) -> DecoderModel:
        tell(f"reading the weights of {config.model}")
        return load_share(setup, weights, registry, target, parallel, linear, on_layer)

    try:
        model = load() if ranks is None else ranks.load(setup, weights, load)
        if linear is not None:
            setup = replace(setup, reasons={**setup.reasons, "quantizer": getattr(linear, "reason", "")})
        executor = _executor(setup, registry, model, tokenizer, ranks)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    return Engine(setup, registry, device, spec, weights, tokenizer, model, executor, ranks)


def load_share(
    setup: Setup, weights: Path, registry: Registry, device: torch.device, parallel: Parallel = ALONE,
    linear: LinearFactory | None = None, on_layer: OnLayer | None = None,
) -> DecoderModel:  # fmt: skip
    """The weights of one rank as a runnable model, multiplied by `linear` (as the setup says unless given).

    on_layer: told the number of every layer when its first tensor is read.
    """
    return load_model(
        _served(setup), weights, registry, device, DTYPES[setup.model.dtype],
        linear or linears_of(setup, registry, device), parallel=parallel,
        checkpoint=setup.checkpoint, attention=_attention(setup, registry), on_layer=on_layer,
    )  # fmt: skip


def _served(setup: Setup) -> ModelSpec:
    """The model with the context that is served: longrope chooses its factors by it."""
    return replace(setup.model, max_context=setup.limits.max_model_len)


def _setup(
    config: EngineConfig,
    spec: ModelSpec,
    registry: Registry,
    device: DeviceSpec,
    tokenizer: Tokenizer,
    longest_request: LongestRequest | None,
) -> Setup:
    _refuse_unserved(config)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"{config.model}: its tokenizer has {tokenizer.vocab_size} entries, the model {spec.vocab_size}; "
            "give the tokenizer that belongs to the weights"
        )
    longest = longest_request(spec, tokenizer) if longest_request is not None else None
    setup = provision(config, spec, registry, device, world="engine", max_request_tokens=longest)
    model = setup.model
    if model.dtype not in DTYPES:
        raise ConfigError("--dtype", model.dtype, "the engine cannot compute in it", f"use {', '.join(DTYPES)}")
    _refuse_kv_dtype(model, device)
    return setup


def _refuse_kv_dtype(model: ModelSpec, device: DeviceSpec) -> None:
    """ConfigError unless KV can be stored in `model.kv_dtype`: as the model, or rounded to bfloat16 on a CPU."""
    if model.kv_dtype == model.dtype:
        return
    why = f"the engine stores KV in the dtype of the model ({model.dtype}), or on a CPU in bfloat16"
    fix = "leave it out; the simulator can show what it would do"
    if (model.dtype, model.kv_dtype, device.kind) == ("float32", "bfloat16", "cpu"):
        if all(width % LANES == 0 for width in model.kv_shape()[1:]) and native.load() is not None:
            return
        why = f"bfloat16 beside {model.dtype} needs the native kernels and keys of a multiple of {LANES} values"
        why += f" ({native.why_not()})" if native.why_not() else ""
        fix = "leave it out"
    raise ConfigError("--kv-dtype", model.kv_dtype, why, fix)


def linears_of(setup: Setup, registry: Registry, target: torch.device) -> LinearFactory | None:
    """What the chosen quantizer multiplies weights with; None without one."""
    names = registry.names("quantizer")
    quantizer = next((t for t in setup.techniques if t.name in names), None)
    if quantizer is None:
        return None
    if not hasattr(quantizer, "linear"):
        raise ConfigError(
            "--quant", str(setup.config.quantizer), "has no implementation in the engine",
            "leave it out; the simulator can show what it would do",
        )  # fmt: skip
    with Blaming("quantizer", quantizer, "linear"):
        factory: LinearFactory = quantizer.linear(setup.model, target)
    if not callable(factory):
        raise unusable("quantizer", quantizer, "linear", factory, "a LinearFactory")
    if getattr(factory, "takes_blocks", False) and differs(setup.checkpoint, setup.model):
        raise ConfigError(
            "--quant", str(setup.config.quantizer),
            f"keeps the blocks of the file, which a conversion to {setup.model.variant} would change",
            "leave --attention or --quant out",
        )  # fmt: skip
    return factory


def _executor(
    setup: Setup, registry: Registry, model: DecoderModel, tokenizer: Tokenizer, ranks: Ranks | None
) -> Executor:
    executor = torch_executor(setup, registry, model)
    return StoppingExecutor(executor if ranks is None else ranks.executor(setup, executor), tokenizer)


def torch_executor(
    setup: Setup, registry: Registry, model: DecoderModel, sampler: Samples | None = None
) -> TorchExecutor:
    """What runs the plans of `setup` on `model`, with a KV pool of its own; `sampler` instead of the usual one."""
    if sampler is not None and model.parallel.size > 1:
        raise ConfigError("--tp", model.parallel.size, "its ranks sample for themselves", "use --tp 1 for this")
    attention = _attention(setup, registry)
    local = model.parallel.local(setup.model)
    with Blaming("attention", attention, "build"):
        built = attention.build(local)
    if not hasattr(built, "step"):
        raise unusable("attention", attention, "build", built, "an implementation with a method `step`")
    # Profiling waits for the device after every op; only a CPU has nothing to wait for.
    return TorchExecutor(
        model, built, setup.limits.num_blocks, setup.block_size, sampler,
        profile=model.device.type == "cpu", num_host_blocks=setup.limits.num_host_blocks,
        groups=setup.groups, kv_dtype=DTYPES[setup.model.kv_dtype],
    )  # fmt: skip


def _attention(setup: Setup, registry: Registry) -> Any:
    """The chosen attention variant; ConfigError when it has no implementation."""
    names = registry.names("attention")
    attention = next((t for t in setup.techniques if t.name in names and hasattr(t, "build")), None)
    if attention is None:
        raise ConfigError(
            "--attention", str(setup.config.attention or setup.model.variant), "has no implementation in the engine",
            f"use one of {', '.join(names)}",
        )  # fmt: skip
    return attention


def _torch_device(config: EngineConfig, device: DeviceSpec) -> torch.device:
    if device.kind == "cpu":
        return torch.device("cpu")
    if device.kind == "accelerator":
        raise ConfigError("--device", config.device, "the engine has no kernels for it", "simulate it")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device", config.device, "this machine has no such device (torch finds no GPU)",
            "use auto to run on this machine, or simulate it",
        )  # fmt: skip
    if config.tp > torch.cuda.device_count():
        raise ConfigError(
            "--tp", config.tp, f"this machine has {torch.cuda.device_count()} GPU(s), one a rank is needed",
            f"use at most {torch.cuda.device_count()}, or simulate it",
        )  # fmt: skip
    return torch.device("cuda", 0) if config.tp > 1 else torch.device("cuda")


def _refuse_unserved(config: EngineConfig) -> None:
    for name in ("pp", "cp", "dp", "ep"):
        if getattr(config, name) > 1:
            raise ConfigError(
                f"--{name}", getattr(config, name), "the engine shares a model over ranks by --tp alone",
                "use --tp, or simulate it",
            )  # fmt: skip
    if config.num_devices not in (None, config.tp):
        raise ConfigError(
            "--num-devices", config.num_devices, f"one engine of --tp {config.tp} uses {config.tp} device(s)",
            f"give --num-devices {config.tp}, or --tp {config.num_devices}",
        )  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions, machine and threads."""
    packages = {}
    for name in ("twinfer", "torch", "transformers", "tokenizers", "numpy"):
        try:
            packages[name] = version(name)
        except Exception:  # a source tree without metadata
            packages[name] = ""
    found = {
        "python": platform.python_version(),
        "versions": packages,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "native_kernels": native.why_not() or "used",
        "packed_products": gemm.instructions() or gemm.why_not(),
        "openmp_spin": os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY", ""),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


__all__ = ["Engine", "environment", "load_engine", "load_share", "torch_executor"]
