"""Built-in KV caches."""

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged


@hookimpl
def register_kv_cache(register: Register) -> None:
    register(Paged)
    register(Contiguous)
