"""States to export, and what it means that two are the same."""

from __future__ import annotations

import numpy as np
import torch

from ckptstore.model.dtypes import BY_NAME
from ckptstore.transfer import export, import_


def tensor_of(dtype: str, shape=(3, 4), seed: int = 0) -> torch.Tensor:
    """Any bytes that are valid elements."""
    found = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = BY_NAME[dtype].itemsize
    count = int(np.prod(shape)) * size
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    if not count:
        return torch.empty(shape, dtype=found)
    return torch.from_numpy(raw.numpy().view(f"<u{size}" if size < 16 else "<c16")).reshape(shape).view(found)


def raw(value) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    flat = value.detach().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    # complex128 has no view of bytes; numpy has.
    return flat.numpy().tobytes() if flat.element_size() == 16 else bytes(flat.view(torch.uint8).numpy())


def assert_same(a, b, where="state"):
    """Same structure, types, dtypes, shapes and bytes."""
    assert type(a) is type(b) or {type(a), type(b)} <= {torch.Tensor, torch.nn.Parameter}, where
    if isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b)) or set(a) == set(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, (torch.Tensor, np.ndarray)):
        assert a.dtype == b.dtype, where
        assert tuple(a.shape) == tuple(b.shape), where
        assert raw(a) == raw(b), where
    else:
        assert repr(a) == repr(b), where


def save(store, state, name="source", **more):
    return store.run(name).save(1, state, **more).result()


def there_and_back(store, state, path, *, component="model", name="back", **options):
    """What is loaded from a checkpoint that was imported from the export of another."""
    source = store.run("source").save(1, state).result()
    export(source, path, component=component, **options)
    back = import_(store.run(name), path, step=1, component=component)
    return back.load()
