"""``advise``: how often to save a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import plural, shown
from ckptstore.model.advice import NEWEST, Advice, Choice
from ckptstore.model.durations import duration_text

_TIME = "TIME"
_LEAST_GAIN = 0.001  # of all time; what is less is not worth a change


@command(
    "advise",
    "ckptstore advise gpt                              failures counted from its restarts",
    "ckptstore advise gpt --mtbf 3h --restart 10min",
    "ckptstore advise gpt --failures 419 --days 54 --machines 1024 --of-machines 16384",
    "ckptstore advise gpt --mtbf 3h --interval 1h --plot advice.png",
)
@click.argument("run", shell_complete=complete_run)
@click.option("--mtbf", metavar=_TIME, help="Mean time between failures. Default: counted from the restarts.")
@click.option("--failures", type=int, metavar="N", help="So many failures ...")
@click.option("--days", type=float, metavar="D", help="... in so many days, in place of --mtbf.")
@click.option("--machines", type=int, metavar="M", help="Scale the MTBF to M machines ...")
@click.option("--of-machines", type=int, metavar="N", help="... where it is that of N such machines.")
@click.option("--restart", metavar=_TIME, help="From a failure until training goes on. Default: 0.")
@click.option("--pause", metavar=_TIME, help="Per save, in place of what was measured.")
@click.option("--background", metavar=_TIME, help="To write a save, in place of what was measured.")
@click.option(
    "--interval", "intervals", multiple=True, metavar=_TIME, help="A further line in the table; repeatable."
)
@click.option(
    "-n",
    "--newest",
    type=click.IntRange(min=1),
    default=NEWEST,
    show_default=True,
    metavar="N",
    help="How many saves are measured.",
)
@click.option(
    "--plot",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    shell_complete=complete_path,
    help="Draw the expected loss: .png, .svg or .pdf.",
)
def advise(invocation: Invocation, /, run: str, path: Path | None, **options: Any) -> None:
    """Says how often to save a run, from what its saves cost and how often training fails.

    TIME is seconds, or like 25s, 20min, 1.5h, 2d. Pauses, background times and the current interval are
    medians over the newest saves. The best interval is sqrt(2 x pause x MTBF), never shorter than a save
    takes.
    """
    with invocation.open_store() as store:
        advice = store.run(run).advise(**options)
    if path is not None:
        from ckptstore.inspect.advice_plot import plot_advice

        plot_advice(advice, path)
    if invocation.as_json:
        output.emit_json(_document(store.url, advice, path))
        return
    for line in _lines(advice):
        output.say(line)
    if path is not None:
        output.say(f"wrote {shown(str(path))}")


# --- text --------------------------------------------------------------------------------------------------


def _lines(advice: Advice) -> Iterator[str]:
    yield output.strong(f"{shown(advice.run)}: save every {duration_text(advice.best)}") + _in_steps(advice)
    for title, text in _facts(advice):
        yield f"  {title:<13} {text}"
    yield ""
    columns = (
        *(Column(title, right=True) for title in ("EVERY", "PAUSES", "REWORK", "RESTARTS", "LOST", "USEFUL")),
        Column(""),
    )
    yield from table(columns, [_cells(choice) for choice in advice.choices], limit=terminal_width())
    yield ""
    yield _verdict(advice)
    for note in advice.notes:
        yield f"note: {note}"


def _in_steps(advice: Advice) -> str:
    return "" if advice.best_steps is None else f", about {plural(advice.best_steps, 'step')}"


def _facts(advice: Advice) -> Iterator[tuple[str, str]]:
    measured = advice.measured
    over = f"median of {plural(measured.saves, 'save')}"
    yield "pause", f"{duration_text(advice.pause)} ({over if advice.pause == measured.pause else 'as given'})"
    over = f"median of {plural(measured.saves - measured.synchronous, 'save')}"
    if advice.background != measured.background:
        over = "as given"
    if advice.background:
        yield "written in", f"{duration_text(advice.background)} more, in the background ({over})"
    if advice.current is not None:
        yield (
            "saved every",
            f"{duration_text(advice.current)} (median of {plural(measured.gaps, 'interval')})",
        )
    yield "fails every", f"{duration_text(advice.failures.mtbf)} ({advice.failures.text})"
    yield "restart", duration_text(advice.restart)
    yield "Young, Daly", f"{duration_text(advice.young)}, {duration_text(advice.daly)}"


def _cells(choice: Choice) -> tuple[str, ...]:
    loss = choice.loss
    shares = (loss.pauses, loss.rework, loss.restarts, loss.total, loss.useful)
    return (duration_text(loss.interval), *map(_percent, shares), ", ".join(choice.marks))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 or share == 0 else f"{100 * share:.2g} %"


def _verdict(advice: Advice) -> str:
    best = _percent(advice.loss_at(advice.best).total)
    if advice.current is None or advice.gain is None:
        return f"at the best interval {best} of all time is lost"
    now = _percent(advice.loss_at(advice.current).total)
    if advice.gain < _LEAST_GAIN:
        return f"{now} of all time is lost now, {best} at best: leave it as it is"
    return f"{now} of all time is lost now, {best} at best"


# --- JSON --------------------------------------------------------------------------------------------------


def _document(store: str, advice: Advice, path: Path | None) -> dict[str, Any]:
    failures = advice.failures
    return {
        "store": store,
        "run": advice.run,
        "best": advice.best,
        "best_steps": advice.best_steps,
        "current": advice.current,
        "gain": advice.gain,
        "young": advice.young,
        "daly": advice.daly,
        "pause": advice.pause,
        "background": advice.background,
        "restart": advice.restart,
        "mtbf": failures.mtbf,
        "mtbf_source": failures.source,
        "failures": failures.failures,
        "failures_over": failures.seconds,
        "machines": failures.machines,
        "of_machines": failures.of_machines,
        "measured": advice.measured,
        "choices": [
            {
                "interval": choice.loss.interval,
                "marks": choice.marks,
                "pauses": choice.loss.pauses,
                "rework": choice.loss.rework,
                "restarts": choice.loss.restarts,
                "lost": choice.loss.total,
                "useful": choice.loss.useful,
            }
            for choice in advice.choices
        ],
        "notes": advice.notes,
        "plot": None if path is None else str(path),
    }
