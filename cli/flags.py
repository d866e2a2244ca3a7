"""The options that `run`, `simulate` and `compare` share, and the ones generated from techniques.

A command takes them all by `@takes_scenario`: its parameter `scenario` is then filled from the command line.

Invariants
* One declaration: the three commands cannot drift apart.
* An option that was not given is left to the default of `EngineConfig` or `Workload`, which are written once.
* Every option of every loaded technique is a flag `--KIND.OPTION`; it applies to the technique chosen for that
  kind, whose own `Options` model checks it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from twinfer.cli.session import Session

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from twinfer.core.config import Choice, EngineConfig
    from twinfer.core.workload import Workload

_MODEL, _TECHNIQUES, _LIMITS, _WORKLOAD, _RECORD = "Model and device", "Techniques", "Limits", "Workload", "Record"
FLAG_KINDS = ("scheduler", "kv_cache", "attention", "quantizer", "speculator", "workload")
_CONFIG_FLAGS = {"quantizer": "--quant"}


def _scenario_options(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            rich_help_panel=_MODEL,
            help="A name of `twinfer models`, a config.json, a directory, a GGUF file or a hub id.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MODEL, help="A name of `twinfer devices` or a device file; 'auto' is this machine."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(rich_help_panel=_MODEL, help="Of weights and activations: float32, bfloat16 or float16."),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="Of the KV cache; 'auto' is the one of the activations.")
    ] = None,
    num_devices: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Devices in all; those of one replica.")
    ] = None,
    tp: Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Pipeline stages.")] = None,
    cp: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Ranks that share the tokens of a prompt.")
    ] = None,
    dp: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Groups of ranks that attend to different requests.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Ranks that the experts are spread over.")
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TECHNIQUES, metavar="NAME[:OPT=VAL,...]", help="Scheduler, e.g. continuous:chunk_size=64."
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TECHNIQUES, metavar="NAME[:OPT=VAL,...]", help="KV cache, e.g. paged:block_size=32."
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TECHNIQUES, metavar="NAME[:OPT=VAL,...]", help="Attention variant instead of the model's."
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(rich_help_panel=_TECHNIQUES, metavar="NAME[:OPT=VAL,...]", help="Quantizer."),
    ] = None,
    speculator: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TECHNIQUES,
            metavar="NAME[:OPT=VAL,...]",
            help="What guesses tokens ahead: draft, ngram, medusa or eagle.",
        ),
    ] = None,
    op_time: Annotated[
        list[str] | None,
        typer.Option(
            "--op-time-model",
            "--op-time",
            rich_help_panel=_TECHNIQUES,
            metavar="NAME",
            help="Op-time model of the simulator; repeat for a chain.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(rich_help_panel=_LIMITS, help="Prompt plus output tokens of one request.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(rich_help_panel=_LIMITS, help="Sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=_LIMITS, help="Tokens in one step.")
    ] = None,
    max_outstanding: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_LIMITS,
            help="Steps launched before the first is done; 2 hides the CPU's work (simulator only).",
        ),
    ] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(rich_help_panel=_LIMITS, help="Blocks of the KV pool.")] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory-bytes",
            "--kv-memory",
            rich_help_panel=_LIMITS,
            metavar="SIZE",
            help="Memory of the KV pool, e.g. 512MiB or 4GiB.",
        ),
    ] = None,
    preemption: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_LIMITS,
            help="KV of a sequence that must give way: recompute, or swap it to --host-kv-bytes of host memory.",
        ),
    ] = None,
    host_kv: Annotated[
        str | None,
        typer.Option(
            "--host-kv-bytes", rich_help_panel=_LIMITS, metavar="SIZE", help="Host memory for swapped KV, e.g. 4GiB."
        ),
    ] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(rich_help_panel=_LIMITS, help="Share of device memory to use, in (0, 1].")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", "-n", rich_help_panel=_WORKLOAD, help="How many; 100, or all of a trace."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_WORKLOAD, help="Requests per second (Poisson); inf, the default, sends all at once."
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="Below 1 arrivals come in bursts, above they are more even."),
    ] = None,
    ramp_to: Annotated[
        float | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="Requests per second at the end of a ramp from --rate."),
    ] = None,
    rate_scale: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_WORKLOAD, help="How many times as fast requests arrive, e.g. a trace at 4 times its rate."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="Clients that each send a request when their last has ended."),
    ] = None,
    input_len: Annotated[int | None, typer.Option(rich_help_panel=_WORKLOAD, help="Mean tokens of a prompt.")] = None,
    output_len: Annotated[int | None, typer.Option(rich_help_panel=_WORKLOAD, help="Mean tokens of an answer.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="Distribution of lengths: fixed, uniform or lognormal."),
    ] = None,
    spread: Annotated[
        float | None, typer.Option(rich_help_panel=_WORKLOAD, help="Its width, relative to the mean.")
    ] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(rich_help_panel=_WORKLOAD, help="First tokens that prompts have in common.")
    ] = None,
    num_prefixes: Annotated[
        int | None, typer.Option(rich_help_panel=_WORKLOAD, help="Different shared prefixes.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WORKLOAD,
            metavar="FILE",
            help="Azure or BurstGPT CSV, Mooncake or prompts JSONL, ShareGPT JSON, a request log, or a stored run's folder.",
        ),
    ] = None,
    trace_start: Annotated[
        float | None, typer.Option(rich_help_panel=_WORKLOAD, help="Leave out a trace's requests before this second.")
    ] = None,
    trace_end: Annotated[
        float | None, typer.Option(rich_help_panel=_WORKLOAD, help="Leave out those from this second on.")
    ] = None,
    repeat: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WORKLOAD,
            help="Where --requests exceeds a trace: none (an error), loop, or sample (rows at random).",
        ),
    ] = None,
    input_scale: Annotated[
        float | None, typer.Option(rich_help_panel=_WORKLOAD, help="Factor on a trace's prompt lengths.")
    ] = None,
    output_scale: Annotated[
        float | None, typer.Option(rich_help_panel=_WORKLOAD, help="Factor on its answer lengths.")
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="Turns of a session; each begins with all that was said before."),
    ] = None,
    think_time: Annotated[
        float | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="Mean seconds between an answer and the next turn."),
    ] = None,
    images_per_request: Annotated[
        float | None, typer.Option(rich_help_panel=_WORKLOAD, help="Images in each prompt, of a model that sees.")
    ] = None,
    image_counts: Annotated[
        str | None, typer.Option(rich_help_panel=_WORKLOAD, help="How many each request has: fixed, or poisson.")
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(rich_help_panel=_WORKLOAD, metavar="WxH", help="Pixels of each image; what the model takes."),
    ] = None,
    image_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=_WORKLOAD, help="Tokens of each in the prompt, instead of a size.")
    ] = None,
    image_compression: Annotated[
        float | None,
        typer.Option(rich_help_panel=_WORKLOAD, help="How many times fewer tokens than the model makes of an image."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_WORKLOAD, help="A text to continue; repeatable.")
    ] = None,
    too_long: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WORKLOAD, help="Requests beyond the context: keep (they are rejected) or filter."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(rich_help_panel=_WORKLOAD, metavar="NAME[:OPT=VAL,...]", help="Workload plugin to use."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(rich_help_panel=_WORKLOAD, help="0 is greedy.")] = None,
    beam_width: Annotated[
        int | None, typer.Option(rich_help_panel=_WORKLOAD, help="Beams of a search; 1, the default, is none.")
    ] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", rich_help_panel=_WORKLOAD, help="Let the model end its answers early.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=_WORKLOAD, help="Of lengths, arrivals and sampling.")
    ] = None,
    name: Annotated[str, typer.Option(rich_help_panel=_RECORD, help="A name for the stored run.")] = "",
    save: Annotated[bool, typer.Option("--save/--no-save", rich_help_panel=_RECORD, help="Keep the run.")] = True,
    runs_dir: Annotated[
        Path | None, typer.Option(rich_help_panel=_RECORD, metavar="DIR", help="Where runs are kept; your data folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=_RECORD, help="Print one JSON document.")] = False,
) -> None:
    """The prototype whose parameters `takes_scenario` copies."""


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
            k: canonical_dtype(fields[k], _flag(k)) for k in ("dtype", "kv_dtype") if fields.get(k, "auto") != "auto"
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
        from twinfer.core.workload import source_of

        g = self.given
        source = source_of(workload, self.session.registry)
        flags = {"prompts": "prompt"}
        for name in getattr(source, "ignores", ()):
            name = flags.get(name, name)
            if g.get(name) in (None, []):
                continue
            if workload.trace and name in ("input_len", "output_len"):  # scripts may give a trace and these
                note(f"{_flag(name)} is not used: the lengths are those of --trace {workload.trace}")
            else:
                raise ConfigError(
                    _flag(name), g[name], f"requests of kind {getattr(source, 'name', '')!r} do not depend on it",
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
        from twinfer.core.config import Choice, EngineConfig, parse_choice
        from twinfer.core.errors import ConfigError
        from twinfer.core.registry import OPTION_OF_KIND

        more = self.technique_options.get(kind, {})
        if text is None:
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
        parsed = parse_choice(text, OPTION_OF_KIND[kind])
        return Choice(name=parsed["name"], options={**parsed["options"], **more})


def parse_technique(session: Session, kind: str, text: str) -> Choice:
    """The technique `text` of `kind`, checked now, before a model is loaded."""
    from twinfer.core.config import Choice, parse_choice
    from twinfer.core.registry import OPTION_OF_KIND

    choice = Choice(**parse_choice(text, OPTION_OF_KIND[kind]))
    session.registry.build(kind, choice)
    return choice


def make_config(fields: dict[str, Any]) -> EngineConfig:
    """An EngineConfig; the first mistake becomes a ConfigError that names the flag."""
    from pydantic import ValidationError

    from twinfer.core.config import EngineConfig
    from twinfer.core.errors import ConfigError

    try:
        return EngineConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "configuration"
        message = first["msg"].lower()
        raise ConfigError(_flag(name), first.get("input"), message, "see `twinfer run --help`") from None


def _flag(field_name: str) -> str:
    return _CONFIG_FLAGS.get(field_name, "--" + field_name.replace("_", "-"))


def parse_size(option: str, text: str) -> int:
    """Bytes of `4GiB`, `512 MB`, `1e9`."""
    from twinfer.core.errors import ConfigError

    units = {"": 1, "b": 1, "k": 2**10, "kb": 10**3, "kib": 2**10, "m": 2**20, "mb": 10**6, "mib": 2**20,
             "g": 2**30, "gb": 10**9, "gib": 2**30, "t": 2**40, "tb": 10**12, "tib": 2**40}  # fmt: skip
    number = text.strip().lower()
    unit = number.lstrip("0123456789.")
    if unit.startswith("e"):  # 1e9
        unit = ""
    try:
        value = float(number[: len(number) - len(unit)]) * units[unit.strip()]
    except (ValueError, KeyError):
        raise ConfigError(option, text, "not a size", "write a number with a unit, such as 512MiB or 4GiB") from None
    if not 1 <= value < 2**63:
        raise ConfigError(option, text, "out of range", "give from one byte to 8388607TiB")
    return int(value)


def takes_scenario(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let `command(ctx, scenario, ...)` have all shared options on the command line."""
    return _takes(command, inspect.signature(_scenario_options, eval_str=True).parameters)


def takes_workload(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let `command(ctx, scenario, ...)` have the shared options that describe the workload, and no others."""
    every = inspect.signature(_scenario_options, eval_str=True).parameters
    return _takes(command, {k: p for k, p in every.items() if _panel(p) == _WORKLOAD})


def _panel(parameter: inspect.Parameter) -> str:
    """The heading of the help under which an option stands."""
    return next((str(o.rich_help_panel) for o in get_args(parameter.annotation)[1:] if o.rich_help_panel), "")


def _takes(command: Callable[..., Any], shared: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    own = inspect.signature(command, eval_str=True).parameters

    def run(ctx: typer.Context, **given: Any) -> Any:
        scenario = Scenario(ctx.obj, {k: given[k] for k in shared}, ctx.meta.get(_META, {}))
        return command(ctx, scenario, **{k: v for k, v in given.items() if k not in shared})

    extra = [p for name, p in own.items() if name not in ("ctx", "scenario")]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*extra, *shared.values()))]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


# --- generated flags --------------------------------------------------------------------------------

_META = "twinfer.technique_options"


class ScenarioCommand(TyperCommand):
    """A command whose help and parser also know the options of all loaded techniques."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        if not isinstance(ctx.obj, Session):
            return params
        if "twinfer.generated" not in ctx.meta:
            ctx.meta["twinfer.generated"] = generated_params(ctx.obj)
            _tell_defaults(params)
        return [*params[:-1], *ctx.meta["twinfer.generated"], params[-1]]  # --help stays last


def _tell_defaults(params: list[Any]) -> None:
    """Add to each help text the default of the field that the option sets."""
    from twinfer.core.config import Choice, EngineConfig
    from twinfer.core.workload import Workload

    both = (*Workload.model_fields.items(), *EngineConfig.model_fields.items())
    defaults = {name: info.default for name, info in both if not info.is_required()}
    for param in params:
        default = defaults.get(param.name)
        more = f" (default {default.name if isinstance(default, Choice) else default})"
        if isinstance(default, str | int | float | Choice) and param.help and not param.help.endswith(more):
            param.help += more


def generated_params(session: Session) -> list[Any]:
    """One parameter for every option of every technique of `FLAG_KINDS`."""
    from twinfer.core.registry import OPTION_OF_KIND

    parameters: list[inspect.Parameter] = []
    for kind in FLAG_KINDS:
        about: dict[str, list[str]] = {}
        for item in session.registry.all(kind):
            for name, info in item.cls.Options.model_fields.items():
                about.setdefault(name, []).append(f"{item.name}: {_about(info)}")
        for name, texts in about.items():
            flag = f"{OPTION_OF_KIND[kind]}.{name.replace('_', '-')}"
            option = typer.Option(
                flag, callback=_keep(kind, name), expose_value=False, metavar="VALUE", show_default=False,
                rich_help_panel="Options of techniques", help="; ".join(texts),
            )  # fmt: skip
            parameter = inspect.Parameter(
                f"{kind}__{name}",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, option],
            )
            parameters.append(parameter)

    def prototype(**given: Any) -> None: ...

    prototype.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    prototype.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(prototype)
    return list(typer.main.get_command(app).params)


def _about(info: FieldInfo) -> str:
    """What an option does, the words it takes and its default."""
    more = []
    if get_origin(info.annotation) is Literal:
        more.append(", ".join(str(word) for word in get_args(info.annotation) if word != ""))
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if default not in (None, ""):
        more.append(f"default {default}")
    text = str(info.description or info.annotation)
    return f"{text} ({'; '.join(more)})" if more else text


def _keep(kind: str, name: str) -> Callable[..., None]:
    def callback(ctx: typer.Context, value: str | None) -> None:
        if value is None:
            return
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        ctx.meta.setdefault(_META, {}).setdefault(kind, {})[name] = parsed

    return callback


__all__ = ["Scenario", "ScenarioCommand", "make_config", "parse_size", "takes_scenario", "takes_workload"]
