"""Built-in attention variants."""

from __future__ import annotations

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.attention.gqa import GQA
from twinfer.plugins.attention.mha import MHA
from twinfer.plugins.attention.mla import MLA
from twinfer.plugins.attention.mqa import MQA
from twinfer.plugins.attention.trained import Trained


@hookimpl
def register_attention(register: Register) -> None:
    for technique in (MHA, GQA, MQA, MLA, Trained):
        register(technique)
