"""The command ``ckptstore``: parses, calls the library, prints. One file per group of commands, no logic."""

from __future__ import annotations


def main() -> None:
    """Runs the command with the arguments of this process; ends the process with its exit code."""
    from ckptstore.cli.app import app

    app(prog_name="ckptstore")
