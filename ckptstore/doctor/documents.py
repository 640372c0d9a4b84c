"""What is in a tier: its marker, its records, and what killed processes left."""

from __future__ import annotations

from collections.abc import Iterator

from ckptstore.doctor.findings import Finding
from ckptstore.errors import CkptstoreError
from ckptstore.model.documents import END_LIMIT_BYTES
from ckptstore.model.record import CommitRecord, IntentDoc
from ckptstore.tier import commits, intents
from ckptstore.tier.tier import Tier


def marker(tier: Tier) -> Iterator[Finding]:
    """That it can be read, and is of this store."""
    tier.check_marker()
    found = tier.marker
    yield Finding(
        "marker", "ok", f"store {found.store_uuid} at {tier.url}, chunks up to {found.chunk_bytes} bytes"
    )


def records(tier: Tier) -> Iterator[Finding]:
    """Commit records that cannot be read."""
    good, bad = 0, []
    for run_key in tier.run_keys():
        for attempt, info in commits.list_commits(tier, run_key):
            if info.size_bytes < END_LIMIT_BYTES:
                continue  # a VOID or a GONE
            try:
                good += isinstance(commits.read_commit(tier, run_key, attempt), CommitRecord)
            except CkptstoreError as error:
                bad.append(f"{info.key}: {error.message}")
    if not bad:
        yield Finding("records", "ok", f"{good} readable")
    for text in bad:
        yield Finding(
            "records", "fail", text, "that checkpoint cannot be restored; `ckptstore verify` names all damage"
        )


def announced(tier: Tier) -> Iterator[Finding]:
    """Intents: of whom is there, and of whom is not any more."""
    counts = {"pin": 0, "live": 0}
    dead: list[IntentDoc] = []
    for document in intents.list_intents(tier):
        if document.kind == "pin":
            counts["pin"] += 1
        elif _is_dead(tier, document):
            dead.append(document)
        else:
            counts["live"] += 1
    yield Finding("intents", "ok", f"{counts['live']} under way, {counts['pin']} pins")
    for document in dead:
        meaning = "its process was killed. Harmless: nothing it wrote counts, and collecting clears it away"
        who = f"process {document.pid} on {document.host}"
        yield Finding(
            "intents", "warn", f"a {document.kind} of run {document.run!r} by {who}, unfinished", meaning
        )


def _is_dead(tier: Tier, document: IntentDoc) -> bool:
    return intents.is_alive_here(document, tier.environment) is False or intents.is_silent(tier, document)


def leftovers(tier: Tier) -> Iterator[Finding]:
    """Temporary files and uploads that nobody finishes."""
    now = tier.environment.now()
    old = [item for item in tier.backend.list_temporaries("") if now - item.modified > intents.SILENT_SECONDS]
    if not old:
        yield Finding("leftovers", "ok", "none")
        return
    size = sum(item.size_bytes for item in old)
    meaning = "left by killed processes; harmless but for the space"
    yield Finding("leftovers", "warn", f"{len(old)} temporary files, {size >> 20} MiB", meaning)
