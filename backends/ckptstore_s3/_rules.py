"""What a bucket's own rules do to our objects: expiration, old versions, locks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from ckptstore.backend import Look
from ckptstore.errors import BackendError, ObjectNotFoundError, PermissionDeniedError

Ask = Callable[[str, str], Any]
"""(operation, words for the error) -> the answer."""

_COLD = {"GLACIER", "DEEP_ARCHIVE"}


def looks(ask: Ask, prefix: str) -> Iterator[Look]:
    """Lifecycle, versioning and object lock, as far as they may be read.

    Args:
        prefix: what our keys begin with in the bucket.
    """
    rules: Sequence[Mapping[str, Any]] = ()
    answer = yield from _asked(ask, "lifecycle", "get_bucket_lifecycle_configuration")
    if answer is not None:
        rules = [rule for rule in answer.get("Rules", ()) if _concerns(rule, prefix)]
        yield from _lifecycle(rules)
    answer = yield from _asked(ask, "versioning", "get_bucket_versioning")
    if answer is not None:
        yield _versioning(answer, rules)
    answer = yield from _asked(ask, "object lock", "get_object_lock_configuration")
    if answer is not None:
        yield _lock(answer)


def _asked(ask: Ask, name: str, operation: str) -> Generator[Look, None, Mapping[str, Any] | None]:
    """The answer, empty where there is none; None where the finding says why it may not be known."""
    try:
        answer: Mapping[str, Any] = ask(operation, f"read {name} of")
        return answer
    except ObjectNotFoundError:  # no such configuration
        return {}
    except PermissionDeniedError as error:
        yield (name, "warn", error.message, "ask who owns the bucket whether such rules are set")
    except BackendError as error:
        if error.transient:
            raise
        yield (name, "ok", f"not known here: {error.message}", "")
    return None


def _concerns(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a rule is on, and can hit a key of ours: they have no tags."""
    found = rule.get("Filter") or {}
    both = found.get("And") or {}
    if rule.get("Status") != "Enabled" or found.get("Tag") or both.get("Tags"):
        return False
    begins = rule.get("Prefix") or found.get("Prefix") or both.get("Prefix") or ""
    return bool(prefix.startswith(begins) or begins.startswith(prefix))


def _lifecycle(rules: Sequence[Mapping[str, Any]]) -> Iterator[Look]:
    told = False
    for rule in rules:
        name = f"rule {rule.get('ID') or 'without a name'!r}"
        expires = rule.get("Expiration") or {}
        if "Days" in expires or "Date" in expires:
            when = f"after {expires['Days']} days" if "Days" in expires else f"on {expires['Date']}"
            meaning = (
                "chunks that new checkpoints reuse are old: it breaks checkpoints that nobody deleted. "
                "Take this prefix out of the rule, and let `gc` delete"
            )
            told = True
            yield ("lifecycle", "fail", f"{name} deletes objects {when}", meaning)
        cold = {item.get("StorageClass") for item in rule.get("Transitions") or ()} & _COLD
        if cold:
            meaning = "what is there cannot be read before somebody thaws it: restores would fail"
            told = True
            yield ("lifecycle", "warn", f"{name} moves objects to {', '.join(sorted(cold))}", meaning)
    if not told:
        yield ("lifecycle", "ok", "no rule deletes objects here or moves them out of reach", "")


def _versioning(answer: Mapping[str, Any], rules: Sequence[Mapping[str, Any]]) -> Look:
    if answer.get("Status") != "Enabled":
        return ("versioning", "ok", "off", "")
    kept = [rule["NoncurrentVersionExpiration"] for rule in rules if "NoncurrentVersionExpiration" in rule]
    if kept:
        found = f"on; old versions go after {kept[0].get('NoncurrentDays', '?')} days"
        return ("versioning", "ok", found, "what `gc` deletes is freed that much later")
    meaning = (
        "what `gc` deletes stays, and is paid for, as old versions: "
        "add a rule with NoncurrentVersionExpiration"
    )
    return ("versioning", "warn", "on, and old versions are kept for ever", meaning)


def _lock(answer: Mapping[str, Any]) -> Look:
    found = answer.get("ObjectLockConfiguration") or {}
    retention = (found.get("Rule") or {}).get("DefaultRetention")
    if found.get("ObjectLockEnabled") != "Enabled":
        return ("object lock", "ok", "off", "")
    if not retention:
        return ("object lock", "ok", "on, without a default retention", "")
    time = f"{retention['Days']} days" if "Days" in retention else f"{retention.get('Years', '?')} years"
    meaning = "no harm to checkpoints; what `gc` deletes is freed only after that, if at all (see versioning)"
    return ("object lock", "warn", f"on: objects are locked for {time} ({retention.get('Mode')})", meaning)
