"""Op-time models: how long one op takes on a device."""

from __future__ import annotations

from twinfer.core.hookspecs import Register, hookimpl


@hookimpl
def register_op_time_model(register: Register) -> None:
    from twinfer.plugins.op_time.calibrated import Calibrated
    from twinfer.plugins.op_time.profiled import Profiled
    from twinfer.plugins.op_time.roofline import Roofline
    from twinfer.plugins.op_time.silicon import Silicon

    for cls in (Calibrated, Profiled, Roofline, Silicon):
        register(cls)
