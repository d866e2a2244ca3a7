"""One frozen tree that says how a run is made, shared by engine, simulator, CLI and dashboard.

Invariants
* Resolved once; "auto" becomes a recorded choice with its reason (`Resolved.reasons`).
* Techniques are named with their options: `paged`, `paged:block_size=32`, or {"name":..., "options":{...}}; `none` is
  None where one may be absent.
* An option that nothing implements is refused by the technique's own `Options` model.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.technique import Checked


class Choice(BaseModel):
    """A technique by name, with options."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return parse_choice(value) if isinstance(value, str) else value

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{k}={json.dumps(v)}" for k, v in sorted(self.options.items()))


NONE = "none"
OPTIONAL = ("attention", "quantizer", "speculator")
"""Kinds that a configuration may be without; `none` says so wherever one of them is named."""


def choice_of(kind: str, text: str, option: str = "technique") -> Choice | None:
    """The technique that `text` names, None for `none` of a kind that may be absent. option: as for `parse_choice`."""
    if kind in OPTIONAL and text.strip() == NONE:
        return None
    return Choice(**parse_choice(text, option))


OptionalChoice = Annotated[Choice | None, BeforeValidator(lambda value: None if value == NONE else value)]


def parse_choice(text: str, option: str = "technique") -> dict[str, Any]:
    """`name:option=value,option=value` to name and options; values are JSON, else plain strings.

    option: where the text was given, for the error.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, _parts(rest)):
        key, eq, raw = part.partition("=")
        if not eq or not key.strip():
            raise ConfigError(option, text, f"option {part!r} has no value", "write NAME:option=value,option=value")
        if key.strip() in options:
            raise ConfigError(option, text, f"{key.strip()!r} is given twice", "give each option once")
        try:
            options[key.strip()] = json.loads(raw)
        except (ValueError, RecursionError):  # also a number of thousands of digits, a thousand lists in each other
            options[key.strip()] = raw
    return {"name": name.strip(), "options": options}


def _parts(text: str) -> list[str]:
    """`text` at its commas, but for those within a list or in quotes."""
    parts, depth, quoted = [""], 0, False
    for i, char in enumerate(text):
        quoted ^= char == '"' and text[i - 1 : i] != "\\"
        if not quoted:
            depth += (char in "[{") - (char in "]}")
            if char == "," and depth <= 0:
                parts.append("")
                continue
        parts[-1] += char
    return parts


class EngineConfig(Checked):
    """How one engine (or its twin) is set up.

    model: spec name, config.json, directory, GGUF file or hub id.
    device: device spec name; "auto" is this machine.  dtype: of weights and activations; "auto".
    max_model_len: None takes the model's context, lowered if KV memory is smaller.
    num_kv_blocks / kv_memory_bytes: size of the KV pool; None derives it from device memory.
    preemption: what becomes of the KV of a sequence that must give way: it is computed again, or swapped to host
    memory of `host_kv_bytes` per device (when that is full, it is computed again).
    max_outstanding: steps that may be launched before the first of them is done; 2 plans the next step, and hides the
    work of the CPU, while the device computes (the engine does one at a time). Pipeline stages have a step each besides.
    max_num_seqs, num_kv_blocks: of the replica, divided over data-parallel ranks; max_num_batched_tokens: of one rank.
    memory_fraction: share of device memory that weights, activations and KV may use.
    tp, pp, cp, dp, ep: sizes of the parallel groups of one replica (`layout`; `core/layout.py` says what they are).
    num_devices: devices in all, a multiple of those of one replica; None: as many as one replica has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    attention: OptionalChoice = None
    scheduler: Choice = Choice(name="continuous")
    kv_cache: Choice = Choice(name="paged")
    quantizer: OptionalChoice = None
    speculator: OptionalChoice = None
    op_time: tuple[str, ...] = ()
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    max_outstanding: int = Field(default=1, ge=1, le=2)
    num_kv_blocks: int | None = Field(default=None, ge=1)
    kv_memory_bytes: int | None = Field(default=None, ge=1)
    preemption: Literal["recompute", "swap"] = "recompute"
    host_kv_bytes: int | None = Field(default=None, ge=1)
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    num_devices: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @property
    def layout(self) -> Layout:
        """How one replica is laid over devices."""
        return Layout(self.tp, self.pp, self.cp, self.dp, self.ep)

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        layout = self.layout  # refuses groups that do not go together
        if self.num_devices is not None and self.num_devices % layout.devices:
            raise ConfigError(
                "--num-devices", self.num_devices, f"one replica {layout.flags} takes {layout.devices} device(s)",
                f"give {layout.devices}, or leave it out",
            )  # fmt: skip
        if self.num_kv_blocks is not None and self.kv_memory_bytes is not None:
            raise ConfigError(
                "--kv-memory-bytes", self.kv_memory_bytes, f"--num-kv-blocks {self.num_kv_blocks} sizes the pool too",
                "give one of them",
            )  # fmt: skip
        if self.preemption == "swap" and self.host_kv_bytes is None:
            raise ConfigError(
                "--preemption", "swap", "there is no host memory to swap to", "give --host-kv-bytes, or use recompute"
            )
        if self.preemption != "swap" and self.host_kv_bytes is not None:
            raise ConfigError(
                "--host-kv-bytes", self.host_kv_bytes, f"--preemption {self.preemption} keeps nothing in host memory",
                "give --preemption swap too",
            )  # fmt: skip
        return self
