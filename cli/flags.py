"""What the shared options mean: a command's `scenario`, filled from the command line.

A command takes all of them by `@takes_scenario` (or those of the workload by `@takes_workload`); `scenario_options.py`
declares them, `technique_flags.py` makes those of techniques.

Invariants
* One declaration: the commands cannot drift apart.
* What would be ignored is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import typer

from twinfer.cli.scenario_options import WORKLOAD, scenario_options
from twinfer.cli.session import Session
from twinfer.cli.technique_flags import GIVEN
from twinfer.cli.values import flag_of, make_config, parse_size

if TYPE_CHECKING:
    from twinfer.core.config import Choice, EngineConfig
    from twinfer.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """The shared options as they were given; `technique_options` are the generated flags, kind -> option -> value."""

    session: Session
    given: dict[str, Any]
    technique_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.given[name]
        except KeyError:
            raise AttributeError(name) from None

    def config(self) -> EngineConfig:
        """The engine's configuration; raises ConfigError in the words of the command line."""
        from twinfer.core.config import Choice, parse_choice
        from twinfer.core.dtypes import canonical_dtype
        from twinfer.core.layout import SIZES

        g = self.given
        fields = {k: g[k] for k in ("model", "device", "dtype", "kv_dtype", "num_devices", *SIZES, "max_model_len",
                                    "max_num_seqs", "max_num_batched_tokens", "max_outstanding", "num_kv_blocks",
                                    "memory_fraction", "preemption", "seed") if g[k] is not None}  # fmt: skip
        fields |= {
            k: canonical_dtype(fields[k], flag_of(k)) for k in ("dtype", "kv_dtype") if fields.get(k, "auto") != "auto"
        }
        if g["op_time"]:
            fields["op_time"] = tuple(g["op_time"])
        if g["kv_memory"] is not None:
            fields["kv_memory_bytes"] = parse_size("--kv-memory-bytes", g["kv_memory"])
        if g["host_kv"] is not None:
            fields["host_kv_bytes"] = parse_size("--host-kv-bytes", g["host_kv"])
        for kind, text in (("scheduler", g["scheduler"]), ("kv_cache", g["kv_cache"]), ("attention", g["attention"]),
                           ("quantizer", g["quant"]), ("speculator", g["speculator"])):  # fmt: skip
            choice = self._choice(kind, text)
            if choice is not None:
                fields[kind] = choice
        config = make_config(fields)
        for kind in ("scheduler", "kv_cache", "attention", "quantizer", "speculator"):
            choice = getattr(config, kind)
            if choice is not None:  # now, not after the model has been loaded
                self.session.registry.build(kind, choice)
        for op_time in config.op_time:
            self.session.registry.build("op_time_model", Choice(**parse_choice(op_time, "--op-time-model")))
        return config

    def workload(self) -> Workload:
        """The requests; raises ConfigError or RequestError in the words of the command line."""
        from twinfer.core.errors import RequestError
        from twinfer.core.workload import make_workload

        g = self.given
        names = {"requests": "num_requests"}
        fields = {names.get(k, k): g[k] for k in ("requests", "rate", "burstiness", "ramp_to", "rate_scale", "concurrency", "input_len",
                                                  "output_len", "lengths", "spread", "shared_prefix", "num_prefixes",
                                                  "trace", "trace_start", "trace_end", "repeat", "input_scale", "output_scale",
                                                  "turns", "think_time", "images_per_request", "image_counts", "image_size",
                                                  "image_tokens", "image_compression", "too_long", "temperature", "beam_width",
                                                  "seed") if g[k] is not None}  # fmt: skip
        for number, text in enumerate(g["prompt"] or (), 1):
            if not text.strip():
                raise RequestError(f"--prompt {text!r}: prompt {number} is empty; give at least one word")
        if g["prompt"]:
            fields["prompts"] = tuple(g["prompt"])
        if g["stop_at_eos"]:
            fields["ignore_eos"] = False
        source = self._choice("workload", g["workload"])
        if source is not None:
            self.session.registry.build("workload", source)
            fields["source"] = source
        workload = make_workload(**fields)
        self._refuse_ignored(workload)
        return workload

    def _refuse_ignored(self, workload: Workload) -> None:
        """An option that would change nothing is a mistake."""
        from twinfer.cli.show import note
        from twinfer.core.errors import ConfigError
        from twinfer.core.workload_source import source_of

        g = self.given
        source = source_of(workload, self.session.registry)
        flags = {"prompts": "prompt"}
        for name in source.ignores:
            name = flags.get(name, name)
            if g.get(name) in (None, []):
                continue
            if workload.trace and name in ("input_len", "output_len"):  # scripts may give a trace and these
                note(f"{flag_of(name)} is not used: the lengths are those of --trace {workload.trace}")
            else:
                raise ConfigError(
                    flag_of(name), g[name], f"requests of kind {source.name!r} do not depend on it",
                    "leave it out",
                )  # fmt: skip
        if workload.prompts and (workload.num_requests or 0) > len(workload.prompts):
            raise ConfigError(
                "--requests", workload.num_requests, f"only {len(workload.prompts)} --prompt was given"
                if len(workload.prompts) == 1 else f"only {len(workload.prompts)} --prompt were given",
                "leave --requests out, or repeat --prompt",
            )  # fmt: skip
        if g["num_prefixes"] is not None and not workload.shared_prefix:
            raise ConfigError(
                "--num-prefixes", g["num_prefixes"], "prompts share no prefix", "give --shared-prefix too"
            )

    def _choice(self, kind: str, text: str | None) -> Choice | None:
        """The technique named by `text` (or the default one) with the generated flags of `kind` added."""
        from twinfer.core.config import Choice, EngineConfig, choice_of
        from twinfer.core.errors import ConfigError
        from twinfer.core.registry import OPTION_OF_KIND

        more = self.technique_options.get(kind, {})
        parsed = None if text is None else choice_of(kind, text, OPTION_OF_KIND[kind])
        if parsed is None:
            if not more:
                return None
            default = EngineConfig.model_fields[kind].default if kind in EngineConfig.model_fields else None
            if default is None:
                flag = f"{OPTION_OF_KIND[kind]}.{next(iter(more))}".replace("_", "-")
                raise ConfigError(
                    flag, next(iter(more.values())), f"no {kind.replace('_', ' ')} is chosen",
                    f"give {OPTION_OF_KIND[kind]} NAME too",
                )  # fmt: skip
            return Choice(name=default.name, options={**default.options, **more})
        twice = [name for name in parsed.options if name in more]
        if twice:
            flag = f"{OPTION_OF_KIND[kind]}.{twice[0]}".replace("_", "-")
            raise ConfigError(flag, more[twice[0]], f"{OPTION_OF_KIND[kind]} {text} says it, too", "give it once")
        return Choice(name=parsed.name, options={**parsed.options, **more})


def takes_scenario(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let `command(ctx, scenario, ...)` have all shared options on the command line."""
    return _takes(command, inspect.signature(scenario_options, eval_str=True).parameters)


def takes_workload(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let `command(ctx, scenario, ...)` have the shared options that describe the workload, and no others."""
    every = inspect.signature(scenario_options, eval_str=True).parameters
    return _takes(command, {k: p for k, p in every.items() if _panel(p) == WORKLOAD})


def _panel(parameter: inspect.Parameter) -> str:
    """The heading of the help under which an option stands."""
    return next((str(o.rich_help_panel) for o in get_args(parameter.annotation)[1:] if o.rich_help_panel), "")


def _takes(command: Callable[..., Any], shared: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    own = inspect.signature(command, eval_str=True).parameters

    def run(ctx: typer.Context, **given: Any) -> Any:
        scenario = Scenario(ctx.obj, {k: given[k] for k in shared}, ctx.meta.get(GIVEN, {}))
        return command(ctx, scenario, **{k: v for k, v in given.items() if k not in shared})

    extra = [p for name, p in own.items() if name not in ("ctx", "scenario")]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*extra, *shared.values()))]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


__all__ = ["Scenario", "takes_scenario", "takes_workload"]
