"""Attention variants and quantizers that break their contract in the engine: one line that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.errors import PluginError
from twinfer.core.registry import Registry
from twinfer.core.runtime.loading import load_engine

HEAD = """import sys
from twinfer import Technique, hookimpl
from twinfer.plugins.attention.mha import MHA
"""
UNMADE = """def convert(self, checkpoint, model):
        from twinfer.core.runtime.convert import Converted, ReplacedTensors
        odd = [name for name in checkpoint.source.names() if 'k_proj' in name]
        shapes = {name: checkpoint.source.shape(name) for name in odd}
        return Converted(ReplacedTensors(checkpoint.source, shapes, lambda name: 1 / 0), model)"""
BROKEN = [
    ("attention", "MHA", "def build(self, model): 1 / 0", "failed in build: ZeroDivisionError"),
    ("attention", "MHA", "def build(self, model): sys.exit(0)", "failed in build: SystemExit: 0"),
    ("attention", "MHA", "def build(self, model): return None", "gave None in build; give an implementation"),
    ("attention", "MHA", "def convert(self, checkpoint, model): 1 / 0", "failed in convert: ZeroDivisionError"),
    ("attention", "MHA", "def convert(self, checkpoint, model): return model", "in convert; give a Converted"),
    (
        "attention",
        "MHA",
        "def convert(self, checkpoint, model): return None, model",
        "failed in convert: AttributeError",
    ),
    ("attention", "MHA", UNMADE, "failed in convert: ZeroDivisionError"),
    ("attention", "MHA", "def conversion(self, spec): 1 / 0", "failed in conversion: ZeroDivisionError"),
    ("attention", "MHA", "def conversion(self, spec): return None", "gave None in conversion; give words"),
    ("quantizer", "Technique", "def linear(self, model, device): 1 / 0", "failed in linear: ZeroDivisionError"),
    ("quantizer", "Technique", "def linear(self, model, device): return 8", "gave 8 in linear; give a LinearFactory"),
]


@pytest.mark.parametrize(("kind", "base", "body", "words"), BROKEN)
def test_what_a_technique_breaks_is_one_line_that_names_it(
    tiny_llama_dir: Path, tmp_path: Path, kind: str, base: str, body: str, words: str
) -> None:
    text = f"{HEAD}\n\nclass Odd({base}):\n    name = 'odd'\n    summary = 'breaks its contract'\n\n    {body}\n"
    (tmp_path / "odd.py").write_text(f"{text}\n\n@hookimpl\ndef register_{kind}(register): register(Odd)\n")
    registry = Registry(plugin_dirs=[tmp_path], entry_points=False)
    config = EngineConfig.model_validate({"model": str(tiny_llama_dir), "num_kv_blocks": 64, kind: "odd"})
    with pytest.raises(PluginError) as caught:
        load_engine(config, registry)
    said = str(caught.value)
    assert said.startswith(f"{kind} 'odd' ") and words in said and "\n" not in said
