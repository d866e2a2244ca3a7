"""`twinfer`: the command line.

Invariants
* `twinfer --help` imports neither pydantic nor numpy, torch, pyarrow or streamlit: commands import what they need.
* Whatever a user can get wrong is one line on stderr that begins with `error: ` and exit code 2, no traceback; so is what
  the machine refuses, such as to write to a full disk.
* A question that was answered with no (it does not fit, no fleet will do) ends with exit code 3, also with `--json`,
  whichever command asked it.
* With `--json`, stdout holds one JSON document and nothing else; progress, notes and what plugins print go to stderr.
* Ctrl-C ends with exit code 130 and says so: at once while nothing has begun, else after the part that is done has been
  saved.
"""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twinfer.cli import calibrate, demo, explain, facts, memory, plan, plugins, quality, replay, runs, serve, show
from twinfer.cli.session import Session
from twinfer.cli.show import NO
from twinfer.cli.usage import UsageError, check_options, message_of

_WORDS = "twinfer.words"
"""Where the context keeps the command that was found, until its options can be known."""
_GLOBAL_WITH_VALUE = ("-p", "--plugin-module", "--plugins-dir")


class Commands(TyperGroup):
    """The built-in commands, and those of plugins, which are looked for only when a name is not built in."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            session = Session(ctx.params.get("plugin_module") or (), ctx.params.get("plugins_dir") or ())
            found = session.command(cmd_name)
        return found

    def invoke(self, ctx: Any) -> Any:
        """Ctrl-C where nothing long goes on yet is said, too (`show.interruptible` says it elsewhere)."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A wrong name is answered with the known ones."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from difflib import get_close_matches

            close = get_close_matches(args[0], list(self.commands), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UsageError(f"no such command {args[0]!r}; {hint}known: {', '.join(self.commands)}")
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta[_WORDS] = (name, command, rest)
        return name, command, rest


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="""An LLM inference engine and its digital twin: run a model for real, predict the same run, compare.

    [bold]where to begin?[/bold] twinfer demo
    [bold]what runs here, and how fast?[/bold] twinfer run --model smollm2-135m --requests 8 --input-len 64 --output-len 32
    [bold]how far off is its prediction?[/bold] twinfer compare --model smollm2-135m --requests 8
    [bold]and why?[/bold] twinfer replay latest
    [bold]does a model fit a device?[/bold] twinfer memory --model llama-3.1-70b --device h100-sxm --tp 4
    [bold]how fast would it be there?[/bold] twinfer simulate --model llama-3.1-8b --device h100-sxm --rate 10
    [bold]where does the time of a step go?[/bold] twinfer explain --model llama-3.1-8b --device h100-sxm --decode 32x2048
    [bold]which is the cheapest fleet?[/bold] twinfer plan --model llama-3.1-8b --rate 5 --slo 'ttft.p95<=1'
    [bold]what is there to choose from?[/bold] twinfer models, twinfer devices, twinfer plugins
    [bold]all of it in a browser?[/bold] twinfer dashboard
    """.replace("\n    ", "\n\n    "),
    epilog="Plugins can add commands: `twinfer plugins` lists them. Each command explains itself: `twinfer run --help`. "
    "Exit codes: 0 done, 1 a check failed, 2 a mistake in what was asked, 3 answered, and the answer is no, 130 stopped.",
)


@app.callback()
def _global(
    ctx: typer.Context,
    plugin_module: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--plugin-module", metavar="MODULE", help="Load this Python module as a plugin; repeatable."
        ),
    ] = None,
    plugins_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugins-dir", metavar="DIR", help="Load every .py file of this folder as a plugin; repeatable."
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from twinfer import __version__

        typer.echo(f"twinfer {__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit()
    ctx.obj = Session(plugin_module or (), plugins_dir or ())
    name, command, words = ctx.meta[_WORDS]
    if "--json" in words and name in _commands().commands:  # a plugin's command prints what it likes
        ctx.with_resource(show.document_alone())
    check_options(command, type(ctx)(command, info_name=name, parent=ctx), words)


runs.add_commands(app)
plan.add_commands(app)
replay.add_commands(app)
calibrate.add_commands(app)
memory.add_commands(app)
facts.add_commands(app)
explain.add_commands(app)
quality.add_commands(app)
plugins.add_commands(app)
serve.add_commands(app)
demo.add_commands(app)


@functools.cache
def _commands() -> Any:
    """All commands with their options. Building them takes longer than reading most command lines."""
    return typer.main.get_command(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code: 0, 2 for a user's mistake, 3 for the answer no, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        code = _commands()(args=_global_first(given), prog_name="twinfer", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is told, not lost
    except UsageError as error:
        return _fail(message_of(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from twinfer.core.errors import DoesNotFit, TwinferError

        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # no file can have it, whoever asked
            name = str(error.filename)
            where = next(
                (given[i - 1] for i, word in enumerate(given) if i and len(word) > 200 and word in name), "path"
            )
            where = where if where.startswith("-") else "path"
            return _fail(f"{where}='{name[:80]}...': is too long for the name of a file; check the path")
        if isinstance(error, OSError):
            what = "the output" if error.filename is None else repr(str(error.filename))
            return _fail(f"{what}: {error.strerror or error}; free the space, or check the path and its permissions")
        if not isinstance(error, TwinferError):
            raise
        return _fail(str(error), NO if isinstance(error, DoesNotFit) else 2)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def _global_first(args: list[str]) -> list[str]:
    """`-p` and `--plugins-dir` may also stand after the command, where people write them."""
    first: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in _GLOBAL_WITH_VALUE:
            value = next(words, None)
            if value == "":
                raise UsageError(f"{word}='': is empty; give a value, or leave the option out")
            first += [word] if value is None else [word, value]
        elif word.startswith(("--plugin-module=", "--plugins-dir=")):
            if word.endswith("="):
                raise UsageError(f"{word}'': is empty; give a value, or leave the option out")
            first.append(word)
        else:
            rest.append(word)
    return first + rest


if __name__ == "__main__":
    sys.exit(main())
