"""``completion``: the script that makes a shell complete commands, options, runs and REFs."""

from __future__ import annotations

import dataclasses
import functools
import os
import re

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command

SHELLS = ("bash", "zsh", "fish")

_PLACES = {
    "bash": 'eval "$(ckptstore completion bash)"     # in ~/.bashrc',
    "zsh": 'eval "$(ckptstore completion zsh)"      # in ~/.zshrc',
    "fish": "ckptstore completion fish > ~/.config/fish/completions/ckptstore.fish",
}


@command("completion", *reversed(_PLACES.values()))
@click.argument("shell", type=click.Choice(SHELLS), metavar="[bash|zsh|fish]")
def completion(invocation: Invocation, shell: str) -> None:
    """Prints a script for a shell: it then completes commands, options, runs and REFs (RUN@TAG, ...).

    Runs and REFs come from the store that -s, $CKPTSTORE or the nearest ckptstore.toml names.
    """
    from ckptstore.cli.app import COMPLETION_VARIABLE, app

    found = get_completion_class(shell)
    assert found is not None
    script = found(app, {}, "ckptstore", COMPLETION_VARIABLE).source()
    if invocation.as_json:
        output.emit_json({"shell": shell, "script": script, "place": _PLACES[shell]})
        return
    output.say(script.rstrip("\n"))


# --- bash ------------------------------------------------------------------------------------------------

# It divides words at "@" and ":", too, which are part of a REF: so the line is taken as it was typed, and
# only what stands behind the last such character is given back.
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' line kind value
    COMPREPLY=()
    for line in $(env COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
            %(complete_var)s=bash_complete "$1" 2>/dev/null); do
        kind="${line%%%%,*}" value="${line#*,}"
        case "$kind" in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            part) compopt -o nospace; COMPREPLY+=("$value") ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ESCAPED = r"\\\1"
_UNSAFE = re.compile(r"([^\w@%+=:,./~-])")


@dataclasses.dataclass(frozen=True, slots=True)
class Typed:
    """A command line up to the cursor.

    Attributes:
        words: the whole ones, without quotes.
        last: the one that the cursor is in, so far; empty after a blank.
        quote: the quote that it began with and that is still open.
    """

    words: tuple[str, ...]
    last: str
    quote: str

    @classmethod
    def read(cls, line: str) -> Typed:
        """Divides it as bash does."""
        words: list[str] = []
        last, quote, began = "", "", False
        chars = iter(line)
        for char in chars:
            if char == "\\" and quote != "'":
                last, began = last + next(chars, ""), True
            elif quote:
                last, quote = (last, "") if char == quote else (last + char, quote)
            elif char in "'\"":
                quote, began = char, True
            elif not char.isspace():
                last, began = last + char, True
            elif began:
                words.append(last)
                last, began = "", False
        return cls(tuple(words), last, quote)


class Bash(BashComplete):
    """Completion for bash 4.4 and newer."""

    source_template = _BASH

    @staticmethod
    def _check_version() -> None:
        """Which bash will read the script is not known here."""

    @functools.cached_property
    def _typed(self) -> Typed:
        line = os.environ.get("COMP_LINE", "")
        return Typed.read(line[: int(os.environ.get("COMP_POINT") or len(line))])

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that the cursor is in, and what of that is there."""
        return list(self._typed.words[1:]), self._typed.last

    def format_completion(self, item: CompletionItem[str]) -> str:
        """``kind,value``: of the value only what stands behind the last character that divides words."""
        if item.type != "plain":
            return f"{item.type},"
        kind = "part" if item.value.endswith("@") else "plain"
        if self._typed.quote:
            return f"{kind},{item.value}"
        breaks = set(os.environ.get("COMP_WORDBREAKS", "")) & set("@:=")
        at = max((self._typed.last.rfind(char) for char in breaks), default=-1)
        return f"{kind},{_UNSAFE.sub(_ESCAPED, item.value[at + 1 :])}"


add_completion_class(Bash, "bash")
