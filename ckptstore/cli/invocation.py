"""What one call of the command was told in general: which store, how to print, how much to say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import click
from click.shell_completion import CompletionItem

from ckptstore import config
from ckptstore.errors import StoreNotFoundError

if TYPE_CHECKING:
    from ckptstore.store import Store

P = ParamSpec("P")

DEBUG_VARIABLE = "CKPTSTORE_DEBUG"


@dataclasses.dataclass(slots=True)
class Invocation:
    """The general options, wherever they stood on the command line.

    Attributes:
        location: as given by ``-s``; None when it was not.
        verbosity: how many ``-v``.
    """

    location: str | None = None
    as_json: bool = False
    quiet: bool = False
    verbosity: int = 0

    @property
    def shows_tracebacks(self) -> bool:
        """For those who look for a mistake in this program."""
        return self.verbosity > 1 or (os.environ.get(DEBUG_VARIABLE) or "0") != "0"

    @property
    def found_location(self) -> str:
        """Of the store: ``-s``, else ``$CKPTSTORE``, else the nearest ``ckptstore.toml``.

        Raises:
            StoreNotFoundError: none of them.
        """
        if self.location is not None:
            return self.location
        found = config.find_location(here(), os.environ)
        if found is None:
            raise StoreNotFoundError(
                f"no store was named: no -s, no ${config.VARIABLE}, and no {config.FILE_NAME} here or above",
                hint=f"give -s STORE or set {config.VARIABLE}; `ckptstore init DIR` makes a new store",
            )
        return found

    @contextlib.contextmanager
    def open_store(self) -> Iterator[Store]:
        """The store, closed at the end."""
        import ckptstore

        with ckptstore.open(self.found_location) as store:
            yield store

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """The library's log lines on stderr while it lasts: warnings, with ``-v`` more, with ``-q`` fewer."""
        levels = (logging.WARNING, logging.INFO, logging.DEBUG)
        level = logging.ERROR if self.quiet else levels[min(self.verbosity, 2)]
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Lines())
        root = logging.getLogger()
        before = root.level
        root.addHandler(handler)
        root.setLevel(level)
        try:
            yield
        finally:
            root.removeHandler(handler)
            root.setLevel(before)


class _Lines(logging.Formatter):
    """``warning: message``, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().replace("\n", "\\n")
        return f"{record.levelname.lower()}: {text}"


def here() -> Path:
    """The current directory."""
    try:
        return Path.cwd()
    except FileNotFoundError:  # the directory was deleted under us
        return Path("/")


def complete_path(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Files and directories are completed by the shell itself."""
    return [CompletionItem(incomplete, type="file")]


# --- options that may stand before and after the command's name ------------------------------------


def _note(apply: Callable[[Invocation, Any], None]) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            apply(context.ensure_object(Invocation), value)

    return callback


def _set(name: str) -> Callable[[Invocation, Any], None]:
    return lambda invocation, value: setattr(invocation, name, value)


def _add_verbosity(invocation: Invocation, value: int) -> None:
    invocation.verbosity += value


def _options() -> list[Callable[[Any], Any]]:
    # Names of their own: a command may have an argument STORE, too.
    option = functools.partial(click.option, expose_value=False)
    return [
        option(
            "general_store",
            "-s",
            "--store",
            metavar="STORE",
            shell_complete=complete_path,
            callback=_note(_set("location")),
            help="A directory, URL or ckptstore.toml. Default: $CKPTSTORE, else the nearest ckptstore.toml.",
        ),
        option(
            "general_json",
            "--json",
            is_flag=True,
            is_eager=True,
            callback=_note(_set("as_json")),
            help="Print one JSON document.",
        ),
        option(
            "general_quiet",
            "-q",
            "--quiet",
            is_flag=True,
            callback=_note(_set("quiet")),
            help="Log errors only.",
        ),
        option(
            "general_verbose",
            "-v",
            "--verbose",
            count=True,
            callback=_note(_add_verbosity),
            help="Log more; twice: all.",
        ),
    ]


def general_options(command: Any) -> Any:
    """Adds ``-s``, ``--json``, ``-q`` and ``-v``."""
    for option in reversed(_options()):
        command = option(command)
    return command


def examples_text(lines: Sequence[str]) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def command(
    name: str, *examples: str
) -> Callable[[Callable[Concatenate[Invocation, P], None]], click.Command]:
    """Makes a command of a function whose first argument is the invocation; its docstring is the help.

    Args:
        examples: lines for the help, each what a person would type.
    """

    def decorate(function: Callable[Concatenate[Invocation, P], None]) -> click.Command:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            invocation = click.get_current_context().ensure_object(Invocation)
            with invocation.logging():
                function(invocation, *args, **kwargs)

        made: click.Command = click.command(name, epilog=examples_text(examples))(general_options(run))
        return made

    return decorate
