"""Comparing a state with a checkpoint: what goes where, and every difference, before any byte is read."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ckptstore import arrays
from ckptstore.load.build import Blob, Builder
from ckptstore.load.live import (
    has_tensors,
    held_in,
    is_sharded_module,
    is_taken_whole,
    is_tensor,
    memory_of,
    plain_form,
    sharded_parameters,
    takes_state_dict,
    unwritable,
)
from ckptstore.load.mismatch import SHOWN, raise_mismatch, unlike_array, unlike_shape
from ckptstore.load.plan import Want
from ckptstore.load.saved import OwnParts, Saved, own_parts
from ckptstore.load.select import Selection
from ckptstore.load.trimmed import lost
from ckptstore.model.boxes import Box
from ckptstore.model.layout import assign_names
from ckptstore.model.plain import Composite, StatePath, show_path
from ckptstore.model.targets import LOAD, LoadLike
from ckptstore.model.unpack import walk
from ckptstore.shards import Held, MayDiffer, PerRank
from ckptstore.tier.contents import Contents


class Matcher:
    """Plans one restore.

    Attributes:
        builder: makes what is new; its wants are to be fetched, too.
        wants: boxes that are read into memory of the target.
        after: to be called when all has been read: copies into what cannot be read into directly.
        replacements: (container, key, value) of entries that get a new value.
        objects: (object, argument) of ``load_state_dict`` calls.
        missing, unexpected: names on one side only.
    """

    def __init__(
        self,
        contents: Contents,
        selection: Selection,
        *,
        strict: bool,
        extend: bool,
        allow_pickle: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self._contents = contents
        self._layout = contents.layout
        self._selection = selection
        self._strict = strict
        self._extend = extend
        self._rank = rank
        self._world_size = world_size
        self.builder = Builder(contents, allow_pickle=allow_pickle)
        self.wants: list[Want] = []
        self.after: list[Callable[[], None]] = []
        self.replacements: list[tuple[Any, Any, Any]] = []
        self.objects: list[tuple[Any, Any]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._problems: list[str] = []
        self._had_keys = True
        self._taken: set[int] = set()
        self._filled: dict[tuple[Any, ...], int] = {}
        self._names: dict[StatePath, str] = {}
        self._stored: dict[str, int] = {}
        self._excluded: set[str] = set()
        self._inside: dict[int, dict[Any, Any]] = {}
        self._made_like: dict[tuple[int, int], Any] = {}

    def match(self, target: dict[Any, Any]) -> dict[Any, Any]:
        """Compares everything and plans; changes nothing."""
        found = [(path, value) for path, value in self._leaves(target) if is_tensor(value)]
        names = assign_names([path for path, _ in found])
        self._names = {path: name for (path, _), name in zip(found, names, strict=True)}
        own = own_parts(self._contents.decode_tree(Saved), target, self._rank)
        for name, index in self._layout.by_name.items():
            if name in own.others:
                continue
            known_as = self._selection.target_name(own.names.get(name, name))
            if not self._selection.wants(name):
                self._excluded.add(known_as)
            elif self._stored.setdefault(known_as, index) != index:
                self._problems.append(f"rename gives two stored tensors the name {known_as!r}")
        # Arrays are matched by name and values by place: a renamed tensor has no place.
        for path, value in found:
            self._match_array(path, value)
        self._had_keys = bool(target)
        result: dict[Any, Any] = self._match_node(own.tree, target, ())
        self._note_absent(own)
        for name, index in self._stored.items():
            if index not in self._taken:
                self.unexpected.append(name)
        return result

    def _leaves(self, target: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
        """Every leaf of the target; of a module with sharded parameters those of its ``state_dict``."""
        for below, value in walk(target, path):
            if isinstance(value, (PerRank, MayDiffer)):
                yield from self._leaves(value.value, below)
            elif is_sharded_module(value):
                # Such a module takes no whole tensors: its own are filled.
                inside = self._inside[id(value)] = value.state_dict()
                yield from self._leaves(inside, below)
            else:
                yield below, value

    def _note_absent(self, own: OwnParts) -> None:
        for absent in own.absent:
            name = _name_of(absent.path)
            if not any(self._selection.wants(stored) for stored in (name, *absent.names)):
                continue
            if self._strict:
                kept = ", ".join(str(key) for key in absent.keys[:SHOWN])
                self._problems.append(
                    f"{name}: kept by each rank of its own ({kept}), there is none of {absent.key} for rank "
                    f"{self._rank} of {self._world_size}; PerRank(..., key=) in the state chooses one"
                )
            elif name not in self.missing:
                self.missing.append(name)

    def raise_problems(self) -> None:
        """Raises what :meth:`match` found, all at once."""
        problems = list(self._problems)
        if self._strict:
            gone = lost(self._contents.record, self.missing)
            problems += gone.values()
            problems += [
                f"missing in the checkpoint: {name}"
                for name in self.missing
                if not lost(self._contents.record, [name])
            ]
            problems += [f"not in this state: {name}" for name in self.unexpected]
        raise_mismatch(self._contents, problems, self.missing, self.unexpected)

    # --- arrays -------------------------------------------------------------------------------

    def _match_array(self, path: StatePath, value: Any) -> None:
        name = self._names[path]
        if self._selection.only is not None and name not in self._stored:
            return  # not asked for: it stays as it is
        index = self._stored.get(name)
        if index is None:
            if name not in self._excluded:
                self.missing.append(name)
            return
        self._taken.add(index)
        if self._match_plain(value, index, name):
            return
        held = held_in(value, path)
        info = arrays.describe(held.array, path)
        reason = unlike_array(held, info.dtype.name, self._contents, index, name, self._selection)
        if reason is not None:
            self._problems.append(f"{name}: {reason}")
            return
        tie = memory_of(held, path, info)
        if tie is not None and self._is_filled_already(tie, index, name):
            return
        self._fill(held, index, self.wants, cast=info.dtype != self._layout.heads.dtypes[index])

    def _match_plain(self, value: Any, index: int, name: str) -> bool:
        """Has an ordinary tensor filled where it lies, if it is as the stored one; else others look at it.

        Nearly all are, and there can be ten thousand of them: what others look at takes 15 us more.
        """
        form = plain_form(value)
        heads = self._layout.heads
        shape = heads.shapes[index]
        if (
            form is None
            or form[1] != shape
            or arrays.dtype_of(form[0]) is not heads.dtypes[index]
            or heads.kinds[index] != "torch"
            or arrays.unwritable(value) is not None
        ):
            return False
        raw = arrays.raw_view(value)
        if raw is None:
            return False
        box = Box.whole(shape)
        tie = (shape, (box.offsets, (value.data_ptr(), form)))  # as memory_of has it
        if not self._is_filled_already(tie, index, name):
            self.wants.append(Want(index, box, raw))
        return True

    def _is_filled_already(self, tie: tuple[Any, ...], index: int, name: str) -> bool:
        """Whether this memory is filled under another name; a conflict if by another tensor."""
        first = self._filled.setdefault(tie, index)
        if first == index:
            return self._filled_once(tie)
        if self._chunk_digests(first) != self._chunk_digests(index):
            self._problems.append(
                f"{name}: shares its memory with {self._layout.tensors[first].name} here, "
                "but they differ in the checkpoint"
            )
        return True

    def _filled_once(self, tie: tuple[Any, ...]) -> bool:
        key = ("seen", *tie)
        seen = key in self._filled
        self._filled[key] = 1
        return seen

    def _chunk_digests(self, index: int) -> list[bytes]:
        first = self._layout.chunks.first
        return [bytes(d) for d in self._contents.digests[int(first[index]) : int(first[index + 1])]]

    def _fill(self, held: Held, index: int, wants: list[Want], *, cast: bool) -> None:
        if 0 in held.shape:
            return
        for box, array in held.parts:
            raw = None if cast else arrays.raw_view(array)
            if raw is not None:
                wants.append(Want(index, box, raw))
                continue
            loaded = self.builder.box(index, box, "torch" if arrays.is_torch_tensor(array) else "numpy")
            self.after.append(functools.partial(arrays.assign, array, loaded))

    def _take_like(self, saved: Any, like: Any, path: StatePath) -> Any:
        """A new tensor that is sharded and placed as `like`."""
        if not isinstance(saved, Saved) or saved.kind != "torch":
            return self._take(saved, path)
        tensor = self._layout.tensors[saved.index]
        self._taken.add(saved.index)
        if tuple(like.shape) != tensor.shape:
            self._problems.append(f"{_name_of(path)}: {unlike_shape(like.shape, tensor.shape)}")
            return LOAD
        key = (saved.index, id(like))
        if key not in self._made_like:
            made = self._made_like[key] = arrays.empty_like(like, tensor.dtype)
            held = held_in(made, path)
            reason = unwritable(held)
            if reason is not None:
                self._problems.append(f"{_name_of(path)}: {reason}")
            else:
                self._fill(held, saved.index, self.builder.wants, cast=False)
        return self._made_like[key]

    # --- everything else ----------------------------------------------------------------------

    def _match_node(self, saved: Any, target: Any, path: StatePath) -> Any:
        if isinstance(target, (PerRank, MayDiffer)):
            made = self._match_node(saved, target.value, path)
            return target if made is target.value else dataclasses.replace(target, value=made)
        if is_tensor(target):
            if not isinstance(saved, Saved) and path in self._names and self._names[path] not in self._stored:
                self._problems.append(
                    f"{show_path(path)}: a tensor here, {type(saved).__name__} in the checkpoint"
                )
            return target
        if target is LOAD:
            return self._take(saved, path)
        if isinstance(target, LoadLike):
            return self._take_like(saved, target.like, path)
        if id(target) in self._inside:
            inside = self._inside[id(target)]
            self.objects.append((target, self._match_node(saved, inside, path)))
            return target
        if takes_state_dict(target):
            self._shard_state(saved, target, path)
            self.objects.append((target, self._take(saved, path)))
            return target
        if isinstance(saved, dict) and isinstance(target, dict) and (target or not path):
            return self._match_dict(saved, target, path)
        if isinstance(saved, (list, tuple)) and isinstance(target, (list, tuple)) and target:
            return self._match_sequence(saved, target, path)
        if has_tensors(target):
            self._problems.append(
                f"{show_path(path)}: {type(target).__name__} with tensors here, "
                f"{type(saved).__name__} in the checkpoint"
            )
            return target
        return self._take(saved, path)

    def _shard_state(self, saved: Any, target: Any, path: StatePath) -> None:
        """Has an optimizer's state made as its sharded parameters are: whole tensors do not go with those."""
        state = saved.get("state") if isinstance(saved, dict) else None
        if not isinstance(state, dict):
            return
        for number, parameter in sharded_parameters(target).items():
            entry = state.get(number)
            if not isinstance(entry, dict) or not parameter.dim():
                continue
            for key, item in entry.items():
                if isinstance(item, Saved) and self._layout.tensors[item.index].shape == parameter.shape:
                    entry[key] = self._take_like(item, parameter, (*path, "state", number, key))

    def _match_dict(self, saved: dict[Any, Any], target: dict[Any, Any], path: StatePath) -> Any:
        for key, item in saved.items():
            below = (*path, key)
            if key in target:
                if is_taken_whole(target[key]) and not self._wants_under(item, below):
                    continue
                made = self._match_node(item, target[key], below)
                if made is not target[key] and self._is_wanted(below):
                    self.replacements.append((target, key, made))
            elif not _holds_saved(item) or (not path and not self._had_keys):
                if self._extend and self._is_wanted(below):
                    self.replacements.append((target, key, self._take(item, below)))
                elif self._selection.wants(_name_of(below)):
                    self.unexpected.append(_name_of(below))
        for key, item in target.items():
            if key not in saved and not is_tensor(item):
                self._missing_values(item, (*path, key))
        return target

    def _wants_under(self, saved: Any, path: StatePath) -> bool:
        """Whether any of a subtree was asked for; what is taken whole comes with the rest of it."""
        return self._is_wanted(path) or any(self._is_wanted(below) for below, _ in walk(saved, path))

    def _is_wanted(self, path: StatePath) -> bool:
        return self._selection.is_all or self._selection.wants(_name_of(path))

    def _missing_values(self, item: Any, path: StatePath) -> None:
        """What the state asks for and the checkpoint lacks; its own plain values just stay as they are."""
        if is_taken_whole(item) and self._selection.wants(_name_of(path)):
            self.missing.append(_name_of(path))

    def _match_sequence(self, saved: Any, target: Any, path: StatePath) -> Any:
        if len(saved) != len(target):
            if has_tensors(target):
                self._problems.append(
                    f"{show_path(path)}: {len(target)} entries here, {len(saved)} in the checkpoint"
                )
                return target
            return self._take(saved, path)
        made = [
            self._match_node(s, t, (*path, i)) for i, (s, t) in enumerate(zip(saved, target, strict=True))
        ]
        if isinstance(target, list):
            self.replacements += [
                (target, i, new)
                for i, (new, old) in enumerate(zip(made, target, strict=True))
                if new is not old
            ]
            return target
        return tuple(made) if type(saved) is tuple and type(target) is tuple else self._take(saved, path)

    def _take(self, saved: Any, path: StatePath) -> Any:
        """New objects for a saved subtree."""
        if isinstance(saved, Saved):
            self._taken.add(saved.index)
            return self.builder.tensor(saved.index, saved.kind, saved.detail)
        if isinstance(saved, Composite):
            parts = {name: self._take(part, path) for name, part in saved.parts.items()}
            return Composite(saved.kind, saved.head, parts)
        if isinstance(saved, dict):
            for key, item in saved.items():
                saved[key] = self._take(item, path)
            return saved
        if isinstance(saved, (list, collections.deque)):
            for i, item in enumerate(saved):
                saved[i] = self._take(item, path)
            return saved
        return tuple(self._take(item, path) for item in saved) if type(saved) is tuple else saved


def _holds_saved(node: Any) -> bool:
    return any(isinstance(value, (Saved, Composite, Blob)) for _, value in walk(node))


def _name_of(path: StatePath) -> str:
    return ".".join(str(key) for key in path)
