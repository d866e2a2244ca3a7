"""Built-in schedulers."""

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.prompts_first import PromptsFirst
from twinfer.plugins.scheduler.static import Static


@hookimpl
def register_scheduler(register: Register) -> None:
    register(Continuous)
    register(PromptsFirst)
    register(Static)
