"""Built-in techniques, one file each, one folder per kind; loaded through the same hooks as third parties."""

BUILTINS = (
    "twinfer.plugins.scheduler",
    "twinfer.plugins.router",
    "twinfer.plugins.kv_cache",
    "twinfer.plugins.attention",
    "twinfer.plugins.model_family",
    "twinfer.plugins.quantizer",
    "twinfer.plugins.speculator",
    "twinfer.plugins.device",
    "twinfer.plugins.op_time",
    "twinfer.plugins.workload",
)
"""Modules with hook implementations; each folder's `__init__` registers the classes of its files."""
