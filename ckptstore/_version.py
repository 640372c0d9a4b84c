"""The version, in one place: the build, the CLI and the records read it from here."""

__version__ = "0.1.0"
