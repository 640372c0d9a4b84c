"""`capture="overlap"`: the update waits, what is saved is the state at the save, bit for bit."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckptstore.save import capture as capture_module
from ckptstore.save import copying
from ckptstore.save.arena import Arena
from ckptstore.save.capture import Waves, begin, split
from tests.capture.made import bytes_of, pieces_of, rows, written

torch = pytest.importorskip("torch")

from ckptstore.torch import TrainState  # noqa: E402
from ckptstore.torch.overlap import UpdateGate  # noqa: E402

MIB = 1 << 20


class Training:
    """A model with buffers, trained one step at a time; saving as a run does it."""

    def __init__(self, make: Any = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)
        )
        make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.state = TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.gate = UpdateGate()
        self.arena = Arena(32 * MIB)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step(self._closure) if isinstance(
            self.optimizer, torch.optim.LBFGS
        ) else self.optimizer.step()
        self.scheduler.step()

    def _closure(self) -> Any:
        self.backward()
        return torch.tensor(1.0)

    def save(self) -> tuple[Any, Waves, dict[int, bytes]]:
        """(the capture, its waves, the bytes of the state now)."""
        storages, _ = self.gate.deferrable(self.state)
        pieces = pieces_of(self.state.capture_state(0)[0])
        expected = bytes_of(pieces)
        now, later = split(pieces, storages)
        waves = Waves(self.arena)
        capturing = begin(now, later, self.arena, waves)
        self.gate.hold(capturing)
        return capturing, waves, expected


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background copies begin when it is set."""
    event = threading.Event()
    copy = copying.copy_wave

    def held(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "ckptstore-capture":
            assert event.wait(20)
        copy(*args, **kwargs)

    monkeypatch.setattr(capture_module, "copy_wave", held)
    yield event
    event.set()


OPTIMIZERS = {
    "adamw": None,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_right_after_the_save_waits_for_it(go: threading.Event, name: str) -> None:
    training = Training(OPTIMIZERS[name])
    for _ in range(2):
        training.step()
    capturing, waves, expected = training.save()
    assert not capturing.done
    training.model(torch.randn(16, 64)).sum().backward()  # forward and backward go on meanwhile
    assert not capturing.done
    training.optimizer.register_step_pre_hook(lambda *_: seen.append(capturing.done))
    seen: list[bool] = []
    threading.Timer(0.05, go.set).start()
    training.step()
    assert seen[0]
    assert written(waves) == expected
    assert training.save()[2] != expected
    training.gate.close()


def test_what_forward_changes_is_copied_before_save_returns(go: threading.Event) -> None:
    training = Training()
    training.step()
    storages, reason = training.gate.deferrable(training.state)
    assert reason is None
    moments = [
        value for entry in training.optimizer.state.values() for value in entry.values() if value.dim()
    ]
    trained = [*training.model.parameters(), *moments]
    large = {t.untyped_storage().data_ptr() for t in trained if t.nbytes >= 16 << 10}
    pieces = pieces_of(training.state.capture_state(0)[0])
    now, later = split(pieces, storages)
    assert {p.tensor.untyped_storage().data_ptr() for p in later if p.tensor is not None} == large
    assert storages == {t.untyped_storage().data_ptr() for t in trained}
    assert sorted(rows(now) + rows(later)) == rows(pieces)
    buffers = {t.untyped_storage().data_ptr() for t in training.model.buffers()}
    assert buffers <= {p.tensor.untyped_storage().data_ptr() for p in now if p.tensor is not None}

    _, waves, expected = training.save()
    for buffer in training.model.buffers():
        buffer.add_(1)
    go.set()
    training.gate.wait()
    assert written(waves) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, inside the compiler
def test_a_compiled_step_waits_too(go: threading.Event) -> None:
    training = Training(OPTIMIZERS["sgd"])
    training.step()

    @torch.compile(backend="eager")
    def update() -> None:
        training.optimizer.step()

    for _ in range(2):
        go.clear()
        _, waves, expected = training.save()
        training.backward()
        threading.Timer(0.05, go.set).start()
        update()
        assert written(waves) == expected


def test_two_saves_in_a_row_are_both_waited_for(go: threading.Event) -> None:
    training = Training()
    training.step()
    flights = [training.save(), training.save()]
    threading.Timer(0.05, go.set).start()
    training.step()
    assert all(capturing.done for capturing, _, _ in flights)
    for _, waves, expected in flights:
        assert written(waves) == expected


def test_code_that_changes_tensors_itself_waits_in_the_lock(go: threading.Event) -> None:
    training = Training()
    training.step()
    capturing, waves, expected = training.save()
    threading.Timer(0.05, go.set).start()
    with training.gate.lock(), torch.no_grad():
        assert capturing.done
        for parameter in training.model.parameters():
            parameter.data.zero_()
    assert written(waves) == expected


def test_a_save_inside_the_lock_copies_all_at_once(go: threading.Event) -> None:
    training = Training()
    training.step()
    with training.gate.lock(), training.gate.lock():
        capturing, waves, expected = training.save()
        assert capturing.done
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.zero_()
    assert written(waves) == expected
    assert training.gate.deferrable(training.state)[0]


def test_a_change_that_does_not_wait_fails_the_save_by_name(go: threading.Event) -> None:
    training = Training()
    training.step()
    _, waves, _ = training.save()
    with torch.no_grad():
        next(training.model.parameters()).add_(1)
    go.set()
    training.gate.wait()
    with pytest.raises(Exception, match=r"a tensor of model \(chunk \d+\) changed while they were captured"):
        written(waves)


def test_closing_takes_the_hook_away() -> None:
    from torch.optim import optimizer as torch_optimizer

    gc.collect()  # gates that others forgot, which would take their hooks away in the midst of this
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    training = Training()
    gate = training.gate

    class Never:
        done = False

        def wait(self) -> None:
            type(self).done = True

    gate.hold(Never())
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    gate.close()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
    assert Never.done


def test_a_forgotten_gate_leaves_no_hook() -> None:
    from torch.optim import optimizer as torch_optimizer

    before = len(torch_optimizer._global_optimizer_pre_hooks)
    gate = UpdateGate()
    gate.hold(type("Never", (), {"done": False, "wait": lambda self: None})())
    del gate
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


# --- when it falls back ---------------------------------------------------------------------------


def _in_backward(training: Training) -> Any:
    next(training.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return training.state


def _capturable(training: Training) -> Any:
    training.optimizer.param_groups[0]["capturable"] = True
    return training.state


class _Foreign:
    def __init__(self, optimizer: Any) -> None:
        self.state, self.param_groups = optimizer.state, optimizer.param_groups


class _Averaging(torch.optim.SGD):  # type: ignore[name-defined,misc,unused-ignore]
    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_in_backward, "parameters of optimizer have hooks that may update them inside backward"),
        (_capturable, "optimizer is capturable: inside a CUDA graph no hook is called"),
        (
            lambda training: {"m": training.model, "o": _Foreign(training.optimizer)},
            "o (_Foreign) is no torch.optim.Optimizer whose step can be made to wait",
        ),
        (
            lambda training: {"m": training.model, "o": [_Averaging(training.model.parameters(), lr=0.1)]},
            "o.0 (_Averaging) changes parameters in its train() and eval() too",
        ),
        (lambda training: {"m": training.model}, "no optimizer is in the state"),
        (lambda training: TrainState(model=training.model), "no optimizer is in the state"),
    ],
)
def test_it_falls_back_and_says_why_once(caplog: pytest.LogCaptureFixture, make: Any, reason: str) -> None:
    training = Training()
    state = make(training)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        for _ in range(2):
            assert training.gate.deferrable(state) == (frozenset(), reason)
    said = [message for message in caplog.messages if "overlap" in message]
    assert said == [f'capture="overlap": all is copied before save returns, because {reason}']


def test_plain_dicts_of_modules_and_optimizers_are_looked_into() -> None:
    training = Training()
    training.step()
    state = {"parts": [{"model": training.model}], "optimizer": training.optimizer, "other": torch.ones(3)}
    storages, reason = training.gate.deferrable(state)
    assert reason is None
    assert storages == training.gate.deferrable(training.state)[0]
    assert state["other"].untyped_storage().data_ptr() not in storages


def test_a_buffer_in_a_parameters_memory_is_not_deferred() -> None:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("seen", model.weight.detach()[0])
    storages, _ = UpdateGate().deferrable({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert storages == {model.bias.untyped_storage().data_ptr()}


def test_a_tensor_learning_rate_is_not_deferred() -> None:
    model = torch.nn.Linear(4, 4)
    rate = torch.tensor([0.1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    storages, _ = UpdateGate().deferrable({"m": model, "o": optimizer})
    assert rate.untyped_storage().data_ptr() not in storages
    assert len(storages) == 2
