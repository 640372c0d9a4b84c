"""``doctor``: does a store work here, for this user?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from ckptstore import doctor as examination
from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.text import plural, shown
from ckptstore.doctor import Finding
from ckptstore.errors import CkptstoreError, StoreNotFoundError

_NAME_WIDTH = 16


@command(
    "doctor",
    "ckptstore doctor ckpts",
    "ckptstore -s /mnt/shared/ckpts doctor --no-write",
)
@click.argument("store", required=False, shell_complete=complete_path)
@click.option("--no-write", is_flag=True, help="Change nothing at all: leave out what tries writing.")
def doctor(invocation: Invocation, store: str | None, no_write: bool) -> None:
    """Tries a store out through the code that saves and loads use, and says what each finding means.

    It looks at versions, marker, space, permissions, clocks, direct I/O, exact bytes, atomic creation,
    listings, the manifest, unreadable records, and what killed processes left. What it writes has keys under
    doctor/ and is deleted again. Ends with 1 when something failed; warnings alone end with 0.
    """
    if store is not None:
        invocation.location = store
    findings = []
    for finding in _findings(invocation, write=not no_write):
        findings.append(finding)
        if not invocation.as_json:
            output.say(_line(finding))
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if invocation.as_json:
        output.emit_json({"ok": not failed, "failed": failed, "warnings": warned, "findings": findings})
    else:
        output.say(f"{len(findings)} looked at: {failed} failed, {plural(warned, 'warning')}")
    if failed:
        click.get_current_context().exit(1)


def _findings(invocation: Invocation, *, write: bool) -> Iterator[Finding]:
    yield from examination.examine_installation()
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(invocation.open_store())
        except StoreNotFoundError as error:
            yield Finding("store", "fail", error.message, error.hint or "")
            return
        except CkptstoreError as error:
            yield Finding("marker", "fail", error.message, error.hint or "")
            return
        yield from examination.examine(store, write=write)


def _line(finding: Finding) -> str:
    status = f"{finding.status:<4}"
    if finding.status != "ok":
        status = output.odd(status) if finding.status == "warn" else output.bad(status)
    text = f"{status}  {finding.name:<{_NAME_WIDTH}}  {shown(finding.found)}"
    if finding.meaning:
        text += f"\n{'':<{_NAME_WIDTH + 8}}{shown(finding.meaning)}"
    return text
