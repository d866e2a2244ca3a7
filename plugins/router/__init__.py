"""Built-in routers."""

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.router.kv_aware import KVAware
from twinfer.plugins.router.load import LeastLoaded, RandomOfTwo, RoundRobin
from twinfer.plugins.router.prefix_aware import PrefixAware


@hookimpl
def register_router(register: Register) -> None:
    register(RoundRobin)
    register(RandomOfTwo)
    register(LeastLoaded)
    register(PrefixAware)
    register(KVAware)
