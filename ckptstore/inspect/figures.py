"""Pictures as files: the one place that asks for matplotlib."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from ckptstore.errors import BackendError, CkptstoreError, UsageError

FORMATS = (".png", ".svg", ".pdf")


def picture_path(path: str | os.PathLike[str]) -> Path:
    """`path`, if its ending is that of a picture.

    Raises:
        UsageError: it is not.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise UsageError(f"{target.name!r} is no picture", hint=f"end it with {', '.join(FORMATS)}")
    return target


def figure_class() -> Any:
    """The Figure of matplotlib. Without pyplot no display is opened, and nothing global is left behind.

    Raises:
        CkptstoreError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CkptstoreError(
            "drawing needs matplotlib, which is not installed", hint="pip install 'ckptstore[plot]'"
        ) from error
    return Figure


def legend_above(axis: Any, columns: int, fontsize: float) -> None:
    """A legend in lines over the upper right corner, where no curve is."""
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=columns,
        fontsize=fontsize,
        frameon=False,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1.0,
        borderaxespad=0,
    )


def save_figure(figure: Any, target: Path) -> None:
    """Writes a figure; a file that is there is replaced.

    Raises:
        BackendError: it cannot be written.
    """
    try:
        with warnings.catch_warnings():  # a name in a script that the font has not: boxes are drawn
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            figure.savefig(target, dpi=120)
    except OSError as error:
        raise BackendError(f"{str(target)!r} cannot be written: {error.strerror}") from error


def plain_text(text: str) -> str:
    """A name as it is: without this, matplotlib takes dollar signs for mathematics."""
    clean = "".join(char if char.isprintable() else "�" for char in text).replace("$", r"\$")
    return clean if len(clean) <= 60 else clean[:59] + "…"
