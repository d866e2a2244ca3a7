"""The scenario: what the user asks for, as one validated value that lives in the URL.

Invariants
* `Scenario` is the only truth; widgets are seeded from it and write back to it (see `session.py`).
* The URL holds the fields that differ from the defaults, and `v`, the version of this form.
* A bad query parameter is dropped with a message; the rest of the link still works (`link.py` reads all of it).
* The baseline is part of the scenario, so a link shows the same deltas to everybody.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from twinfer.core.config import Choice, EngineConfig, OptionalChoice
from twinfer.core.errors import ConfigError, short
from twinfer.core.images import MOST_IMAGES, size_of
from twinfer.core.layout import MOST_RANKS, SIZES
from twinfer.core.mistakes import first_mistake
from twinfer.core.spec import ModelSpec
from twinfer.core.workload import Workload, make_workload

VERSION = "1"
KINDS = ("scheduler", "kv_cache", "attention", "quantizer", "speculator")  # technique kinds a scenario chooses from
IMAGES = (  # what a request shows a model that sees
    "images_per_request", "image_counts", "image_size", "image_tokens", "image_compression",
)  # fmt: skip
PLACEMENT = (*SIZES, "dtype", "kv_dtype", "memory_fraction")  # devices of one replica and formats


def _setting(default: Any, label: str, description: str, unit: str = "", **bounds: Any) -> Any:
    """A field with a control of its own. bounds: pydantic's ge, gt, le, max_length."""
    hints: dict[str, Any] = {"label": label, "unit": unit} if unit else {"label": label}
    return Field(default, description=description, json_schema_extra=hints, **bounds)


def _group(label: str, unit: str, description: str) -> Any:
    return _setting(1, label, description, unit, ge=1, le=MOST_RANKS)


class Scenario(BaseModel):
    """Model, device, techniques, limits and workload, flat so that each field is one query parameter.

    tp, pp, cp, dp, ep: the layout of one replica (`core/layout.py`).  num_kv_blocks, max_model_len: 0 means derived.
    rate: requests/s, 0 means all at once.
    base_*: the baseline that deltas refer to; 0 takes the scenario's own limit.
    plan_*: what the Capacity page asks for: promises, traffic of the whole fleet, device types ("" is all, commas between).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    model: str = Field("smollm2-135m", min_length=1, max_length=300)
    device: str = Field("auto", min_length=1, max_length=300)
    scheduler: Choice = Choice(name="continuous")
    kv_cache: Choice = Choice(name="paged")
    attention: OptionalChoice = None
    quantizer: OptionalChoice = None
    speculator: OptionalChoice = None
    tp: int = _group("Tensor parallel", "ranks", "Ranks that split heads and columns of every layer.")
    pp: int = _group("Pipeline", "stages", "Stages of consecutive layers.")
    cp: int = _group("Context parallel", "ranks", "Ranks that share the tokens of a prompt.")
    dp: int = _group(
        "Attention data parallel", "groups", "Groups of ranks with requests of their own that share experts."
    )
    ep: int = _group(
        "Expert parallel", "ranks", "Ranks that whole experts are spread over; divides tensor x data parallel."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "Data type", "Of weights and activations; auto is that of the checkpoint, float32 on a CPU."
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"] = _setting(
        "auto", "KV data type", "Of the KV cache; auto is that of the activations."
    )
    memory_fraction: float = _setting(
        0.9, "Memory fraction", "Share of device memory that weights, activations and KV may use.", gt=0, le=1
    )
    max_num_seqs: int = _setting(8, "Rows in a batch", "Most sequences that run in one step.", ge=1, le=4096)
    max_num_batched_tokens: int = _setting(
        512, "Tokens per step", "Most tokens fed in one step, prompts and answers together.", ge=1, le=1_000_000
    )
    num_kv_blocks: int = _setting(
        0,
        "KV pool",
        "Size of the KV pool; 0 derives it from the memory of the device.",
        unit="blocks",
        ge=0,
        le=100_000_000,
    )
    max_model_len: int = _setting(
        1024,
        "Context",
        "Longest prompt plus answer; contiguous caches reserve all of it. 0 takes the longest request of the workload.",
        unit="tokens",
        ge=0,
        le=10_000_000,
    )
    num_requests: int = _setting(16, "Requests", "How many requests are sent.", ge=1, le=100_000)
    rate: float = _setting(0.0, "Arrival rate", "Poisson arrivals; 0 sends all at once.", unit="req/s", ge=0, le=1e6)
    input_len: int = _setting(96, "Prompt length", "Mean length of a prompt.", unit="tokens", ge=1, le=1_000_000)
    output_len: int = _setting(32, "Answer length", "Mean length of an answer.", unit="tokens", ge=1, le=1_000_000)
    spread: float = _setting(
        0.5, "Length spread", "Lengths are uniform on mean times 1 - spread to 1 + spread.", ge=0, le=1
    )
    shared_prefix: int = _setting(
        0,
        "Shared prefix",
        "First tokens that all prompts have in common, such as a system prompt.",
        unit="tokens",
        ge=0,
        le=1_000_000,
    )
    images_per_request: float = _setting(
        0.0, "Images per request", "Images in each prompt, besides its text; 0 is none.", ge=0, le=MOST_IMAGES
    )
    image_counts: Literal["fixed", "poisson"] = _setting(
        "fixed", "Image count", "Equally many in each request, or a Poisson distribution with that mean."
    )
    image_size: str = _setting(
        "",
        "Image size",
        "Width x height of each, such as 1024x768; empty is what the model takes.",
        unit="pixels",
        max_length=20,
    )
    image_tokens: int = _setting(
        0,
        "Tokens per image",
        "Tokens of each in the prompt, instead of a size; 0 follows from the size.",
        ge=0,
        le=2**20,
    )
    image_compression: float = _setting(
        1.0, "Image compression", "How many times fewer tokens than the model makes of an image.", "×", ge=1, le=1e4
    )
    seed: int = _setting(0, "Seed", "Same seed, same requests, same tokens.", ge=0, le=2**31 - 1)
    base_scheduler: Choice = Choice(name="static")
    base_kv_cache: Choice = Choice(name="contiguous")
    base_max_num_seqs: int = Field(0, ge=0, le=4096)
    base_max_num_batched_tokens: int = Field(0, ge=0, le=1_000_000)
    plan_ttft: float = _setting(
        1.0, "TTFT", "Promised time to the first token; 0 promises nothing.", unit="s", ge=0, le=3600
    )
    plan_tpot: float = _setting(
        50.0, "TPOT", "Promised time per further token; 0 promises nothing.", unit="ms", ge=0, le=3_600_000
    )
    plan_percentile: int = _setting(95, "Percentile", "Share of requests that keep the promise.", ge=1, le=100)
    plan_rate: float = _setting(4.0, "Traffic", "Poisson arrivals at the whole fleet.", unit="req/s", ge=0.001, le=1e6)
    plan_requests: int = _setting(
        1000,
        "Requests tried",
        "Requests that a fleet is tried with; one in twenty decides a 95th percentile.",
        ge=20,
        le=100_000,
    )
    plan_trace: str = _setting(
        "",
        "Trace file",
        "A trace file on this machine instead of Poisson arrivals; its lengths are used too.",
        max_length=300,
    )
    plan_scale: float = _setting(
        1.0, "Trace, times its rate", "How many times as fast the requests of the trace arrive.", ge=0.001, le=1000
    )
    plan_devices: str = Field("", max_length=2000)

    @field_validator("rate")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be finite; 0 means all at once")
        return value

    @field_validator("image_size")
    @classmethod
    def _size(cls, value: str) -> str:
        if value.strip():
            size_of(value)
        return value.strip()

    # --- what the engine and the simulator are given ------------------------------------------------

    def config(self) -> EngineConfig:
        """The engine's configuration. Raises ConfigError or ValidationError."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            scheduler=self.scheduler,
            kv_cache=self.kv_cache,
            attention=self.attention,
            quantizer=self.quantizer,
            speculator=self.speculator,
            **{name: getattr(self, name) for name in PLACEMENT},
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_kv_blocks=self.num_kv_blocks or None,
            max_model_len=self.max_model_len or None,
            seed=self.seed,
        )

    def workload(self) -> Workload:
        """The requests to send. Raises ConfigError that names the option."""
        return make_workload(
            num_requests=self.num_requests,
            rate=self.rate or math.inf,
            input_len=self.input_len,
            output_len=self.output_len,
            lengths="uniform" if self.spread else "fixed",
            spread=self.spread,
            shared_prefix=self.shared_prefix,
            seed=self.seed,
            **self.images(),
        )

    def images(self) -> dict[str, Any]:
        """The fields of a workload that say what images its requests have; none where they have none."""
        if not self.images_per_request:
            return {}
        found = {name: getattr(self, name) for name in IMAGES}
        return found | {"image_size": self.image_size or None, "image_tokens": self.image_tokens or None}

    def refuse_unseen(self, spec: ModelSpec) -> None:
        """ConfigError for images of a model that takes none."""
        if self.images_per_request and spec.vision is None:
            raise ConfigError(
                "--images-per-request", self.images_per_request, f"{spec.name} takes no images",
                "leave them out, or choose a model with an image encoder",
            )  # fmt: skip

    def images_line(self) -> str:
        """+ 2 images 1024x768", "" where there are none."""
        if not self.images_per_request:
            return ""
        each = (
            f" {self.image_size}" if self.image_size else f" of {self.image_tokens} tokens" if self.image_tokens else ""
        )
        return f" + {self.images_per_request:g} image{'' if self.images_per_request == 1 else 's'}{each}"

    def key(self) -> str:
        """A short name of everything that decides a run's result (the baseline does not)."""
        asked = {k: v for k, v in self.model_dump(mode="json").items() if not k.startswith(("base_", "plan_"))}
        # What came later is left out at its default, so that results stored before are found.
        for name in (*PLACEMENT, "speculator", *IMAGES):
            unseen = name in IMAGES and not self.images_per_request
            if unseen or asked[name] == type(self).model_fields[name].default:
                del asked[name]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]

    def line(self) -> str:
        """The scenario in one line."""
        lengths = f"{self.input_len}/{self.output_len} tokens" + (f" ±{self.spread:.0%}" if self.spread else "")
        lengths += self.images_line()
        rate = f"{self.rate:g} req/s" if self.rate else "all at once"
        device = "this machine" if self.device == "auto" else self.device
        if self.num_devices > 1:
            device += f" ×{self.num_devices} ({self.groups()})"
        return f"{self.model} · {device} · {self.num_requests} requests, {lengths}, {rate} · up to {self.max_num_seqs} rows"

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp * self.cp * self.dp

    def groups(self) -> str:
        """The layout in short: "tp4 pp2"; also of groups that do not go together."""
        return " ".join(f"{n}{getattr(self, n)}" for n in SIZES if getattr(self, n) > 1) or "1"

    def techniques(self) -> str:
        chosen = (getattr(self, kind) for kind in KINDS)
        return " + ".join(str(choice) for choice in chosen if choice is not None)

    # --- the baseline -------------------------------------------------------------------------------

    def baseline(self) -> Scenario:
        """The same model and workload under the baseline's techniques and limits."""
        return self.model_copy(
            update={
                "scheduler": self.base_scheduler,
                "kv_cache": self.base_kv_cache,
                "attention": None,
                "quantizer": None,
                "speculator": None,
                "max_num_seqs": self.base_max_num_seqs or self.max_num_seqs,
                "max_num_batched_tokens": self.base_max_num_batched_tokens or self.max_num_batched_tokens,
            }
        )

    def pinned(self) -> Scenario:
        """This scenario with its present techniques and limits as the baseline."""
        return self.model_copy(
            update={
                "base_scheduler": self.scheduler,
                "base_kv_cache": self.kv_cache,
                "base_max_num_seqs": self.max_num_seqs,
                "base_max_num_batched_tokens": self.max_num_batched_tokens,
            }
        )

    # --- edits and the URL --------------------------------------------------------------------------

    def edited(self, **changes: Any) -> Scenario:
        """A copy with validated changes. Raises ValidationError."""
        return Scenario.model_validate({**self.model_dump(), **changes})

    def to_params(self) -> dict[str, str]:
        """Query parameters: fields that differ from the defaults, as text."""
        default = Scenario()
        found = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value != getattr(default, name):
                found[name] = f"{value:g}" if isinstance(value, float) else str(value)
        return found

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> tuple[Scenario, list[str]]:
        """The scenario of a link, and one message for each of its parameters that could not be used; others are left."""
        known = {k: v for k, v in params.items() if k in cls.model_fields}
        problems: list[str] = []
        while True:
            try:
                return cls.model_validate(known), problems
            except ValidationError as error:
                wrong = first_mistake(error)
                name, why = wrong.field, f"{wrong.problem}; {wrong.fix}"
            except ConfigError as error:  # a value that does not parse names no field: find it
                name = next((k for k, v in known.items() if _mistake(cls, k, v) == str(error)), next(iter(known)))
                why = f"{error.problem}; {error.fix}"
            problems.append(f"{name}={short(known[name])} in the link was ignored: {why}")
            del known[name]


def _mistake(cls: type[Scenario], name: str, value: str) -> str:
    """What a field's own parser says of its value, alone; "" where it says nothing (bounds may still refuse it)."""
    try:
        cls.model_validate({name: value})
    except ConfigError as error:
        return str(error)
    except ValidationError:
        pass
    return ""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "Chat": {"num_requests": 16, "input_len": 96, "output_len": 32, "spread": 0.5, "rate": 0.0, "shared_prefix": 0, "images_per_request": 0.0},
    "Long prompts": {"num_requests": 8, "input_len": 384, "output_len": 16, "spread": 0.3, "rate": 0.0, "shared_prefix": 256, "images_per_request": 0.0},
    "Batch": {"num_requests": 32, "input_len": 64, "output_len": 64, "spread": 0.0, "rate": 0.0, "shared_prefix": 0, "images_per_request": 0.0},
}  # fmt: skip


__all__ = ["IMAGES", "KINDS", "PLACEMENT", "PRESETS", "VERSION", "Scenario"]
