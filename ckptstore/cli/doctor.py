"""``doctor``: does a store work here, for this user?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from ckptstore import doctor as examination
from ckptstore.backend import open_backend
from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.text import plural, shown
from ckptstore.doctor import Finding
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, CkptstoreError, StoreNotFoundError
from ckptstore.tier.retry import RetryingBackend

_NAME_WIDTH = 16


@command(
    "doctor",
    "ckptstore doctor ckpts",
    "ckptstore -s /mnt/shared/ckpts doctor --no-write",
    "ckptstore doctor s3://bucket/ckpts    a place that is to become a store, too",
)
@click.argument("store", required=False, shell_complete=complete_path)
@click.option("--no-write", is_flag=True, help="Change nothing at all: leave out what tries writing.")
def doctor(invocation: Invocation, store: str | None, no_write: bool) -> None:
    """Tries a store out through the code that saves and loads use, and says what each finding means.

    It looks at versions and the manifest, and in each tier at marker, space, permissions, rules that delete
    or keep objects, clocks, direct I/O, exact bytes, atomic creation, listings, unreadable records, and what
    killed processes left. What it writes has keys under doctor/ and is deleted again. An empty place that is
    named here is tried out, too. Ends with 1 when something failed; warnings alone end with 0.
    """
    if store is not None:
        invocation.location = store
    findings = []
    tier: str | None = None
    for finding in _findings(invocation, named=store, write=not no_write):
        findings.append(finding)
        if invocation.as_json:
            continue
        if finding.tier != tier and finding.tier is not None:
            tier = finding.tier
            output.say(f"\n{output.strong(f'tier {tier}')}")
        output.say(_line(finding))
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if invocation.as_json:
        output.emit_json({"ok": not failed, "failed": failed, "warnings": warned, "findings": findings})
    else:
        output.say(f"\n{len(findings)} looked at: {failed} failed, {plural(warned, 'warning')}")
    if failed:
        click.get_current_context().exit(1)


def _findings(invocation: Invocation, *, named: str | None, write: bool) -> Iterator[Finding]:
    yield from examination.examine_installation()
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(invocation.open_store())
        except StoreNotFoundError as error:
            empty = None if named is None else _empty_place(named)
            if empty is None:
                yield Finding("store", "fail", error.message, error.hint or "")
                return
            stack.callback(empty.close)
            meaning = f"this tries the place out; `ckptstore init {named}` makes one"
            yield Finding("store", "warn", "there is none yet", meaning)
            yield from examination.examine_place(empty, Environment(), write=write)
            return
        except CkptstoreError as error:
            yield Finding("marker", "fail", error.message, error.hint or "")
            return
        yield from examination.examine(store, write=write)


def _empty_place(location: str) -> RetryingBackend | None:
    """The place, if it is there and nothing is in it: in other people's files doctor writes nothing."""
    if location.endswith(".toml"):
        return None
    backend = RetryingBackend(open_backend(location))
    try:
        first = next(iter(backend.list("")), None)
    except BackendError:  # that there is no store says enough
        return None
    return backend if first is None else None


def _line(finding: Finding) -> str:
    status = f"{finding.status:<4}"
    if finding.status != "ok":
        status = output.odd(status) if finding.status == "warn" else output.bad(status)
    text = f"{status}  {finding.name:<{_NAME_WIDTH}}  {shown(finding.found)}"
    if finding.meaning:
        text += f"\n{'':<{_NAME_WIDTH + 8}}{shown(finding.meaning)}"
    return text
