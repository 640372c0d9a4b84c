"""Kinds of tensors that checkpoints have gone wrong with; each test bears its number in that list."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import CkptstoreError, UnsupportedValueError
from tests.cases.scaled import ScaledTensor
from tests.model.made import difference
from tests.roundtrip.made import again, fresh, objects, roundtrip, state_difference


def stored_bytes(store):
    return sum(objects(store).values())


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(8, 5).t(),
        lambda: torch.randn(9, 4)[::2],
        lambda: torch.randn(4, 1).expand(4, 3),
        lambda: torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
        lambda: torch.randn(30).as_strided((10, 5), (2, 1)),
    ],
)
def test_c099_transposed_and_strided_tensors_come_back_in_the_right_order(view):
    tensor = view()
    found = roundtrip({"x": tensor})["x"]
    assert torch.equal(found, tensor)
    assert found.is_contiguous()


def test_c101_a_slice_of_a_large_storage_stores_only_what_it_shows():
    store = fresh()
    store.run("r").save(1, {"x": torch.arange(1_000_000.0)[:10]}).result()
    assert stored_bytes(store) == 40
    found = again(store).run("r").latest.load()["x"]
    assert (found.tolist(), found.untyped_storage().nbytes()) == (list(range(10)), 40)


def test_c102_views_of_one_flat_buffer_store_it_once_and_come_back_apart():
    flat = torch.randn(100 * 640)
    store = fresh()
    store.run("r").save(
        1, {"m": {f"p{i}": flat[640 * i : 640 * (i + 1)].view(8, 80) for i in range(100)}}
    ).result()
    assert stored_bytes(store) == flat.nbytes
    found = again(store).run("r").latest.load()["m"]
    assert all(torch.equal(found[f"p{i}"].reshape(-1), flat[640 * i : 640 * (i + 1)]) for i in range(100))
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 100


def test_c104_equal_tensors_are_stored_once_but_never_become_one():
    store = fresh()
    run = store.run("r")
    a, b = torch.arange(2000.0), torch.arange(2000.0)
    run.save(1, {"a": a, "b": b}).result()
    assert stored_bytes(store) == a.nbytes
    b[7] = -1
    run.save(2, {"a": a, "b": b}).result()
    for step in (1, 2):
        found = again(store).run("r")[step].load()
        found["a"][0] = 99
        assert found["b"][0] == 0
        assert found["b"][7] == (7 if step == 1 else -1)
        target = {"a": torch.zeros(2000), "b": torch.zeros(2000)}
        run[step].restore(target)
        assert (target["a"][7], target["b"][7]) == (7, 7 if step == 1 else -1)


def test_c106_complex_tensors_are_stored_like_all_others():
    state = {"c64": torch.randn(40, dtype=torch.complex64), "c128": torch.randn(3, 4, dtype=torch.complex128)}
    assert state_difference(state, roundtrip(state)) is None


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "float8_e8m0fnu"])
def test_c107_packed_and_tiny_floats_keep_their_shape_in_torch_terms(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    tensor = torch.arange(96, dtype=torch.uint8).reshape(4, 24).view(dtype)
    store = fresh()
    store.run("r").save(1, {"x": tensor}).result()
    checkpoint = again(store).run("r").latest
    assert state_difference({"x": tensor}, checkpoint.load()) is None
    assert (checkpoint.tensors["x"].shape, checkpoint.tensors["x"].nbytes) == ((4, 24), 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (3, 0, 5)], ids=str)
def test_c109_empty_tensors_keep_shape_and_dtype(shape, dtype):
    state = {"x": torch.empty(shape, dtype=dtype), "y": np.empty(shape, "f4"), "z": torch.ones(1)}
    assert state_difference(state, roundtrip(state)) is None
    target = {"x": torch.empty(shape, dtype=dtype), "y": np.empty(shape, "f4"), "z": torch.zeros(1)}
    store = fresh()
    store.run("r").save(1, state).result()
    store.run("r").restore(target)
    assert target["z"].item() == 1
    with pytest.raises(CkptstoreError, match="shape"):
        store.run("r").restore({**target, "x": torch.empty((*shape, 0), dtype=dtype)})


def test_c111_a_meta_tensor_is_refused_by_name_at_save():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    store = fresh()
    with pytest.raises(UnsupportedValueError, match=r"model\.0\.weight.*meta device") as caught:
        store.run("r").save(1, {"model": dict(model.state_dict())}).result()
    assert "to_empty" in caught.value.hint
    assert not store.run("r").exists


def test_c111_a_meta_target_is_refused():
    store = fresh()
    store.run("r").save(1, {"x": torch.ones(3)}).result()
    with pytest.raises(CkptstoreError, match="x"):
        store.run("r").restore({"x": torch.empty(3, device="meta")})


LOAD_WITHOUT_THE_CLASS = """
import sys, torch, ckptstore
found = ckptstore.open(sys.argv[1]).run("r").latest.load()
assert "tests.cases.scaled" not in sys.modules
opaque = found["model"]["w"]
assert isinstance(opaque, ckptstore.Opaque), opaque
parts = opaque.payload
print(opaque.class_path, "|", opaque.reason, "|", parts["inner"].tolist(), parts["scale"].item(), found["n"])
"""


def test_c112_a_quantized_subclass_comes_back_or_as_its_parts_with_an_instruction(tmp_path):
    weight = ScaledTensor(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor(0.5), "fc1")
    store = ckptstore.init(tmp_path / "ckpts")
    store.run("r").save(1, {"model": {"w": weight}, "n": 5}).result()
    found = ckptstore.open(tmp_path / "ckpts").run("r").latest.load()["model"]["w"]
    assert type(found) is ScaledTensor
    assert (found.label, found.scale.item(), found.inner.tolist()) == ("fc1", 0.5, [[0, 1, 2], [3, 4, 5]])
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_THE_CLASS, str(tmp_path / "ckpts")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    class_path, reason, rest = done.stdout.strip().split(" | ")
    assert class_path == "tests.cases.scaled.ScaledTensor"
    assert "import tests.cases.scaled first" in reason
    assert rest == "[[0, 1, 2], [3, 4, 5]] 0.5 5"


@pytest.mark.parametrize(
    "state", [{}, {"a": 1}, {"a": {}}, {"a": [], "b": ({},)}, {"a": torch.empty(0)}], ids=repr
)
def test_c114_a_state_without_any_data_is_a_checkpoint_like_others(state):
    store = fresh()
    store.run("r").save(1, state).result()
    assert state_difference(state, again(store).run("r").latest.load()) is None
    assert objects(store) == {}
    assert again(store).run("r").restore(dict(state)) == 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i1"),
        np.arange(6, dtype="<u1"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        pytest.param(
            np.arange(5000, dtype=">f8"),
        ),
    ],
    ids=lambda array: array.dtype.str,
)
def test_c116_native_numeric_arrays_keep_value_and_dtype(array):
    assert difference({"x": array}, roundtrip({"x": array})) is None


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, "i4,f8"), np.array([object()]), np.array(["abcde"], "<U5"), np.array([b"ab"])],
    ids=lambda array: array.dtype.name,
)
def test_c116_other_arrays_are_refused_by_name(array):
    with pytest.raises(UnsupportedValueError, match=r"deep\[0\]\.x.*dtype"):
        fresh().run("r").save(1, {"deep": [{"x": array}]}).result()


def test_c117_values_among_tensors_keep_their_type():
    state = {"w": torch.ones(3).t(), "fmt": "nf4", "n": 3, "f": 1.5, "none": None, "yes": True}
    assert state_difference(state, roundtrip(state)) is None


@pytest.mark.filterwarnings("ignore")  # nested tensors of the strided layout are a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_g01_nested_tensors_are_refused_by_name(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(UnsupportedValueError, match=r"model\.ragged is a nested tensor") as caught:
        fresh().run("r").save(1, {"model": {"ragged": nested}}).result()
    assert "nested.values()" in caught.value.hint


def test_g02_lazy_conjugate_and_negative_bits_are_resolved_before_hashing():
    x = torch.randn(600, dtype=torch.complex64)
    store = fresh()
    run = store.run("r")
    run.save(1, {"x": x.conj_physical()}).result()
    assert run.save(2, {"x": x.conj()}, wait=True).new_bytes == 0  # the same values: the same chunks
    run.save(3, {"x": torch._neg_view(x)}).result()
    assert run.save(4, {"x": -x}, wait=True).new_bytes == 0
    assert torch.equal(run[3].load()["x"], -x)


def test_g02_requires_grad_parameter_and_attributes_are_the_owners_affair():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tensor_parallel = True
    found = roundtrip({"p": parameter, "g": torch.ones(2, requires_grad=True)})
    assert type(found["p"]) is type(found["g"]) is torch.Tensor
    assert not (found["p"].requires_grad)
    assert not (found["g"].requires_grad)
    assert not (hasattr(found["p"], "tensor_parallel"))
    store = fresh()
    store.run("r").save(1, {"p": torch.full((2,), 5.0)}).result()
    store.run("r").restore({"p": parameter})
    assert (parameter.tolist(), parameter.requires_grad, parameter.tensor_parallel) == ([5, 5], True, True)
