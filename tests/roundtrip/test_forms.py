"""Forms as columns say what forms one by one say."""

import functools
import itertools

import pytest
import torch

from ckptstore.forms import Forms, form_of

pytestmark = pytest.mark.filterwarnings("ignore")

SQUARE = torch.arange(16, dtype=torch.float32).reshape(4, 4)
COMPLEX = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))

KINDS = {
    "plain": lambda: SQUARE,
    "copy": SQUARE.clone,
    "parameter": lambda: torch.nn.Parameter(SQUARE),
    "turned": SQUARE.t,
    "other shape": lambda: SQUARE.reshape(2, 8),
    "one row": lambda: SQUARE[:1],
    "one row of more": lambda: torch.zeros(4, 8)[:1, :4],
    "one column": lambda: SQUARE[:, :1],
    "integers": lambda: SQUARE.view(torch.int32),
    "complex": lambda: COMPLEX,
    "conjugated": COMPLEX.conj,
    "negated": lambda: torch._neg_view(SQUARE),
    "imaginary": lambda: COMPLEX.conj().imag,
    "one negated": lambda: COMPLEX[:1, :1].conj().imag,
    "one": lambda: SQUARE[:1, :1],
    "scalar": lambda: torch.tensor(1.0),
    "meta": lambda: torch.empty(4, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([SQUARE, SQUARE]),
    "sparse": SQUARE.to_sparse,
    "sparse rows": SQUARE.to_sparse_csr,
    "mkldnn": lambda: SQUARE.to_mkldnn() if torch.backends.mkldnn.is_available() else SQUARE.to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(SQUARE, 1.0, 0, torch.quint8),
}
REFUSED = {"meta", "nested", "sparse", "sparse rows", "mkldnn"}  # by :func:`form_of`: others look at them
ORDINARY = [name for name in KINDS if name not in REFUSED]


@functools.cache
def made(name):
    return KINDS[name]()


def contiguous(form):
    """Strides along sides of length 1 say nothing."""
    dtype, shape, strides, *rest = form
    return dtype, shape, tuple(s for s, n in zip(strides, shape, strict=True) if n != 1), *rest


@pytest.mark.parametrize("known", ORDINARY)
@pytest.mark.parametrize("found", KINDS)
def test_columns_and_single_forms_agree(known, found):
    form, other = form_of(made(known)), form_of(made(found))
    assert (other is None) == (found in REFUSED)
    same = other is not None and contiguous(form) == contiguous(other)
    memory = Forms.of([form]).memory_of([made(found)])
    assert (memory is not None) == same
    if memory is not None:
        storage = made(found).untyped_storage()
        assert memory.addresses == [made(found).data_ptr()]
        assert [held.data_ptr() for held in memory.storages] == [storage.data_ptr()]
        assert memory.nbytes == [storage.nbytes()]


@pytest.mark.parametrize("place", range(3))
def test_one_other_tensor_among_many_is_seen(place):
    for first, second in itertools.permutations(ORDINARY, 2):
        tensors = [made(first)] * 3
        forms = Forms.of([form_of(tensor) for tensor in tensors])
        assert forms.memory_of(tensors) is not None
        tensors[place] = made(second)
        same = contiguous(form_of(made(first))) == contiguous(form_of(made(second)))
        assert (forms.memory_of(tensors) is not None) == same, (first, second)


def test_devices_are_compared_where_not_all_are_on_the_cpu():
    form = form_of(SQUARE)
    there = (*form[:-1], torch.device("cuda", 0))
    assert Forms.of([form, there]).memory_of([SQUARE, SQUARE]) is None
    assert Forms.of([form, form]).devices is None


@pytest.mark.parametrize("place", [0, 255, 256, 511, 512, 599])
def test_one_other_is_seen_wherever_it_is_among_more_than_are_looked_at_together(place):
    tensors = list(torch.rand(600, 4, generator=torch.Generator().manual_seed(2)))
    forms = Forms.of([form_of(tensor) for tensor in tensors])
    memory = forms.memory_of(tensors)
    assert memory.addresses == [tensor.data_ptr() for tensor in tensors]
    assert memory.nbytes == [600 * 4 * 4] * 600
    tensors[place] = torch.rand(5)
    assert forms.memory_of(tensors) is None
