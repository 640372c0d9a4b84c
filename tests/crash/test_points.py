"""A process that dies, or whose storage fails, at every single call that it makes of its backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    OutOfSpaceError,
    PermissionDeniedError,
    SaveFailedError,
    WrongStoreError,
)
from ckptstore.model.record import CommitRecord
from ckptstore.store import Store
from ckptstore.testing import Call, Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import intents, layout
from tests.crash._support import (
    TRAIN,
    Model,
    blank_like,
    check_place,
    copy_of,
    ends,
    make_place,
    make_state,
    memory_place,
    same,
    store_over,
)

OTHER = "other"

Act = Callable[[], Checkpoint | None]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Something that a process does. `ready` runs undisturbed and returns what is struck; it notes in the
    model what it saved itself, and what the act may save."""

    ready: Callable[[Store, Model], Act]
    saves: bool = True


def _saving(step: int, salt: int = 0, *, run: str = TRAIN, **options: Any) -> Callable[[Store, Model], Act]:
    def ready(store: Store, model: Model) -> Act:
        model.maybe.append((run, step, make_state(step, salt)))
        training = store.run(run)
        return lambda: training.save(step, make_state(step, salt), **options).result()

    return ready


def _next_save(store: Store, model: Model) -> Act:
    training = store.run(TRAIN)
    model.saved(TRAIN, 3, make_state(3), training.save(3, make_state(3)).result().id)
    model.maybe.append((TRAIN, 4, make_state(4)))
    return lambda: training.save(4, make_state(4), metrics={"loss": 1.5}, tags=["fresh"]).result()


def _after_restore(store: Store, model: Model) -> Act:
    training = store.run(TRAIN)
    assert training.restore(blank_like(make_state(0))) == 2
    model.maybe.append((TRAIN, 3, make_state(3)))
    return lambda: training.save(3, make_state(3)).result()


def _after_going_back(store: Store, model: Model) -> Act:
    training = store.run(TRAIN)
    assert training.restore(blank_like(make_state(0)), before_step=2) == 1
    model.maybe.append((TRAIN, 2, make_state(2, 7)))
    return lambda: training.save(2, make_state(2, 7)).result()


def _rewind(store: Store, model: Model) -> Act:
    training = store.run(TRAIN)
    model.maybe.append((TRAIN, 2, make_state(2, 8)))

    def act() -> Checkpoint:
        training.rewind(1)
        return training.save(2, make_state(2, 8)).result()

    return act


def _fork(store: Store, model: Model) -> Act:
    source = store.run(TRAIN)[2]
    model.maybe.append(("fork", 2, make_state(2)))
    fork = store.run("fork")
    return lambda: fork.fork_from(source)


def _with_bases(store: Store, model: Model) -> Act:
    base = store.run(OTHER)[1]
    model.maybe.append((TRAIN, 5, make_state(5)))
    training = store.run(TRAIN)
    return lambda: training.save(5, make_state(5), bases=[base]).result()


def _notes(store: Store, _model: Model) -> Act:
    training = store.run(TRAIN)

    def act() -> None:
        training.tag(2, "gold", move=True)
        training.annotate(1, metrics={"loss": 0.5})
        training.pin(1, "for the paper")
        training.unpin(1)

    return act


def _reading(store: Store, _model: Model) -> Act:
    training = store.run(TRAIN)

    def act() -> None:
        assert training.restore(blank_like(make_state(0))) == 2
        training[1].load("model.*")

    return act


SCENARIOS = {
    "first save of a run": Scenario(_saving(1, run="new")),
    "first save of a session": Scenario(_saving(3)),
    "same step again": Scenario(_saving(2, 5)),
    "next save": Scenario(_next_save),
    "save after restore": Scenario(_after_restore),
    "save after going back": Scenario(_after_going_back),
    "rewind and save": Scenario(_rewind),
    "fork": Scenario(_fork),
    "save with bases": Scenario(_with_bases),
    "notes and pins": Scenario(_notes, saves=False),
    "restore and load": Scenario(_reading, saves=False),
}
SAVING = {name: scenario for name, scenario in SCENARIOS.items() if scenario.saves}


@pytest.fixture(scope="module")
def past():
    """A place with two checkpoints of one run and one of another, and what they must be."""
    with memory_place() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTSTORE_MANIFEST", ":memory:")
        make_place(place)
        model = Model()
        with contextlib.closing(store_over(place)) as store:
            for run, step in ((OTHER, 1), (TRAIN, 1), (TRAIN, 2)):
                made = store.run(run).save(step, make_state(step)).result()
                model.saved(run, step, make_state(step), made.id)
            store.run(TRAIN).tag(1, "gold")
        yield place, model


@dataclasses.dataclass
class Attempted:
    """One try of a scenario over a place of its own."""

    place: Any
    model: Model
    store: Store
    backend: FaultBackend
    act: Act
    offset: int

    def strike(self, *faults: Fault) -> None:
        """Sets faults; their `n` counts from the act's first call."""
        for fault in faults:
            if fault.n is not None:
                fault.n += self.offset
        self.backend.script[:] = faults

    @property
    def calls(self) -> list[Call]:
        return self.backend.log[self.offset :]

    def decided(self) -> None:
        """Each attempt that was announced reads record or VOID; its intent is gone."""
        tier = self.store.tier
        fixed = ends(tier)
        for call in self.calls:
            attempt = layout.stem(call.key)
            if call.op == "put" and call.key == layout.intent_key(attempt):
                # An announcement whose reply is lost is left to garbage collection, which fences the silent.
                struck = any(fault.n == call.n for fault in self.backend.script)
                assert struck or attempt in fixed, f"attempt {attempt} was neither committed nor fenced"


@contextlib.contextmanager
def attempt(past: Any, scenario: Scenario) -> Iterator[Attempted]:
    place, before = past
    with copy_of(place) as own:
        model = Model(dict(before.sure), [])
        backend = FaultBackend(own)
        with contextlib.closing(store_over(backend)) as store:
            act = scenario.ready(store, model)
            yield Attempted(own, model, store, backend, act, len(backend.log))


def calls_of(past: Any, scenario: Scenario) -> list[Call]:
    with attempt(past, scenario) as tried:
        tried.act()
        check_place(tried.place, tried.model)
        return [Call(number, call.op, call.key) for number, call in enumerate(tried.calls, 1)]


def changes(call: Call) -> bool:
    """Whether it may leave anything in the place: others are the same moment as the call before them."""
    return call.op not in ("get", "head", "list", "list_temporaries", "read_into")


def strike_each(
    past: Any,
    scenario: Scenario,
    check: Callable[[Call, Attempted], None],
    wanted: Callable[[Call], bool] = lambda _call: True,
) -> int:
    count = 0
    for call in filter(wanted, calls_of(past, scenario)):
        count += 1
        with attempt(past, scenario) as tried:
            try:
                check(call, tried)
            except BaseException as error:
                error.add_note(f"struck at call {call.n}: {call.op} {call.key!r}")
                raise
    return count


@pytest.fixture(autouse=True)
def _same_calls_each_time(monkeypatch):
    """One thread, so that a number means the same call in each try; no manifest in the user's folders."""
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    monkeypatch.setattr("ckptstore.save.write.default_threads", lambda _concurrency: 1)
    monkeypatch.setattr("ckptstore.load.fetch.default_threads", lambda _concurrency: 1)


def test_a_save_has_the_points_that_are_tried(past):
    """Guards the tests below: should a save stop making calls, they would try nothing."""
    for name, scenario in SAVING.items():
        ops = [call.op for call in calls_of(past, scenario)]
        assert ops.count("sync") >= 1, name
        assert ops.count("put") >= (2 if name == "fork" else 4), name
        assert len(ops) >= 12, name


@pytest.mark.parametrize("name", SAVING)
def test_the_intent_comes_first_then_the_objects_then_a_sync_then_the_record(past, name):
    """What a power failure could undo must be durable before the record says that it is there."""
    calls = calls_of(past, SAVING[name])
    puts = {call.n: call.key.partition("/")[0] for call in calls if call.op == "put"}
    (record,) = [n for n, kind in puts.items() if kind == "commits"]
    (intent,) = [n for n, kind in puts.items() if kind == "intents"]
    objects = [n for n, kind in puts.items() if kind in ("chunks", "packs")]
    syncs = [call.n for call in calls if call.op == "sync" and call.n < record]
    assert intent < min([*objects, record])
    assert max([*objects, intent]) < max(syncs) < record
    asked = [call for call in calls if intent < call.n < min([*objects, max(syncs)])]
    for call in asked:
        if call.op == "get" and call.key.startswith("commits/"):
            doom = call.key.replace("commits/", "dooms/")
            assert [c for c in asked if c.key == doom and c.n < call.n], (
                "a pin's doom is read before its record"
            )
    last = [call.key for call in calls if max(syncs) < call.n < record]
    assert "ckptstore.json" in last, "the marker is looked at once more"
    assert any("/epochs/" in key for key in last), "whether it was superseded is looked at once more"


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_any_call_the_new_one_is_whole_or_absent_and_the_rest_untouched(past, name):
    """After each call that changes anything: before the next one, the place is as it is then."""

    def check(call: Call, tried: Attempted) -> None:
        tried.strike(Fault("crash_after", n=call.n))
        with contextlib.suppress(SimulatedCrash):
            tried.act()
        assert tried.backend.crashed
        check_place(tried.place, tried.model)

    count = strike_each(past, SCENARIOS[name], check, changes)
    assert count or not SCENARIOS[name].saves


@pytest.mark.parametrize("name", SAVING)
def test_killed_after_its_record_the_new_one_is_there_and_before_it_is_not(past, name):
    def check(call: Call, tried: Attempted) -> None:
        is_record = call.op == "put" and call.key.startswith("commits/")
        if not is_record:
            return
        for fault, expected in ((Fault("crash", n=call.n), 0), (Fault("crash_after", n=call.n), 1)):
            with attempt(past, SAVING[name]) as own:
                own.strike(fault)
                with pytest.raises(SimulatedCrash):
                    own.act()
                run, _, _ = own.model.maybe[0]
                with contextlib.closing(store_over(own.place)) as store:
                    now = [c for c in store.run(run).checkpoints() if c.id not in own.model.sure]
                assert len(now) == expected, fault.kind

    strike_each(past, SAVING[name], check)


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_that_passes_is_never_noticed(past, name):
    def check(call: Call, tried: Attempted) -> None:
        if call.op == "sync":
            return  # never repeated: a later success says nothing about the puts before
        tried.strike(Fault("error", n=call.n))
        made = tried.act()
        if made is not None:
            run, step, state = tried.model.maybe.pop()
            tried.model.saved(run, step, state, made.id)
            assert same(made.load(), state)
        if changes(call):  # an error of a read leaves nothing behind
            check_place(tried.place, tried.model, wholly=False)

    strike_each(past, SCENARIOS[name], check)


def _is_ours_alone(call: Call) -> bool:
    """A document made by create-if-absent under a fresh name of ours."""
    return call.op == "put" and call.key.partition("/")[0] in ("intents", "notes")


def _reply_is_lost(past: Any, name: str, wanted: Callable[[Call], bool]) -> None:
    def check(call: Call, tried: Attempted) -> None:
        tried.strike(Fault("error_after", n=call.n))
        made = tried.act()
        if made is not None:
            tried.model.saved(*tried.model.maybe.pop(), made.id)
        check_place(tried.place, tried.model, wholly=False)

    def counts(call: Call) -> bool:
        return changes(call) and call.op != "sync" and wanted(call)  # a read without its reply has failed

    strike_each(past, SCENARIOS[name], check, counts)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_reply_that_is_lost_once_is_never_noticed(past, name):
    _reply_is_lost(past, name, lambda call: not _is_ours_alone(call))


@pytest.mark.parametrize("name", ["next save", "fork", "notes and pins", "restore and load"])
def test_the_lost_reply_of_a_document_that_only_we_can_have_made_is_never_noticed(past, name):
    _reply_is_lost(past, name, _is_ours_alone)


ERRORS = {
    "broken": BackendError("the disk is gone (made to)"),
    "permission": PermissionDeniedError("refused (made to)"),
    "full": OutOfSpaceError("full (made to)"),
}


def _fails_clearly(tried: Attempted, cause: CkptstoreError) -> bool:
    """Runs the act; whether it failed. The error is the cause, or says which save failed because of it."""
    made = None
    error: CkptstoreError | None = None
    try:
        made = tried.act()
    except CkptstoreError as caught:
        error = caught
    if error is not None:
        link: BaseException | None = error
        while link is not None and link is not cause:
            link = link.__cause__
        assert link is cause or cause.message in str(error), f"{error!r} does not tell the cause"
        if error is not cause:
            assert isinstance(error, (SaveFailedError, WrongStoreError))
            assert error.hint
            if isinstance(error, SaveFailedError):
                run, step, _ = tried.model.maybe[0]
                assert f"run {run!r} step {step}" in str(error)
        return True
    assert made is not None
    tried.model.saved(*tried.model.maybe[0], made.id)
    return False


def _goes_on(tried: Attempted) -> None:
    """The same process does it again, and now it works."""
    tried.backend.script.clear()
    made = tried.act()
    assert made is not None
    tried.model.saved(*tried.model.maybe[0], made.id)


def _fails_for_good(past: Any, name: str, fault: Fault, wanted: Callable[[Call], bool]) -> None:
    def check(call: Call, tried: Attempted) -> None:
        if not wanted(call):
            return
        assert isinstance(fault.error, CkptstoreError)
        tried.strike(dataclasses.replace(fault, n=call.n))
        failed = _fails_clearly(tried, fault.error)
        tried.decided()
        alive = sum(isinstance(end, CommitRecord) for end in ends(tried.store.tier).values())
        assert alive == len(tried.model.sure), "a save that failed is there all the same"
        announces = call.op == "put" and call.key.startswith("intents/")
        if not announces and call.op != "delete":
            assert not list(intents.list_intents(tried.store.tier)), "the intent of a decided attempt stays"
        if failed:
            _goes_on(tried)
        tried.model.maybe.clear()
        check_place(tried.place, tried.model, wholly=False)

    strike_each(past, SAVING[name], check)


def _reuses(call: Call) -> bool:
    """Looking whether a stored object can be reused."""
    return call.op in ("head", "read_into") and call.key.startswith(("chunks/", "packs/"))


def _is_record(call: Call) -> bool:
    return call.op == "put" and call.key.startswith("commits/")


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        *((name, "broken", "error") for name in ("first save of a run", "save after going back")),
        *((name, "broken", "error") for name in ("next save", "fork")),
        *((name, "broken", "error_after") for name in ("next save", "fork")),
        *((name, error, "error") for error in ("permission", "full") for name in ("next save", "fork")),
    ],
)
def test_an_error_that_stays_fails_the_save_fences_it_and_the_next_save_works(past, name, error, kind):
    fault = Fault(kind, error=ERRORS[error])
    _fails_for_good(past, name, fault, lambda call: not _reuses(call) and not _is_record(call))


def test_an_error_of_the_record_itself_is_told(past):
    _fails_for_good(past, "next save", Fault("error", error=ERRORS["full"]), _is_record)


@pytest.mark.parametrize("error", ["broken", "permission"])
def test_a_base_that_cannot_be_asked_for_is_not_called_damaged(past, error):
    def check(call: Call, tried: Attempted) -> None:
        if not _reuses(call):
            return
        tried.strike(Fault("error", n=call.n, error=ERRORS[error]))
        with contextlib.suppress(CkptstoreError):
            tried.act()
        tried.backend.script.clear()
        check_place(tried.place, tried.model, wholly=False)

    strike_each(past, SAVING["save after restore"], check)


@pytest.mark.parametrize("op", ["put", None], ids=["writes", "everything"])
@pytest.mark.parametrize("name", ["next save", "fork"])
def test_storage_that_fails_from_some_point_on_loses_nothing_and_comes_back(past, name, op):
    cause = ERRORS["full" if op else "broken"]
    calls = calls_of(past, SAVING[name])

    def check(call: Call, tried: Attempted) -> None:
        if (op is not None and call.op != op) or _is_record(call) or _reuses(call):
            return
        skip = sum(1 for earlier in calls[: call.n - 1] if op is None or earlier.op == op)
        tried.strike(Fault("error", op=op, skip=skip, times=None, error=cause))
        failed = _fails_clearly(tried, cause)
        tried.backend.script.clear()
        read_back = call.op == "get" and call.key.startswith("commits/") and call.n > len(calls) // 2
        if read_back:
            pass  # its record was there, and nothing could be asked any more: the outcome was not known
        elif failed:
            _goes_on(tried)
            tried.model.maybe.clear()
        check_place(tried.place, tried.model, wholly=False)

    strike_each(past, SAVING[name], check)


@pytest.mark.parametrize("name", ["next save"])
def test_a_write_that_arrives_after_its_process_died_does_no_harm(past, name):
    """A request that is stuck in the network is carried out when the next process has long gone on."""

    def check(call: Call, tried: Attempted) -> None:
        if call.op not in ("put", "delete"):
            return
        tried.strike(Fault("late", n=call.n), Fault("crash", n=call.n + 1))
        with contextlib.suppress(SimulatedCrash):
            tried.act()
        tried.backend.crashed = True
        check_place(tried.place, tried.model, wholly=False)
        with contextlib.closing(store_over(tried.place)) as store:
            goes_on = store.run(TRAIN)
            made = goes_on.latest
            assert made is not None
            tried.model.saved(TRAIN, 1_000_000, make_state(1_000_000), made.id)
        tried.backend.release()
        check_place(tried.place, tried.model, next_step=2_000_000)

    strike_each(past, SAVING[name], check)
