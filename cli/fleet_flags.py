"""The options of `simulate` that make a fleet of replicas out of one engine.

Invariants
* Without any of them nothing changes: one engine is predicted as before.
* An option that was not given is left to the default of `core/fleet.py`, which is written once.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli.session import Session
from twinfer.cli.values import make_config, parse_size

if TYPE_CHECKING:
    from twinfer.core.config import Choice, EngineConfig
    from twinfer.core.fleet import Failure, Fleet

_FLEET, _KV, _CHANGE = "Fleet", "KV between replicas", "Autoscaling and failures"


def _fleet_options(
    replicas: Annotated[int | None, typer.Option(rich_help_panel=_FLEET, help="Replicas behind the router.")] = None,
    router: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_FLEET,
            metavar="NAME[:OPT=VAL,...]",
            help="Which replica gets a request: round_robin, random, least_loaded, prefix_aware, kv_aware or a plugin's.",
        ),
    ] = None,
    prefill_replicas: Annotated[
        int | None, typer.Option(rich_help_panel=_FLEET, help="Replicas that compute prompts; needs --decode-replicas.")
    ] = None,
    decode_replicas: Annotated[
        int | None, typer.Option(rich_help_panel=_FLEET, help="Replicas that get their KV and compute the answers.")
    ] = None,
    decode_router: Annotated[
        str | None,
        typer.Option(rich_help_panel=_FLEET, metavar="NAME[:OPT=VAL,...]", help="Router of the decode replicas."),
    ] = None,
    decode_engine: Annotated[
        list[str] | None,
        typer.Option(
            "--decode",
            rich_help_panel=_FLEET,
            metavar="FIELD=VALUE",
            help="What decode replicas have different, e.g. tp=4 or max_num_seqs=256; repeatable.",
        ),
    ] = None,
    kv_bandwidth: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_KV, metavar="SIZE", help="Bytes per second and device between replicas, e.g. 50GB."
        ),
    ] = None,
    kv_latency: Annotated[
        float | None, typer.Option(rich_help_panel=_KV, help="Seconds before the first byte of a transfer.")
    ] = None,
    fabric_bandwidth: Annotated[
        str | None,
        typer.Option(rich_help_panel=_KV, metavar="SIZE", help="Bytes per second that all transfers share."),
    ] = None,
    kv_overlap: Annotated[
        bool, typer.Option("--kv-overlap", rich_help_panel=_KV, help="Send layers while the next are computed.")
    ] = False,
    host_tier: Annotated[
        str | None,
        typer.Option(
            "--host-tier-bytes",
            rich_help_panel=_KV,
            metavar="SIZE",
            help="Host memory of a replica that keeps KV of ended requests for later prompts.",
        ),
    ] = None,
    shared_tier: Annotated[
        str | None,
        typer.Option(
            "--shared-tier-bytes",
            rich_help_panel=_KV,
            metavar="SIZE",
            help="A store of KV for all replicas, reached over the network.",
        ),
    ] = None,
    tier_block: Annotated[
        int | None, typer.Option(rich_help_panel=_KV, help="Tokens that a tier keeps or loses together.")
    ] = None,
    min_replicas: Annotated[
        int | None, typer.Option(rich_help_panel=_CHANGE, help="Least replicas of the autoscaler.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(rich_help_panel=_CHANGE, help="Most replicas; turns the autoscaler on.")
    ] = None,
    target_requests: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Open requests that a replica should have.")
    ] = None,
    target_busy: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Share of time that a replica should compute.")
    ] = None,
    scale_interval: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Seconds between decisions of the autoscaler.")
    ] = None,
    scale_down_after: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Seconds of less load before a replica goes.")
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_CHANGE, metavar="REPLICA@SECONDS", help="A failure; repeatable."),
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Mean seconds between failures of a replica.")
    ] = None,
    repair: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Seconds before a failed replica starts again.")
    ] = None,
    load_bandwidth: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHANGE, metavar="SIZE", help="Bytes per second and device at which weights are read."
        ),
    ] = None,
    boot_time: Annotated[
        float | None, typer.Option(rich_help_panel=_CHANGE, help="Seconds that a start takes besides the weights.")
    ] = None,
) -> None:
    """The prototype whose parameters `takes_fleet` copies."""


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """The fleet options as they were given."""

    session: Session
    given: Mapping[str, Any]

    @property
    def asked(self) -> bool:
        """Some fleet option was given."""
        return any(value is not None and value is not False and value != [] for value in self.given.values())

    def fleet(self, config: EngineConfig) -> Fleet | None:
        """The fleet of engines like `config`, None when no fleet option was given; raises ConfigError."""
        from pydantic import ValidationError

        from twinfer.core.errors import ConfigError
        from twinfer.core.fleet import Fleet
        from twinfer.core.mistakes import first_mistake

        if not self.asked:
            return None
        g = self.given
        fields: dict[str, Any] = {"engine": config}
        if g["prefill_replicas"] is not None and (g["replicas"] is not None or g["decode_replicas"] is None):
            other = "--replicas" if g["replicas"] is not None else "no --decode-replicas"
            raise ConfigError(
                "--prefill-replicas", g["prefill_replicas"], f"prompts alone are computed there, but {other} was given",
                "give --prefill-replicas with --decode-replicas, or --replicas",
            )  # fmt: skip
        if g["decode_replicas"] is not None:
            fields["decode"] = self._decode(config)
        elif g["decode_engine"]:
            raise ConfigError(
                "--decode", g["decode_engine"][0], "there is no decode pool", "give --decode-replicas too"
            )
        names = {"prefill_replicas": "replicas", "repair": "repair_s", "boot_time": "boot_s"}
        for name in ("replicas", "prefill_replicas", "decode_replicas", "kv_latency", "tier_block", "mtbf", "repair",
                     "boot_time"):  # fmt: skip
            if g[name] is not None:
                fields[names.get(name, name)] = g[name]
        for name, field in (("kv_bandwidth", "kv_bandwidth"), ("fabric_bandwidth", "fabric_bandwidth"),
                            ("host_tier", "host_tier_bytes"), ("shared_tier", "shared_tier_bytes"),
                            ("load_bandwidth", "load_bandwidth")):  # fmt: skip
            if g[name] is not None:
                fields[field] = parse_size("--" + field.replace("_", "-"), g[name])
        for name in ("router", "decode_router"):
            if g[name] is not None:
                fields[name] = self._router(name, g[name])
        if g["kv_overlap"]:
            fields["kv_overlap"] = True
        if g["fail"]:
            fields["failures"] = tuple(_failure(text) for text in g["fail"])
        scaler = self._autoscaler()
        if scaler:
            fields["autoscaler"] = scaler
        try:
            return Fleet(**fields)
        except ValidationError as error:
            wrong = first_mistake(error)
            name = wrong.path[-1] if wrong.path else "fleet"
            option = {"repair_s": "--repair", "boot_s": "--boot-time", "interval_s": "--scale-interval",
                      "down_after_s": "--scale-down-after",
                      "replicas": "--replicas" if g["prefill_replicas"] is None else "--prefill-replicas"}.get(name, "--" + name.replace("_", "-"))  # fmt: skip
            raise ConfigError(option, wrong.value, wrong.problem, wrong.fix) from None

    def _router(self, name: str, text: str) -> Choice:
        from twinfer.core.config import Choice, parse_choice
        from twinfer.core.errors import ConfigError

        choice = Choice(**parse_choice(text, "--" + name.replace("_", "-")))
        try:
            self.session.registry.build("router", choice)  # now, not after the model has been loaded
        except ConfigError as error:
            raise ConfigError("--" + name.replace("_", "-"), error.value, error.problem, error.fix) from None
        return choice

    def _decode(self, config: EngineConfig) -> EngineConfig:
        """`config` with the fields that `--decode` names."""
        from twinfer.core.config import EngineConfig
        from twinfer.core.errors import ConfigError

        fields = {name: getattr(config, name) for name in config.model_fields_set}
        seen: set[str] = set()
        for text in self.given["decode_engine"] or ():
            name, eq, raw = text.partition("=")
            name = name.strip().replace("-", "_")
            if not eq or name not in EngineConfig.model_fields:
                known = ", ".join(EngineConfig.model_fields)
                raise ConfigError("--decode", text, "not a field of an engine and its value", f"fields: {known}")
            if name in seen:
                raise ConfigError("--decode", text, f"{name} is given twice", "give it once")
            seen.add(name)
            try:
                fields[name] = json.loads(raw)
            except (ValueError, RecursionError):
                fields[name] = raw
        return make_config(fields)

    def _autoscaler(self) -> dict[str, Any]:
        from twinfer.core.errors import ConfigError

        names = {"min_replicas": "min_replicas", "max_replicas": "max_replicas", "target_requests": "target_requests",
                 "target_busy": "target_busy", "scale_interval": "interval_s", "scale_down_after": "down_after_s"}  # fmt: skip
        given = {field: self.given[name] for name, field in names.items() if self.given[name] is not None}
        if given and self.given["max_replicas"] is None:
            name = next(name for name in names if self.given[name] is not None)
            raise ConfigError(
                "--" + name.replace("_", "-"), self.given[name], "there is no autoscaler", "give --max-replicas too"
            )
        return given


def _failure(text: str) -> Failure:
    from twinfer.core.errors import ConfigError
    from twinfer.core.fleet import Failure

    replica, _, seconds = text.partition("@")
    try:
        return Failure(replica=int(replica), at=float(seconds))
    except ValueError:
        raise ConfigError(
            "--fail", text, "not a replica and a time", "write REPLICA@SECONDS, such as 1@30, up to 1e9 s"
        ) from None


def takes_fleet(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let `command(ctx, scenario, fleet)` have the fleet options on the command line; `takes_scenario` goes outside."""
    shared = inspect.signature(_fleet_options, eval_str=True).parameters

    def run(ctx: typer.Context, scenario: Any, **given: Any) -> Any:
        return command(ctx, scenario, FleetFlags(ctx.obj, given))

    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "fleet"]
    parameters = [*own, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in shared.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


__all__ = ["FleetFlags", "takes_fleet"]
