"""What a review of two-phase saves has found: each of these once lost, mixed up or stopped something."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch

import ckptstore
from ckptstore.errors import UnsupportedValueError
from ckptstore.pool import Pool
from ckptstore.save import capture, copying
from ckptstore.save.arena import Arena
from ckptstore.save.cut import Share, cut
from ckptstore.save.flatten import Flattener
from ckptstore.torch.overlap import UpdateGate
from tests.capture.made import bytes_of, flat_of, pieces_of, written
from tests.saving.made import PATIENCE


class Held:
    """Deferred copies that wait."""

    def __init__(self, monkeypatch) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        original = copying.copy_wave

        def copy_wave(*args, **options):
            if threading.current_thread().name == "ckptstore-capture":
                self.inside.set()
                assert self.go.wait(PATIENCE)
            return original(*args, **options)

        monkeypatch.setattr(capture, "copy_wave", copy_wave)


@pytest.fixture
def held(monkeypatch):
    made = Held(monkeypatch)
    yield made
    made.go.set()


@pytest.fixture
def run(tmp_path, held):
    made = ckptstore.open(tmp_path / "ckpts", create=True).run("r", capture="overlap")
    yield made
    held.go.set()
    made.close()


def trained():
    torch.manual_seed(5)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    return model, optimizer


# --- restoring while a capture goes on --------------------------------------------------------


def test_a_restore_waits_for_the_capture_under_way(run, held):
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    held.go.set()
    run.save(1, state).result()
    held.go.clear()
    optimizer.step()
    wanted = model.weight.detach().clone()
    pending = run.save(2, state)
    assert held.inside.wait(PATIENCE)
    restoring = threading.Thread(target=lambda: run[1].restore(state))
    restoring.start()
    restoring.join(0.2)  # it would be over, if it did not wait
    assert torch.equal(model.weight.detach(), wanted)
    held.go.set()
    restoring.join(PATIENCE)
    assert not torch.equal(model.weight.detach(), wanted)
    assert torch.equal(pending.result().load()["model"]["weight"], wanted)


# --- memory that is not there -----------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4096])
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_tensor_whose_storage_was_freed_or_shrunk_is_refused_by_name(left, seen_before):
    flattener = Flattener()
    state = {"model": {"a": torch.ones(100_000), "b": torch.ones(10)}, "t": torch.ones(300, 400).t()}
    if seen_before:
        flattener.flatten(state, 1 << 20)
    for path, tensor in (("model.a", state["model"]["a"]), ("t", state["t"])):
        whole = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(left)
        with pytest.raises(UnsupportedValueError, match="freed or shrunk") as caught:
            flattener.flatten(state, 1 << 20)
        assert caught.value.path == path
        tensor.untyped_storage().resize_(whole)
        flattener.flatten(state, 1 << 20)


def test_a_storage_shrunk_in_place_under_a_known_address_is_seen(monkeypatch):
    flattener = Flattener()
    tensor = torch.ones(1000)
    flattener.flatten({"t": tensor}, 1 << 20)
    place = tensor.data_ptr()
    tensor.untyped_storage().resize_(400)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: place)
    with pytest.raises(UnsupportedValueError, match="4000 bytes of a storage that has 400"):
        flattener.flatten({"t": tensor}, 1 << 20)


def test_an_empty_tensor_without_memory_is_stored():
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    assert flat_of({"t": tensor[:0], "n": torch.empty(0, 3)}).layout.chunk_count == 0


# --- interrupts and threads -------------------------------------------------------------------


def test_leaving_a_pool_waits_for_what_runs_though_it_is_interrupted_twice():
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert go.wait(PATIENCE)
        ended.set()

    def interrupt() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        go.set()

    with pytest.raises(KeyboardInterrupt), Pool(1) as pool:
        pool.submit(call)
        assert begun.wait(PATIENCE)
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        pool.drain()
    assert ended.is_set()
    interrupter.join()


def test_after_an_error_copiers_begin_no_further_jobs():
    begun, stopped = threading.Event(), threading.Event()
    done = []

    def first() -> None:
        begun.set()
        assert stopped.wait(PATIENCE)

    def fail() -> None:
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, stopped.set).start()
        raise KeyboardInterrupt

    both = [first, fail]
    lock = threading.Lock()

    def of_thread() -> None:
        main = threading.current_thread() is threading.main_thread()
        with lock:
            job = both.pop(1 if main and len(both) == 2 else 0)
        job()

    with pytest.raises(KeyboardInterrupt):
        copying._run([of_thread, of_thread, *[lambda: done.append(1)] * 50], threads=2)
    assert not done


def _no_more_than(threads: int, monkeypatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("few"):
            if len(started) == threads:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_pool_goes_on_with_the_threads_that_could_be_started(monkeypatch):
    _no_more_than(1, monkeypatch)
    done = []
    with Pool(4, in_flight=100, name="few") as pool:
        for number in range(20):
            pool.submit(done.append, number)
        pool.drain()
    assert sorted(done) == list(range(20))


def test_a_pool_without_any_thread_says_so(monkeypatch):
    _no_more_than(0, monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"), Pool(4, name="few") as pool:
        pool.submit(int)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_a_capture_goes_on_trains_and_closes(run, held):
    model, optimizer = trained()
    run.save(1, {"model": model, "optimizer": optimizer})
    assert held.inside.wait(PATIENCE)
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(int(PATIENCE))  # ends it, if it hangs
            torch.set_num_threads(1)  # the threads that torch computes with have stayed in the parent
            optimizer.step()
            with run.capture_lock():
                pass
            run.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not run._pendings[-1].done


# --- what else changes, or must not -----------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_embeddings_that_their_forward_renormalises_are_not_copied_later(kind):
    model = torch.nn.Sequential(kind(500, 64, max_norm=1.0), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storages, reason = UpdateGate().deferrable({"model": model, "optimizer": optimizer})
    assert reason is None
    assert model[0].weight.untyped_storage().data_ptr() not in storages
    assert model[1].weight.untyped_storage().data_ptr() in storages


def test_cutting_leaves_storages_resizable_and_holds_them_as_long_as_pieces_need_them():
    tensor = torch.arange(100_000, dtype=torch.float32)
    wanted = tensor.clone().numpy().tobytes()
    pieces = pieces_of({"t": tensor})
    tensor.data = torch.zeros(1)  # as FSDP does: another storage
    gc.collect()
    assert b"".join(bytes_of(pieces).values()) == wanted
    other = torch.ones(1000)
    pieces_of({"t": other})
    other.untyped_storage().resize_(0)
    assert other.untyped_storage().nbytes() == 0


def test_a_deferred_copy_keeps_the_storages_that_its_views_rest_on(held):
    tensor = torch.arange(100_000, dtype=torch.float32)
    flat = flat_of({"t": tensor})
    wanted = bytes_of(pieces_of(flat))
    pieces = list(cut(flat.layout, flat.sources, Share.everything(flat.layout), flat.views))
    waves = capture.Waves(arena := Arena(4 << 20))
    capturing = capture.begin([], pieces, arena, waves, keep=flat.storages)
    assert held.inside.wait(PATIENCE)
    place = tensor.data_ptr()
    tensor.data, flat = torch.zeros(1), None
    others = [torch.zeros(100_000) for _ in range(4)]  # the allocator would give it to one of these
    assert place not in {other.data_ptr() for other in others}
    held.go.set()
    assert capturing.wait(PATIENCE)
    assert written(waves) == wanted


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(600_000, dtype=torch.float32).reshape(600, 1000).t(),
        torch.arange(600_000, dtype=torch.bfloat16).reshape(1, 600, 1000).transpose(1, 2),
        torch.arange(600_000).reshape(1000, 600)[::2, 1::3],
        torch.ones(3, 1).expand(3, 70_000),
        torch.randn(200, 300, dtype=torch.complex64).t().conj(),
        torch.randn(200, 300, dtype=torch.complex128).conj().imag.t(),
        (torch.arange(600_000).reshape(600, 1000) % 3 == 0).t(),
    ],
)
def test_tensors_of_any_strides_are_cut_right(tensor):
    wanted = tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy()
    assert b"".join(bytes_of(pieces_of({"t": tensor})).values()) == wanted.tobytes()


def test_tensors_of_other_strides_take_no_memory_before_their_wave(tmp_path):
    state = {f"w{i}": torch.full((256, 512), float(i)).t() for i in range(16)}
    pieces = pieces_of(state, 1 << 20)
    assert all(piece.view is None for piece in pieces)
    run = ckptstore.open(tmp_path / "ckpts", create=True).run("r", capture_bytes=2 << 20)
    loaded = run.save(1, state).result().load()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    run.close()
