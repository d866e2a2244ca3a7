"""The options that `run`, `simulate`, `compare` and the workload of `plan` share: each declared once, with its help.

Invariants
* An option that was not given is None here; its default is that of `EngineConfig` or `Workload`, written once.
* The heading of the help (`rich_help_panel`) says what an option belongs to; the workload's are those under WORKLOAD.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL, _TECHNIQUES, _LIMITS, WORKLOAD, _RECORD = "Model and device", "Techniques", "Limits", "Workload", "Record"


def scenario_options(
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
        typer.Option(rich_help_panel=_TECHNIQUES, metavar="NAME[:OPT=VAL,...]", help="Quantizer, or none."),
    ] = None,
    speculator: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TECHNIQUES,
            metavar="NAME[:OPT=VAL,...]",
            help="What guesses tokens ahead: draft, ngram, medusa, eagle, lookahead, or none.",
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
        typer.Option("--requests", "-n", rich_help_panel=WORKLOAD, help="How many; 100, or all of a trace."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=WORKLOAD, help="Requests per second (Poisson); inf, the default, sends all at once."
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Below 1 arrivals come in bursts, above they are more even."),
    ] = None,
    ramp_to: Annotated[
        float | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Requests per second at the end of a ramp from --rate."),
    ] = None,
    rate_scale: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=WORKLOAD, help="How many times as fast requests arrive, e.g. a trace at 4 times its rate."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Clients that each send a request when their last has ended."),
    ] = None,
    input_len: Annotated[int | None, typer.Option(rich_help_panel=WORKLOAD, help="Mean tokens of a prompt.")] = None,
    output_len: Annotated[int | None, typer.Option(rich_help_panel=WORKLOAD, help="Mean tokens of an answer.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Distribution of lengths: fixed, uniform or lognormal."),
    ] = None,
    spread: Annotated[
        float | None, typer.Option(rich_help_panel=WORKLOAD, help="Its width, relative to the mean.")
    ] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(rich_help_panel=WORKLOAD, help="First tokens that prompts have in common.")
    ] = None,
    num_prefixes: Annotated[
        int | None, typer.Option(rich_help_panel=WORKLOAD, help="Different shared prefixes.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WORKLOAD,
            metavar="FILE",
            help="Azure or BurstGPT CSV, Mooncake or prompts JSONL, ShareGPT JSON, a request log, or a stored run's folder.",
        ),
    ] = None,
    trace_start: Annotated[
        float | None, typer.Option(rich_help_panel=WORKLOAD, help="Leave out a trace's requests before this second.")
    ] = None,
    trace_end: Annotated[
        float | None, typer.Option(rich_help_panel=WORKLOAD, help="Leave out those from this second on.")
    ] = None,
    repeat: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WORKLOAD,
            help="Where --requests exceeds a trace: none (an error), loop, or sample (rows at random).",
        ),
    ] = None,
    input_scale: Annotated[
        float | None, typer.Option(rich_help_panel=WORKLOAD, help="Factor on a trace's prompt lengths.")
    ] = None,
    output_scale: Annotated[
        float | None, typer.Option(rich_help_panel=WORKLOAD, help="Factor on its answer lengths.")
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Turns of a session; each begins with all that was said before."),
    ] = None,
    think_time: Annotated[
        float | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Mean seconds between an answer and the next turn."),
    ] = None,
    images_per_request: Annotated[
        float | None, typer.Option(rich_help_panel=WORKLOAD, help="Images in each prompt, of a model that sees.")
    ] = None,
    image_counts: Annotated[
        str | None, typer.Option(rich_help_panel=WORKLOAD, help="How many each request has: fixed, or poisson.")
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(rich_help_panel=WORKLOAD, metavar="WxH", help="Pixels of each image; what the model takes."),
    ] = None,
    image_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=WORKLOAD, help="Tokens of each in the prompt, instead of a size.")
    ] = None,
    image_compression: Annotated[
        float | None,
        typer.Option(rich_help_panel=WORKLOAD, help="How many times fewer tokens than the model makes of an image."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(rich_help_panel=WORKLOAD, help="A text to continue; repeatable.")
    ] = None,
    too_long: Annotated[
        str | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Requests beyond the context: keep (they are rejected) or filter."),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(rich_help_panel=WORKLOAD, metavar="NAME[:OPT=VAL,...]", help="Workload plugin to use."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(rich_help_panel=WORKLOAD, help="0 is greedy.")] = None,
    beam_width: Annotated[
        int | None, typer.Option(rich_help_panel=WORKLOAD, help="Beams of a search; 1, the default, is none.")
    ] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", rich_help_panel=WORKLOAD, help="Let the model end its answers early.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=WORKLOAD, help="Of lengths, arrivals and sampling.")
    ] = None,
    name: Annotated[str, typer.Option(rich_help_panel=_RECORD, help="A name for the stored run.")] = "",
    save: Annotated[bool, typer.Option("--save/--no-save", rich_help_panel=_RECORD, help="Keep the run.")] = True,
    runs_dir: Annotated[
        Path | None, typer.Option(rich_help_panel=_RECORD, metavar="DIR", help="Where runs are kept; your data folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=_RECORD, help="Print one JSON document.")] = False,
) -> None:
    """The prototype whose parameters `takes_scenario` copies (`cli/flags.py`)."""


__all__ = ["WORKLOAD", "scenario_options"]
