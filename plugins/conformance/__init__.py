"""Kits that show whether a technique keeps its contract; `twinfer plugins check` runs them.

A third party subclasses a kit in a test file and pytest runs every `test_` method:

    from twinfer.plugins.conformance import SchedulerKit

    class TestMine(SchedulerKit):
        technique = MyScheduler
        options = {"patience": 2.0}

Those of schedulers and KV caches play random but repeatable traffic (shared prefixes, priorities, several samples,
aborts, pools from ample to a few blocks, one or two steps in flight) through a real `Core` and call `audit()` after
every event; that of routers asks about random fleets, those of the others about steps of a few models.

Invariants
* A kit has no expectations beyond `core/policy.py` and `core/routing.py`: any order of service is fine, if every request ends,
  equal views get equal answers and nothing but the answer changes.
* A failure is a `ConformanceError` that tells the seed, so that it can be played again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinfer.core.guard import FAULTS, raised
from twinfer.plugins.conformance.kit import ConformanceError, Kit, require
from twinfer.plugins.conformance.kv_caches import KVCacheKit
from twinfer.plugins.conformance.models import AdaptingKit, OpTimeKit
from twinfer.plugins.conformance.played import Played, Player, Traffic
from twinfer.plugins.conformance.routers import ReplicaFacts, RouterKit
from twinfer.plugins.conformance.schedulers import SchedulerKit

KITS: Mapping[str, type[Kit]] = {
    "scheduler": SchedulerKit, "kv_cache": KVCacheKit, "router": RouterKit, "attention": AdaptingKit,
    "quantizer": AdaptingKit, "op_time_model": OpTimeKit,
}  # fmt: skip


def check(kind: str, technique: type[Any], options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Run the kit of `kind` on `technique`: test name -> "" or why it failed. KeyError when the kind has no kit."""
    kit = type("Check", (KITS[kind],), {"technique": technique, "options": dict(options or {})})()
    results: dict[str, str] = {}
    for name in sorted(n for n in dir(kit) if n.startswith("test_")):
        try:
            getattr(kit, name)()
            results[name] = ""
        except FAULTS as error:  # whatever a technique raises is its failure, not the checker's
            results[name] = " ".join(str(error).split()) if isinstance(error, ConformanceError) else raised(error)
    return results


__all__ = [
    "KITS", "AdaptingKit", "ConformanceError", "KVCacheKit", "OpTimeKit", "Played", "Player", "ReplicaFacts", "RouterKit", "SchedulerKit", "Traffic", "check",
    "require",
]  # fmt: skip
