"""Where requests come from: synthetic, production traces, prompt files."""

from __future__ import annotations

from twinfer.core.hookspecs import Register, hookimpl


@hookimpl
def register_workload(register: Register) -> None:
    from twinfer.plugins.workload.conversations import ShareGPT
    from twinfer.plugins.workload.prompts import Prompts
    from twinfer.plugins.workload.records import Log, StoredRun
    from twinfer.plugins.workload.synthetic import Synthetic
    from twinfer.plugins.workload.traces import AzureTrace, BurstGPTTrace, MooncakeTrace

    for cls in (StoredRun, ShareGPT, Prompts, AzureTrace, BurstGPTTrace, MooncakeTrace, Log, Synthetic):
        register(cls)
