"""Tensors and arrays as raw memory: the one place that knows torch tensors and numpy arrays apart.

torch is never imported here: a state can only hold tensors if its owner has imported torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UnsupportedValueError
from ckptstore.model.boxes import Box, Shape
from ckptstore.model.dtypes import BY_NAME, DType
from ckptstore.model.plain import Composite, StatePath, class_path_of, show_path

_RAW: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_RAW[16] = np.dtype("<c16")  # only ever copied, never computed with

_SPARSE_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What the store keeps of a tensor besides its bytes.

    Attributes:
        kind: "torch" or "numpy".
        detail: the numpy dtype string, where it says more than `dtype` (byte order, datetime unit).
        tie: equal for tensors that are the same memory seen the same way; it begins with the address. None
            where there is no memory.
    """

    dtype: DType
    shape: Shape
    kind: str
    detail: str | None
    tie: tuple[Any, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class LazyArray:
    """A tensor whose bytes are fetched piece by piece: a state may hold it in place of an array.

    So a file of any size becomes a checkpoint in bounded memory.

    Attributes:
        kind: "torch" or "numpy": what it is when loaded; `detail` as in :class:`ArrayInfo`.
        read: (start, stop) -> the bytes of that range, row-major and little-endian. It is called from
            several threads, may be called twice for a range, and must give the same bytes each time.
    """

    dtype: DType
    shape: Shape
    kind: str
    detail: str | None
    read: Callable[[int, int], memoryview]


def _torch() -> Any:
    return sys.modules.get("torch")


def is_torch_tensor(value: Any) -> bool:
    """Whether it is a torch tensor (parameters and subclasses included)."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether it is a torch tensor or a numpy array."""
    return isinstance(value, np.ndarray) or is_torch_tensor(value)


def composite_of(value: Any, path: StatePath) -> Composite | None:
    """The parts of a sparse tensor or tensor subclass; None for ordinary tensors and all else.

    Raises:
        UnsupportedValueError: quantized, nested, meta and other kinds that have no plain bytes, by name.
    """
    if not is_torch_tensor(value):
        return None
    torch = _torch()
    is_plain = type(value) is torch.Tensor or type(value) is torch.nn.Parameter
    refused = _no_plain_bytes(value)
    if refused is not None:
        where = show_path(path)
        raise UnsupportedValueError(
            f"{where} is {refused[0]}; it cannot be stored", path=where, hint=refused[1]
        )
    if is_plain and value.layout is torch.strided:
        return None
    where = show_path(path)
    layout = str(value.layout).removeprefix("torch.")
    if layout in _SPARSE_PARTS:
        detached = value.detach()
        coalesced = layout == "sparse_coo" and detached.is_coalesced()
        # An uncoalesced tensor refuses .indices(): its parts are reached by the underscore methods.
        prefix = "_" if layout == "sparse_coo" else ""
        parts = {name: getattr(detached, prefix + name)() for name in _SPARSE_PARTS[layout]}
        return Composite("sparse", [layout, list(value.shape), coalesced], parts)
    if layout != "strided":
        raise UnsupportedValueError(f"{where} has layout {layout}, which cannot be stored", path=where)
    if not is_plain and hasattr(value, "__tensor_flatten__"):
        if class_path_of(value).startswith("torch.distributed.tensor"):
            raise UnsupportedValueError(
                f"{where} is a DTensor; this release saves what one process holds",
                path=where,
                hint="save tensor.full_tensor()",
            )
        names, context = value.__tensor_flatten__()
        head = [class_path_of(value), context, list(value.shape), list(value.stride())]
        return Composite("subclass", head, {name: getattr(value, name) for name in names})
    return None


def _no_plain_bytes(value: Any) -> tuple[str, str] | None:
    """(what it is, the remedy) of a tensor that has no plain bytes to store."""
    if value.is_nested:
        return "a nested tensor", "save nested.values() and nested.offsets(), or a list of its parts"
    if value.is_quantized:
        return "a quantized tensor", "save tensor.int_repr() with its scale and zero point"
    if value.is_meta:
        return (
            "on the meta device and has no data",
            "materialise it first: module.to_empty(device=...), then load or initialise",
        )
    if hasattr(value, "materialize"):  # torch.nn.parameter.UninitializedTensorMixin
        return "not initialised yet", "run one forward pass first"
    if value.is_mkldnn:
        return "an mkldnn tensor", "save tensor.to_dense()"
    return None


def rebuild_composite(composite: Composite) -> Any:
    """A sparse tensor or subclass from its loaded parts.

    A subclass is rebuilt only if its module is already imported: opening a store runs no code from it.
    """
    torch = _torch()
    if torch is None:
        return composite
    if composite.kind == "sparse":
        layout, shape, coalesced = composite.head
        parts = [composite.parts[name] for name in _SPARSE_PARTS[layout]]
        if layout == "sparse_coo":
            return torch.sparse_coo_tensor(
                *parts, size=shape, is_coalesced=coalesced or None, check_invariants=True
            )
        return getattr(torch, f"{layout}_tensor")(*parts, size=shape, check_invariants=True)
    class_path, context, shape, stride = composite.head
    module, _, name = class_path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if found is None or not hasattr(found, "__tensor_unflatten__"):
        return composite
    return found.__tensor_unflatten__(composite.parts, context, torch.Size(shape), tuple(stride))


def describe(value: Any, path: StatePath) -> ArrayInfo:
    """Dtype, shape and identity of an ordinary tensor or array.

    Raises:
        UnsupportedValueError: an element type that has no plain bytes, by name.
    """
    if isinstance(value, np.ndarray):
        return _describe_numpy(value, path)
    dtype = dtype_of(value.dtype)
    if dtype is None:
        where = show_path(path)
        raise UnsupportedValueError(
            f"{where} has dtype {value.dtype}, which cannot be stored", path=where, hint="view it as integers"
        )
    shape = tuple(value.shape)
    tie = None
    if 0 not in shape:
        place = value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size()
        device = None if value.is_cpu else value.device
        form = (value.dtype, shape, value.stride(), value.is_conj(), value.is_neg(), device)
        tie = (place, form)
    return ArrayInfo(dtype, shape, "torch", None, tie)


@functools.cache
def dtype_of(torch_dtype: Any) -> DType | None:
    """The dtype that stands for one of torch's; None for those whose elements have no plain bytes."""
    return BY_NAME.get(str(torch_dtype).removeprefix("torch."))


def memory_of(tensor: Any) -> memoryview | None:
    """The bytes of an ordinary CPU tensor where they lie, row-major and little-endian; None if they do not.

    It is only a view of the address, and does not keep the memory: hold ``tensor.untyped_storage()`` for as
    long as it is used. So it can be kept from save to save while the tensor stays where it is. Read it only
    if the tensor passes :func:`check_memory`.
    """
    found = _in_place(tensor)
    return None if found is None else memoryview(found).cast("B")


def _in_place(tensor: Any) -> ctypes.Array[ctypes.c_char] | None:
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if sys.byteorder != "little" or not tensor.nbytes:
        return None
    found: ctypes.Array[ctypes.c_char] = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return found


def check_memory(tensor: Any, path: StatePath) -> None:
    """That the memory which a tensor is a view of is there: its storage may have been freed or shrunk.

    Args:
        tensor: ordinary, strided; what is neither the CPU's nor CUDA's passes.

    Raises:
        UnsupportedValueError: names the path.
    """
    lost = _lost_memory(tensor)
    if lost is not None:
        where = show_path(path)
        raise UnsupportedValueError(
            f"{where} is {lost}",
            path=where,
            hint="save while it has its memory: with FSDP1, what FSDP.state_dict gives and not the module's "
            "own tensors",
        )


def _lost_memory(tensor: Any) -> str | None:
    """In words, if the memory of which an ordinary tensor is a view is not there; None if it is."""
    if not (tensor.is_cpu or tensor.is_cuda) or not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + _extent(tensor)) * tensor.element_size()
    if end <= storage.nbytes() and storage.data_ptr():
        return None
    return (
        f"a view of {end} bytes of a storage that has {storage.nbytes()}: its memory has been freed or "
        "shrunk (untyped_storage().resize_)"
    )


def _extent(tensor: Any) -> int:
    """From the first to the last element of a tensor that is not empty, in elements of its storage."""
    if tensor.is_contiguous():
        return int(tensor.numel())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum([(int(length) - 1) * int(step) for length, step in steps])


def _describe_numpy(value: npt.NDArray[Any], path: StatePath) -> ArrayInfo:
    dtype = value.dtype
    name = f"int{dtype.itemsize * 8}" if dtype.kind in "mM" else dtype.name
    found = BY_NAME.get(name)
    if type(value) is not np.ndarray or found is None or found.itemsize != dtype.itemsize:
        where = show_path(path)
        raise UnsupportedValueError(
            f"{where} is a {class_path_of(value)} of dtype {dtype}, which cannot be stored",
            path=where,
            hint="numeric arrays are stored as they are; turn strings, objects and records into lists or "
            "numeric arrays, and array subclasses into np.asarray(...)",
        )
    detail = dtype.str if dtype.kind in "biufcmM" else name
    tie = None
    if value.size:
        tie = (value.__array_interface__["data"][0], "numpy", value.shape, value.strides, dtype.str)
    return ArrayInfo(found, value.shape, "numpy", detail, tie)


def bytes_of(value: Any) -> memoryview:
    """All elements, row-major and little-endian: a view of the live memory where that is so already.

    Returns:
        A flat memoryview of bytes, which keeps the memory; a private copy when that is laid out otherwise
        or not on the CPU.
    """
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
            array = array.astype(array.dtype.newbyteorder("<"))
        return _flat(array)
    in_place: Any = _in_place(value)
    if in_place is not None:  # not by numpy(): after that, torch refuses to resize the storage for good
        in_place.storage = value.untyped_storage()
        return memoryview(in_place).cast("B")
    tensor = value.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.numel():
        return memoryview(b"")
    # One element of any stride counts as contiguous for torch and cannot be viewed: numpy settles that.
    return _flat(np.ascontiguousarray(_as_integers(tensor).contiguous().numpy()))


def _as_integers(tensor: Any) -> Any:
    """The same memory as integers of the same size: every operation works on those, whatever the dtype."""
    torch = _torch()
    itemsize = tensor.element_size()
    if itemsize == 16:
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize])


def _flat(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def raw_view(value: Any) -> npt.NDArray[Any] | None:
    """A writable numpy view of a target's elements as integers of the same size, strides kept.

    None where the memory cannot be written from here (another device, lazy conjugate, foreign byte
    order): the caller then fills a temporary and uses :func:`assign`.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or value.dtype.byteorder == ">":
            return None
        return value.view(_RAW[value.dtype.itemsize])
    if not value.is_cpu or value.is_conj() or value.is_neg() or value.numel() == 0:
        return None
    # Not by numpy(): after that, torch refuses to resize the storage for good.
    size = value.element_size()
    memory: Any = (ctypes.c_char * (_extent(value) * size)).from_address(value.data_ptr())
    memory.storage = value.untyped_storage()
    return np.ndarray(value.shape, _RAW[size], memory, strides=[step * size for step in value.stride()])


def unwritable(value: Any) -> str | None:
    """Why a target cannot be filled in place, or None when it can."""
    if isinstance(value, np.ndarray):
        return None if value.flags.writeable else "the array here is read-only"
    if value.is_meta:
        return "the tensor here is on the meta device and has no memory; materialise it first"
    if not value.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        return "elements of the tensor here share memory (expanded); clone it first"
    lost = _lost_memory(value)
    return None if lost is None else f"the tensor here is {lost}; give it that back first"


def empty_like(like: Any, dtype: DType) -> Any:
    """A new torch tensor of another dtype: on the device, with the strides, mesh and placements of `like`.

    Raises:
        UnsupportedValueError: this torch does not know the dtype.
    """
    return _torch().empty_like(like.detach(), dtype=_torch_dtype(dtype))


def _torch_dtype(dtype: DType) -> Any:
    torch = _torch()
    found = getattr(torch, dtype.name, None)
    if found is None:
        raise UnsupportedValueError(
            f"this torch {torch.__version__} has no dtype {dtype.name}", hint="upgrade torch"
        )
    return found


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """The integer dtype that stands for any element of this size."""
    return _RAW[itemsize]


def from_raw(raw: npt.NDArray[Any], kind: str, dtype: DType, shape: Shape, detail: str | None) -> Any:
    """A new torch tensor or numpy array over `raw`, the flat bytes (uint8) of all its elements.

    A numpy array is little-endian, as its bytes are; :func:`in_byte_order` follows when they are in.

    Raises:
        UnsupportedValueError: this torch or numpy does not know the dtype.
    """
    if kind == "numpy":
        return raw.view(_numpy_dtype(detail or dtype.name).newbyteorder("<")).reshape(shape)
    torch = _torch()
    if torch is None:
        import torch
    found = _torch_dtype(dtype)
    if not len(raw):
        return torch.empty(shape, dtype=found)
    return torch.from_numpy(raw.view(_RAW[dtype.itemsize])).reshape(shape).view(found)


def in_byte_order(array: Any, detail: str | None) -> Any:
    """A loaded numpy array in the byte order that was saved; all else as it is."""
    if detail is None or not detail.startswith(">") or not isinstance(array, np.ndarray):
        return array
    return array.astype(array.dtype.newbyteorder(">"))


def _numpy_dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError:
        try:
            import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise UnsupportedValueError(
                f"numpy has no dtype {text!r}", hint="pip install ml_dtypes, or load it as a torch tensor"
            ) from error
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, text))
        return found


def assign(target: Any, loaded: Any) -> None:
    """Copies `loaded` (same kind, dtype and shape) into `target` in place."""
    if isinstance(target, np.ndarray):
        target[...] = loaded
        return
    with _torch().no_grad():
        target.copy_(loaded)


def nbytes(dtype: DType, shape: Shape) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def copy_box(
    target: npt.NDArray[Any], target_box: Box, source: memoryview, source_box: Box, part: Box
) -> None:
    """Copies the elements of `part` from the row-major bytes of `source_box` into `target`.

    Args:
        target: raw view of an array holding `target_box`.
        source: the bytes of `source_box`, row-major.
    """
    array = np.frombuffer(source, target.dtype).reshape(source_box.sizes)
    target[part.within(target_box)] = array[part.within(source_box)]
