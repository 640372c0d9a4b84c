"""One, a list or a dict: how a training names its models, optimizers, schedulers and loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ckptstore.errors import UsageError
from ckptstore.model.targets import LOAD

T = TypeVar("T")
U = TypeVar("U")


@dataclasses.dataclass(frozen=True, slots=True)
class Named(Generic[T]):
    """The parts of one component, by name.

    Attributes:
        component: the top-level key, like ``"model"``.
        parts: by name; a list counts from ``"0"``, a single part is ``""``.
        single: there is one part and it adds no level to the tree.
    """

    component: str
    parts: dict[str, T]
    single: bool

    def __bool__(self) -> bool:
        return bool(self.parts)

    def label(self, name: str) -> str:
        """How an error calls a part: ``optimizer`` or ``optimizer.gen``."""
        return self.component if self.single else f"{self.component}.{name}"

    def tree(self, make: Callable[[str, T], U]) -> U | dict[str, U]:
        """What the tree holds under this component, each part made by ``make(label, part)``."""
        if self.single:
            return make(self.component, self.parts[""])
        return {name: make(self.label(name), part) for name, part in self.parts.items()}

    def present(self, tree: Any) -> list[tuple[str, T, Any]]:
        """``(name, part, its subtree)`` for the parts that `tree` has something for."""
        if is_absent(tree):
            return []
        if self.single:
            return [("", self.parts[""], tree)]
        found = [(name, part, tree.get(name, LOAD)) for name, part in self.parts.items()]
        return [(name, part, value) for name, part, value in found if not is_absent(value)]


def is_absent(value: Any) -> bool:
    """Whether a subtree was not in the checkpoint: a target that nothing replaced."""
    return value is LOAD


def named(component: str, given: T | Sequence[T] | Mapping[str, T] | None, *, lists: bool = True) -> Named[T]:
    """Names the parts of a component.

    Args:
        component: the top-level key.
        given: one part, a list or a dict of them, or None.
        lists: False where a part may itself be a list or dict.
    """
    if given is None:
        return Named(component, {}, single=False)
    if lists and type(given) is dict:
        if any(not isinstance(name, str) or not name for name in given):
            raise UsageError(f"{component}={{...}} needs names that are non-empty strings")
        if not given:
            raise UsageError(f"{component}= is an empty dict", hint=f"leave {component}= out")
        return Named(component, dict(given), single=False)
    if lists and type(given) in (list, tuple):
        parts: Sequence[T] = given  # type: ignore[assignment]  # the line above looked
        if not parts:
            raise UsageError(f"{component}= is an empty list", hint=f"leave {component}= out")
        return Named(component, {str(index): part for index, part in enumerate(parts)}, single=False)
    return Named(component, {"": given}, single=True)  # type: ignore[dict-item]  # what is left is one T


def form_problems(parts: Named[Any], saved_names: Mapping[str, Any]) -> list[str]:
    """Why a component saved under names cannot fill a single one, or the other way round.

    Args:
        parts: the component here.
        saved_names: what the checkpoint says about named components, ``{component: (names, ...)}``.
    """
    saved = saved_names.get(parts.component)
    if parts.single and saved is not None:
        listed = ", ".join(str(name) for name in saved)
        return [
            f"{parts.component}: the checkpoint has several, named {listed}; here one is given without a name"
        ]
    if not parts.single and saved is None:
        listed = ", ".join(parts.parts)
        return [f"{parts.component}: the checkpoint holds one without a name; here they are named {listed}"]
    return []
