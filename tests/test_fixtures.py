"""The shared fixtures are what they say, by an independent reader."""

from __future__ import annotations

from pathlib import Path


def test_tiny_llama_dir_loads_in_transformers(tiny_llama_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    text = "def add(a, b):\n\treturn a + b"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids.shape == (1, len(text))
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.vocab_size == model.config.vocab_size == 128
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant: "
    with torch.no_grad():
        out = [model.generate(ids[:, :n], max_new_tokens=8, do_sample=False)[0, n:].tolist() for n in (3, 9, 20)]
    assert len({tuple(tokens) for tokens in out}) == 3, "greedy tokens must depend on the prompt"


def test_smollm2_is_a_gguf_file(smollm2_gguf: Path) -> None:
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert smollm2_gguf.stat().st_size > 90_000_000
