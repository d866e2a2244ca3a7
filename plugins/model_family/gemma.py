"""The Gemma family: Gemma 2 and 3 (text). The model itself is `core/runtime/families/gemma.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.plugins.model_family.limits import reasons_against, reasons_against_moe_and_mla

if TYPE_CHECKING:
    from twinfer.core.runtime.families import DecoderModel
    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.runtime.parallel import Parallel
    from twinfer.core.runtime.weights import Loader


class GemmaFamily(Technique):
    name = "gemma"
    summary = "Gemma 2 and 3 text decoders (norms around each block, alternating windows, soft caps or q/k norms)"
    reference = "Gemma Team 2024, arXiv:2408.00118; 2025, arXiv:2503.19786"
    families: ClassVar[tuple[str, ...]] = ("gemma2", "gemma3_text")

    @classmethod
    def serves(cls, model: ModelSpec) -> bool:
        return model.family in cls.families

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        model = needs.model
        if model is None:
            return []
        reasons = reasons_against(model) + reasons_against_moe_and_mla(model)
        if not model.norm_plus_one or model.norms_per_layer != 4:
            reasons.append("other norms than Gemma's four per layer are not implemented")
        return reasons

    @classmethod
    def expected_tensors(cls, model: ModelSpec) -> dict[str, tuple[int, ...]]:
        from twinfer.core.runtime.families.gemma import expected_tensors

        return expected_tensors(model)

    @classmethod
    def unused_tensor(cls, model: ModelSpec, name: str) -> bool:
        """The eyes of a checkpoint for text and images: the engine serves its text."""
        return model.family == "gemma3_text" and name.removeprefix("model.").startswith(
            ("vision_tower.", "multi_modal_projector.")
        )

    def build(
        self, model: ModelSpec, load: Loader, linear: LinearFactory, parallel: Parallel | None = None
    ) -> DecoderModel:
        from twinfer.core.runtime.families.decoder import RankLoader
        from twinfer.core.runtime.families.gemma import Gemma
        from twinfer.core.runtime.parallel import ALONE

        return Gemma(RankLoader(model, load, linear, parallel or ALONE))
