"""``completion``: the script that makes a shell complete commands, options, runs and REFs."""

from __future__ import annotations

import os
import re

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command

VARIABLE = "_CKPTSTORE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")

_PLACES = {
    "bash": 'eval "$(ckptstore completion bash)"     # in ~/.bashrc',
    "zsh": 'eval "$(ckptstore completion zsh)"      # in ~/.zshrc',
    "fish": "ckptstore completion fish > ~/.config/fish/completions/ckptstore.fish",
}


@command("completion", *_PLACES.values())
@click.argument("shell", type=click.Choice(SHELLS))
def completion(invocation: Invocation, shell: str) -> None:
    """Prints a script for a shell: it then completes commands, options, runs and REFs (RUN@TAG, ...).

    Runs and REFs come from the store that -s, $CKPTSTORE or the nearest ckptstore.toml names.
    """
    from ckptstore.cli.app import app

    found = get_completion_class(shell)
    assert found is not None
    script = found(app, {}, "ckptstore", VARIABLE).source()
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

_SAFE = re.compile(r"([^\w@%+=:,./-])")


class Bash(BashComplete):
    """Completion for bash 4.4 and newer."""

    source_template = _BASH

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._word = ""

    @staticmethod
    def _check_version() -> None:
        """The script is printed wherever it is asked for; an old bash says itself what it lacks."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and what of the last one is there."""
        line = os.fsencode(os.environ.get("COMP_LINE", ""))[: int(os.environ.get("COMP_POINT") or 0)]
        text = os.fsdecode(line)
        words = _words(text)
        self._word = "" if not text or text[-1].isspace() and words[-1:] != [text] else text
        if _ends_between_words(text):
            return words[1:], ""
        return words[1:-1], words[-1] if words else ""

    def format_completion(self, item: CompletionItem[str]) -> str:
        """``kind,value``; a value as it must be written at this place."""
        if item.type != "plain":
            return f"{item.type},{item.value}"
        kind = "part" if item.value.endswith("@") else "plain"
        quote = _open_quote(self._word)
        if quote:
            return f"{kind},{item.value}"
        escaped = _SAFE.sub(r"\\\1", item.value)
        breaks = set("@:=") & set(os.environ.get("COMP_WORDBREAKS", ""))
        typed = _SAFE.sub(r"\\\1", self._incomplete)
        at = max((typed.rfind(char) for char in breaks), default=-1)
        return f"{kind},{escaped[at + 1 :]}"
