"""``show``: everything that is known of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli import output
from ckptstore.cli.complete import complete_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import STDIN, from_stdin
from ckptstore.cli.rows import checkpoint_json
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import ago, number, plural, shape_text, shown, size
from ckptstore.manifest import CheckpointRow, PinRow, TensorRow
from ckptstore.manifest.text import iso, people_json, ranges_text
from ckptstore.model import plain, unpack
from ckptstore.model.record import EpochDoc
from ckptstore.model.targets import TensorSpec
from ckptstore.store import Store

_MAX_VALUE_CHARS = 200


class Facts:
    """What the store says of one checkpoint."""

    def __init__(self, store: Store, ref: str) -> None:
        found = store.checkpoint(ref)
        store.catalog.refresh_pins()
        key = store.run(found.run).key
        self.now = store.tier.environment.now()
        self.checkpoint: Checkpoint = found
        self.row: CheckpointRow = store.catalog.ask(lambda m: m.checkpoints(key, checkpoint=found.id))[0]
        self.session: EpochDoc | None = next(
            (doc for doc in store.catalog.ask(lambda m: m.sessions(key)) if doc.number == found.epoch), None
        )
        self.pins: list[PinRow] = [
            pin
            for pin in store.catalog.ask(lambda m: m.pins())
            if (pin.run_key, pin.attempt) == (key, self.row.attempt)
        ]
        self._store, self._key = store, key

    def tensors(self) -> list[tuple[TensorRow, list[str] | None]]:
        """The tensors, each with its boxes as text; None where the manifest does not hold them."""
        ask, identity, key = self._store.catalog.ask, self.checkpoint.id, self._key
        rows = ask(lambda m: m.tensors(identity, run_key=key))
        if not ask(lambda m: m.layout(identity, run_key=key)).boxes_expanded:
            return [(row, None) for row in rows]
        boxes: dict[str, list[str]] = {}
        for box in ask(lambda m: m.boxes(identity, run_key=key)):
            boxes.setdefault(box.tensor, []).append(ranges_text(box.offsets, box.shape))
        return [(row, boxes.get(row.name, [])) for row in rows]

    def values(self) -> Iterator[tuple[str, Any]]:
        """Everything of the state that is no tensor, with its path."""
        for path, value in unpack.walk(self.checkpoint.saved.tree):
            if not isinstance(value, TensorSpec):
                yield plain.show_path(path), value


@command(
    "show",
    "ckptstore show gpt@latest",
    "ckptstore show gpt@min:loss --tensors",
    "ckptstore show gpt@200 --values --json",
    "ckptstore show - < refs.txt",
)
@click.argument("refs", nargs=-1, required=True, metavar="[REF | -]...", shell_complete=complete_ref)
@click.option("--tensors", "with_tensors", is_flag=True, help="Every tensor: type, shape, boxes, bytes.")
@click.option("--values", "with_values", is_flag=True, help="Every value of the state that is no tensor.")
def show(invocation: Invocation, refs: tuple[str, ...], with_tensors: bool, with_values: bool) -> None:
    """Shows a checkpoint: its state, session, components, times, tiers, and what was not captured.

    REF is RUN@latest, RUN@12000 (a step), RUN@TAG, RUN@min:loss, RUN@max:acc, or the beginning of an id; with
    - they are read from stdin, one per line.
    """
    names = from_stdin(refs)
    with invocation.open_store() as store:
        found = [Facts(store, ref) for ref in names]
        if invocation.as_json:
            documents = [_document(facts, with_tensors, with_values) for facts in found]
            is_one = len(refs) == 1 and refs != (STDIN,)
            output.emit_json(documents[0] if is_one else {"store": store.url, "checkpoints": documents})
            return
        for number, facts in enumerate(found):
            if number:
                output.say()
            _print(facts, with_tensors, with_values)


def _print(facts: Facts, with_tensors: bool, with_values: bool) -> None:
    for line in _lines(facts):
        output.say(line)
    if with_tensors:
        output.say()
        for line in _tensor_lines(facts):
            output.say(line)
    if with_values:
        output.say()
        for path, value in facts.values():
            output.say(f"{shown(path)} = {_value_text(value)}")


# --- text --------------------------------------------------------------------------------------------------


def _lines(facts: Facts) -> Iterator[str]:
    row, record = facts.row, facts.checkpoint.record
    yield output.strong(f"{shown(row.run)} step {row.step}") + (" (the latest)" if row.is_latest else "")
    for title, text in _facts(facts):
        yield f"  {title:<13} {text}"
    yield ""
    columns = (
        Column("COMPONENT", flexible=True),
        *(Column(title, right=True) for title in ("TENSORS", "CHUNKS", "SIZE", "NEW", "REUSED")),
    )
    cells = [
        (
            shown(part.name),
            str(part.tensors),
            str(part.chunks),
            size(part.logical_bytes),
            size(part.new_bytes),
            size(part.reused_bytes),
        )
        for part in record.components
    ]
    yield from table(columns, cells, limit=terminal_width())


def _facts(facts: Facts) -> Iterator[tuple[str, str]]:
    row, record, now = facts.row, facts.checkpoint.record, facts.now
    yield "id", row.checkpoint
    if row.attempt != row.checkpoint:
        yield "record", f"{row.attempt}, generation {row.generation}"
    state = row.state if row.restorable else output.bad(row.state)
    yield "state", state + (" (it can be restored)" if row.restorable else ": it is never restored unasked")
    for reason in (row.damaged_reason, row.invalid_reason):
        if reason:
            yield "reason", shown(reason)
    verified = "never" if row.verified_at is None else f"{iso(row.verified_at)} ({ago(row.verified_at, now)})"
    yield "verified", verified
    yield (
        "saved",
        f"{iso(row.created_at)} ({ago(row.created_at, now)}) on {shown(row.host)} by {record.writer}",
    )
    yield "session", _session_text(facts)
    for parent in record.parents:
        yield "made from", parent
    if row.origin != "save":
        yield "origin", row.origin
    yield "tiers", " ".join(map(shown, row.tiers)) or "-"
    yield "complete", _completeness(facts)
    for name, trimmed in record.trimmed.items():
        when = f"{iso(trimmed.at)} ({ago(trimmed.at, now)})"
        yield "trimmed", f"{shown(name)}, {when}, by policy: {shown(trimmed.reason)}"
    yield "size", f"{size(row.logical_bytes)}: {size(row.new_bytes)} new, {size(row.reused_bytes)} reused"
    yield "tensors", f"{row.tensors} in {row.chunks} chunks of at most {size(record.chunk_bytes)}"
    total = sum(row.timings.values())
    parts = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in row.timings.items())
    yield "save took", f"{total:.3f} s ({parts})"
    if row.tags:
        yield "tags", " ".join(shown(tag) for tag in row.tags)
    for name, value in sorted(row.metrics.items()):
        yield "metric", f"{shown(name)} = {number(value)}"
    for name, item in record.metadata.items():
        yield "metadata", f"{shown(name)} = {_value_text(item)}"
    for pin in facts.pins:
        why = f": {shown(pin.reason)}" if pin.reason else ""
        yield "pinned", f"({pin.kind}) by {shown(pin.user)} on {shown(pin.host)}, {iso(pin.created_at)}{why}"


def _completeness(facts: Facts) -> str:
    """A record has the parts of every rank, or is not there; missing is what was not given to the save."""
    record = facts.checkpoint.record
    if record.not_captured or record.trimmed:
        lacks = {"not captured": record.not_captured, "trimmed": tuple(record.trimmed)}
        said = [f"{how}: {', '.join(map(shown, names))}" for how, names in lacks.items() if names]
        return output.odd(f"no: {'; '.join(said)}")
    parts = f"{plural(len(record.components), 'component')} of {plural(record.world_size, 'rank')}"
    return f"yes: {parts}, and nothing was left out"


def _session_text(facts: Facts) -> str:
    row, session = facts.row, facts.session
    text = f"{row.epoch}, save {row.sequence}"
    if session is None:
        return text + " (its document cannot be read)"
    text += f", process {session.pid} on {shown(session.host)} since {iso(session.started_at)}"
    if session.resumed_from is not None:
        text += f", {'went back to' if session.rewound else 'resumed from'} {session.resumed_from}"
    return text


def _tensor_lines(facts: Facts) -> list[str]:
    columns = (
        Column("TENSOR", flexible=True),
        Column("DTYPE"),
        Column("SHAPE"),
        Column("SIZE", right=True),
        Column("NEW", right=True),
        Column("CHUNKS", right=True),
        Column("BOXES", flexible=True),
    )
    cells = []
    for row, boxes in facts.tensors():
        kind = row.dtype if row.kind == "torch" else f"{row.dtype} ({row.kind})"
        where = "-" if boxes is None else "whole" if _is_whole(row, boxes) else " ".join(boxes)
        if row.alias_of is not None:
            where = f"the same as {shown(row.alias_of)}"
        shape = shape_text(row.shape)
        cells.append(
            (shown(row.name), kind, shape, size(row.bytes), size(row.new_bytes), str(row.chunks), where)
        )
    return table(columns, cells, limit=terminal_width()) if cells else ["it has no tensors"]


def _is_whole(row: TensorRow, boxes: list[str]) -> bool:
    return not boxes or boxes == [ranges_text((0,) * len(row.shape), row.shape)]


def _value_text(value: Any) -> str:
    text = shown(repr(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}… ({len(text)} characters)"


# --- JSON --------------------------------------------------------------------------------------------------


def _document(facts: Facts, with_tensors: bool, with_values: bool) -> dict[str, Any]:
    record, session = facts.checkpoint.record, facts.session
    document: dict[str, Any] = {
        **checkpoint_json(facts.row),
        "writer": record.writer,
        "chunk_bytes": record.chunk_bytes,
        "parents": record.parents,
        "components": record.components,
        "complete": not (record.not_captured or record.trimmed),
        "not_captured": record.not_captured,
        "trimmed": [
            {"component": name, "reason": trimmed.reason, "trimmed_at": iso(trimmed.at)}
            for name, trimmed in record.trimmed.items()
        ],
        "metadata": {name: _value_json(item) for name, item in record.metadata.items()},
        "session_info": None
        if session is None
        else {
            "epoch": session.number,
            "session": session.session,
            "host": session.host,
            "pid": session.pid,
            "started_at": iso(session.started_at),
            "resumed_from": session.resumed_from,
            "rewound": session.rewound,
        },
        "pinned_by": [
            {
                "id": pin.intent,
                "kind": pin.kind,
                "user": pin.user,
                "host": pin.host,
                "since": iso(pin.created_at),
                "reason": pin.reason,
            }
            for pin in facts.pins
        ],
    }
    if with_tensors:
        document["tensors_list"] = [{**output.plain(row), "boxes": boxes} for row, boxes in facts.tensors()]
    if with_values:
        document["values"] = [
            {"path": path, "type": type(value).__name__, "value": _value_json(value)}
            for path, value in facts.values()
        ]
    return document


def _value_json(value: Any) -> Any:
    import json

    return json.loads(people_json(value, max_chars=None))
