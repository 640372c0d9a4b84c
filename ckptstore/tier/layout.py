"""Where things are in a tier: every key is made here (DESIGN part 3, docs/format.md)."""

from __future__ import annotations

from ckptstore.model.ids import Attempt

MARKER = "ckptstore.json"
DOCUMENT = ".mp"

FAN_OUT = tuple(f"{kind}/{i:02x}" for kind in ("chunks", "packs") for i in range(256))
TOP = ("tiers", "commits", "parts", "intents", "dooms", "notes", "damage", "runs", "gc")


def places_key(number: int) -> str:
    """Which tiers the store has."""
    return f"tiers/{number}{DOCUMENT}"


def commit_prefix(run_key: str) -> str:
    """All commit keys of a run."""
    return f"commits/{run_key}/"


def commit_key(run_key: str, attempt: str) -> str:
    """The one key whose document makes a checkpoint exist."""
    return f"commits/{run_key}/{attempt}{DOCUMENT}"


def intent_key(attempt: str) -> str:
    """An announcement to garbage collection."""
    return f"intents/{attempt}{DOCUMENT}"


def beat_key(attempt: str) -> str:
    """The heartbeat beside an intent."""
    return f"intents/{attempt}.beat"


def part_prefix(attempt: str) -> str:
    """All that the ranks of an attempt have said."""
    return f"parts/{attempt}/"


def start_key(attempt: str) -> str:
    """What rank 0 announced: which pins hold."""
    return f"parts/{attempt}/start{DOCUMENT}"


def part_key(attempt: str, rank: int) -> str:
    """What one rank wrote, or why it could not."""
    return f"parts/{attempt}/{rank}{DOCUMENT}"


def plan_key(attempt: str) -> str:
    """Who writes what, as rank 0 announced it."""
    return f"parts/{attempt}/plan{DOCUMENT}"


def reached_key(attempt: str) -> str:
    """Whether a committed attempt is in all tiers that a save must reach, as rank 0 says."""
    return f"parts/{attempt}/reached{DOCUMENT}"


def holding_key(attempt: str, rank: int) -> str:
    """What one rank holds, told before who writes what was agreed."""
    return f"parts/{attempt}/plan.{rank}{DOCUMENT}"


def room(name: str) -> str:
    """Where the ranks of one start leave words that belong to no attempt."""
    return f"words-{name}"


def word_key(room: str, topic: str, rank: int) -> str:
    """What one rank says to the others about a topic (a word of ``[a-z0-9-]``)."""
    return f"parts/{room}/{topic}.{rank}{DOCUMENT}"


def doom_prefix(run_key: str) -> str:
    """All dooms of a run."""
    return f"dooms/{run_key}/"


def doom_key(run_key: str, attempt: str) -> str:
    """Garbage collection's announcement that a record will go."""
    return f"dooms/{run_key}/{attempt}{DOCUMENT}"


def note_prefix(run_key: str) -> str:
    """All notes of a run."""
    return f"notes/{run_key}/"


def note_key(run_key: str, checkpoint: str, number: int, ulid: str) -> str:
    """A later fact about a checkpoint."""
    return f"notes/{run_key}/{checkpoint}.{number}.{ulid}{DOCUMENT}"


def parse_note_key(key: str) -> tuple[str, int, str]:
    """(checkpoint, number, ulid) of a note's key; raises ValueError."""
    name = key.rpartition("/")[2]
    checkpoint, number, ulid = name.removesuffix(DOCUMENT).split(".")
    Attempt.parse(checkpoint)
    return checkpoint, int(number), ulid


def damage_key(run_key: str, attempt: str) -> str:
    """There while a record is marked damaged: what a saver asks for, instead of listing notes."""
    return f"damage/{run_key}/{attempt}"


def run_document(run_key: str) -> str:
    """The run's own document: its name."""
    return f"runs/{run_key}/run{DOCUMENT}"


def epoch_prefix(run_key: str) -> str:
    """All epochs of a run."""
    return f"runs/{run_key}/epochs/"


def epoch_key(run_key: str, number: int) -> str:
    """One session of a run."""
    return f"runs/{run_key}/epochs/{number}{DOCUMENT}"


def policy_prefix(run_key: str | None) -> str:
    """All retention policies that a run had, or (None) the store's default."""
    return "policies/" if run_key is None else f"runs/{run_key}/policies/"


def policy_key(run_key: str | None, number: int) -> str:
    """A retention policy, of a run or (None) of all that have none of their own."""
    return f"{policy_prefix(run_key)}{number}{DOCUMENT}"


def stem(key: str) -> str:
    """The last segment without ``.mp``."""
    return key.rpartition("/")[2].removesuffix(DOCUMENT)
