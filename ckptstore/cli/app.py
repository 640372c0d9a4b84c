"""The command's root: finds commands, and turns every end into an exit code and a message."""

from __future__ import annotations

import importlib
import keyword
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ckptstore._version import __version__
from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, examples_text, general_options
from ckptstore.errors import CkptstoreError

# Where each command is; a module is imported when its command is called, or for help.
COMMANDS = {
    "init": "ckptstore.cli.stores",
    "rebuild": "ckptstore.cli.stores",
    "ls": "ckptstore.cli.ls",
    "show": "ckptstore.cli.show",
    "verify": "ckptstore.cli.verify",
    "status": "ckptstore.cli.status",
    "replicate": "ckptstore.cli.replicate",
    "fetch": "ckptstore.cli.replicate",
    "repair": "ckptstore.cli.replicate",
    "evict": "ckptstore.cli.evict",
    "gc": "ckptstore.cli.gc",
    "policy": "ckptstore.cli.policy",
    "forget": "ckptstore.cli.forget",
    "undelete": "ckptstore.cli.forget",
    "tag": "ckptstore.cli.marks",
    "untag": "ckptstore.cli.marks",
    "pin": "ckptstore.cli.marks",
    "unpin": "ckptstore.cli.marks",
    "invalidate": "ckptstore.cli.marks",
    "diff": "ckptstore.cli.diff",
    "du": "ckptstore.cli.du",
    "query": "ckptstore.cli.query",
    "plot": "ckptstore.cli.plot",
    "advise": "ckptstore.cli.advise",
    "ui": "ckptstore.cli.ui",
    "export": "ckptstore.cli.transfer",
    "import": "ckptstore.cli.transfer",
    "average": "ckptstore.cli.average",
    "metrics": "ckptstore.cli.metrics",
    "doctor": "ckptstore.cli.doctor",
    "demo": "ckptstore.cli.demo",
    "completion": "ckptstore.cli.completion",
}

COMPLETION_VARIABLE = "_CKPTSTORE_COMPLETE"

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_NO_READER = 128 + signal.SIGPIPE


class App(click.Group):
    """The root command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order above, which is that of a first visit."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        attribute = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name  # import_
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with similar names in the error."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=3)
            raise click.UsageError(
                f"there is no command {name!r}" + (f"; similar: {', '.join(near)}" if near else ""), ctx
            )
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # always: the exit codes are ours
        **extra: Any,
    ) -> NoReturn:
        """Runs, and ends the process."""
        words = list(sys.argv[1:] if args is None else args)
        invocation = Invocation()
        output.prepare_streams()
        if COMPLETION_VARIABLE in os.environ:
            importlib.import_module("ckptstore.cli.completion")  # the shells that click does not know well
            complete_var = COMPLETION_VARIABLE
        code = 0
        try:
            result = super().main(
                words, prog_name, complete_var, standalone_mode=False, obj=invocation, **extra
            )
            code = result if isinstance(result, int) else 0
            output.flush()
        except (click.Abort, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
            code = EXIT_INTERRUPTED
        except BrokenPipeError:
            code = _no_reader()
        except Exception as error:  # noqa: BLE001 - the last one who can tell it to a person
            invocation.as_json = invocation.as_json or "--json" in words
            code = _report(error, invocation)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a reader that has gone away ends it quietly, as other programs end."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click sees it, which would say 1
            ctx.exit(_no_reader())


def _no_reader() -> int:
    # What is still buffered would be written at the end of the process, and fail again, aloud.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return EXIT_NO_READER


def _report(error: Exception, invocation: Invocation) -> int:
    kind, message, hint, code = _explain(error)
    try:
        if invocation.as_json:
            output.emit_json({"error": {"kind": kind, "message": message, "hint": hint, "exit_code": code}})
        if invocation.shows_tracebacks:
            traceback.print_exception(error, file=sys.stderr)
        output.complain(message, hint)
        output.flush()
    except BrokenPipeError:
        _no_reader()
    return code


def _explain(error: Exception) -> tuple[str, str, str | None, int]:
    """(kind, message, hint, exit code) of whatever ended the command."""
    if isinstance(error, CkptstoreError):
        return error.kind, error.message, error.hint, error.exit_code
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "ckptstore"
        return "usage", error.format_message(), f"`{path} --help` says how it is used", error.exit_code
    if isinstance(error, click.ClickException):
        return "usage", error.format_message(), None, error.exit_code
    hint = "a mistake in this program: the option -vv shows where; please report it"
    return "internal", f"{type(error).__name__}: {error}", hint, 1


_EXAMPLES = ("ckptstore init ckpts", "ckptstore -s ckpts ls", "ckptstore -s ckpts show gpt@latest")


@click.group(
    cls=App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples_text(_EXAMPLES),
)
@click.version_option(__version__, "--version", prog_name="ckptstore", message="%(prog)s %(version)s")
@general_options
def app() -> None:
    """Keeps checkpoints of large trainings: content-addressed, verified, exact.

    STORE is given by -s, else by $CKPTSTORE, else by the nearest ckptstore.toml.
    A REF names a checkpoint: RUN@latest, RUN@12000 (a step), RUN@TAG, RUN@min:loss, RUN@max:acc, or the
    beginning of a checkpoint id.
    """
