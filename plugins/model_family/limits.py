"""What the built-in model files cannot do, in words."""

from __future__ import annotations

from twinfer.core.spec import ModelSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "gguf_factors")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


def reasons_against(model: ModelSpec) -> list[str]:
    """Reasons that hold for every built-in family."""
    reasons = []
    if "stored_as" in model.extra:
        reasons.append(
            f"its weights are stored as {model.extra['stored_as']}, which the engine cannot read; "
            "use a checkpoint that is not quantized, or a GGUF file"
        )
    if model.family != "gemma3_text" and "part_of" in model.extra:
        reasons.append(
            f"its checkpoint is a {model.extra['part_of']}, whose text the engine cannot pick out; use one of text alone"
        )
    if model.linear_attention is not None:
        reasons.append("layers of linear attention are not implemented")
    if model.sparse_index is not None:
        reasons.append("an index that picks the keys (sparse attention) is not implemented")
    if model.attention_gate:
        reasons.append("a gate on the attention output is not implemented")
    if model.moe is not None and (model.moe.latent_size or model.moe.shared_gate):
        reasons.append("experts on a latent, or a gate on the shared ones, are not implemented")
    if not model.gated_mlp:
        reasons.append("an MLP without gate is not implemented")
    if model.attention_sinks:
        reasons.append("attention sinks are not implemented")
    scaling = model.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        reasons.append(f"rope scaling {kind!r} is not implemented (known: {', '.join(ROPE_KINDS)})")
    if model.hidden_act not in ACTIVATIONS:
        reasons.append(f"activation {model.hidden_act!r} is not implemented (known: {', '.join(ACTIVATIONS)})")
    return reasons


def reasons_against_moe_and_mla(model: ModelSpec) -> list[str]:
    """Reasons of the families that have dense layers and one QKV projection."""
    reasons = []
    if model.moe is not None:
        reasons.append("mixture-of-experts layers are not implemented")
    if model.mla is not None:
        reasons.append("latent attention (MLA) is not implemented")
    if model.v_dim != model.head_dim:
        reasons.append("value heads of another width than query heads are not implemented")
    return reasons
