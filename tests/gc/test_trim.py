"""Trims: older checkpoints without their optimizer, exact for the rest, and never under a live record."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import (
    CkptstoreError,
    GuardError,
    NotFoundError,
    SaveFailedError,
    StateMismatchError,
    TensorNotFoundError,
    UsageError,
)
from ckptstore.gc import trim as trimming
from ckptstore.gc.light import light_round
from ckptstore.gc.rounds import nothing_owed
from ckptstore.gc.shares import MaxDelete
from ckptstore.gc.trim import trim, trims_due
from ckptstore.model.history import Entry, derive
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Candidate, Keep
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import intents, notes
from ckptstore.tier.policies import write_policy
from ckptstore.transfer import export
from tests.cli.conftest import cli
from tests.crash._support import TRAIN, blank_like, check_objects, copy_of, same, store_over
from tests.gc.made import RUN_KEY, age, announce, garbage, open_tier
from tests.gc.trimmed import KEEP_TWO, components, full, saved, state_at, trained
from tests.inline import all_inline
from tests.replicate import made as replicated


@pytest.fixture(scope="module", autouse=True)
def _manifests_in_memory():
    """Copies of a place are one store to a manifest on disk, and what is GONE in one is alive in the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTSTORE_MANIFEST", ":memory:")
        yield


__all__ = ["cli"]

BOTH, LESS = ["model", "optimizer", "texts"], ["model", "texts"]


def without_optimizer(step):
    return {key: part for key, part in state_at(step).items() if key != "optimizer"}


def check(place, steps, trimmed=()):
    """Every step is there, whole or without its optimizer; nothing that a record names is missing."""
    check_objects(place)
    with contextlib.closing(store_over(place)) as store:
        for step in steps:
            expected = without_optimizer(step) if step in trimmed else state_at(step)
            assert same(store.run(TRAIN)[step].load(), expected), step


def newest_attempt(place, step):
    with contextlib.closing(store_over(place)) as store:
        return store.run(TRAIN)[step].entry.attempt


# --- through the collector -----------------------------------------------------------------------------


def test_older_checkpoints_keep_their_weights_and_free_their_optimizers():
    with trained(1, 2, 3, 4) as place:
        sizes = {info.key: info.size_bytes for info in place.list("")}
        before = components(place)
        report = full(place)
        assert [(each.step, each.components) for each in report.trims] == [
            (1, ("optimizer",)),
            (2, ("optimizer",)),
        ]
        assert {fate.outcome for fate in report.fates} == {"keep"}
        assert before == dict.fromkeys((1, 2, 3, 4), BOTH)
        assert components(place) == {1: LESS, 2: LESS, 3: BOTH, 4: BOTH}
        check(place, (1, 2, 3, 4), trimmed=(1, 2))
        # Of each of the two the large tensor and the pack of small ones; what all steps share stays.
        large = 3 * (8 << 10) * 8
        assert report.freed_bytes >= 2 * large
        assert not garbage(place)
        new = {info.key for info in place.list("") if info.key not in sizes}
        with contextlib.closing(store_over(place)) as store:
            records = [store.run(TRAIN)[step].record for step in (1, 2)]
        tables = {piece.key for record in records for ref in record.tables.values() for piece in ref.pieces}
        assert {
            key for key in new if key.startswith(("chunks/", "packs/"))
        } == tables  # nothing else is copied
        again = full(place)
        assert not again.trims
        assert not again.collected


def test_a_trimmed_checkpoint_is_the_same_one():
    with trained(1, 2, 3) as place:
        with contextlib.closing(store_over(place)) as store:
            run = store.run(TRAIN)
            run.tag(1, "first")
            run.tag(2, "paper")  # what is tagged keeps its optimizer, too, unless the rule says other tags
            run.annotate(1, metrics={"loss": 2.0})
            old = run[1]
            facts = (
                old.id,
                old.epoch,
                old.sequence,
                old.created_at,
                old.tags,
                dict(old.metrics),
                old.metadata,
            )
            attempt = old.entry.attempt
        write_policy([open_tier(place)], None, Policy(components={"optimizer": Keep(last=1, tags=["paper"])}))
        full(place)
        with contextlib.closing(store_over(place)) as store:
            run = store.run(TRAIN)
            made = run.find("first")
            assert not run.find("paper").entry.trimmed
            assert facts == (
                made.id,
                made.epoch,
                made.sequence,
                made.created_at,
                made.tags,
                dict(made.metrics),
                made.metadata,
            )
            assert [found.step for found in run.checkpoints()] == [1, 2, 3]
            assert made.entry.attempt != attempt
            assert (made.record.generation, made.record.origin) == (1, "trim")
            assert made.entry.trimmed == ("optimizer",)
            assert not store.verify().problems
            answers = [(c.id, c.state, c.entry.attempt) for c in run.checkpoints()]
            store.rebuild()
            assert [(c.id, c.state, c.entry.attempt) for c in run.checkpoints()] == answers
            run.restore(blank_like(state_at(0)))
            run.save(9, state_at(9), wait=True)
        assert components(place)[9] == BOTH


def test_a_dry_run_says_what_would_go_and_writes_nothing():
    with trained(1, 2, 3, 4) as place:
        before = sorted(info.key for info in place.list(""))
        report = full(place, dry_run=True)
        assert [(each.step, each.components, each.made) for each in report.trims] == [
            (1, ("optimizer",), ""),
            (2, ("optimizer",), ""),
        ]
        assert report.freed_bytes > 0
        assert sorted(info.key for info in place.list("")) == before
        with pytest.raises(GuardError, match="max-delete allows"):
            full(place, max_delete=MaxDelete(size_bytes=1000))
        assert sorted(info.key for info in place.list("")) == before


def test_a_light_round_trims_while_a_training_goes_on():
    with trained(1, 2, 3) as place:
        assert light_round(open_tier(place), RUN_KEY, owed=nothing_owed) is not None
        assert components(place) == {1: LESS, 2: BOTH, 3: BOTH}
        assert not garbage(place)
        assert light_round(open_tier(place), RUN_KEY, owed=nothing_owed) is None


def test_what_is_pinned_read_owed_or_damaged_keeps_its_optimizer():
    with trained(1, 2, 3, 4, 5, 6) as place:
        tier = open_tier(place)
        pins = {step: (RUN_KEY, newest_attempt(place, step)) for step in (1, 2, 3)}
        announce(place, "pin", pins[1])
        announce(place, "read", pins[2])
        with contextlib.closing(store_over(place)) as store:
            notes.add_note(
                tier, TRAIN, RUN_KEY, store.run(TRAIN)[3].id, "damaged", {"reason": "x", "keys": []},
                attempt=pins[3][1],
            )  # fmt: skip
        assert [each.step for each in full(place).trims] == [4]
        write_policy([tier], None, Policy(components={"optimizer": Keep(last=1)}))
        found = trimming.plan

        def owing(run_key, entries):
            return {entry.checkpoint: "owed to tier s3" for entry in entries}

        report = light_round(tier, RUN_KEY, owed=owing)
        assert report is None
        assert found is trimming.plan
        assert components(place)[5] == BOTH


def test_one_that_fails_does_not_stop_the_others():
    with trained(1, 2, 3, 4) as place:
        with contextlib.closing(store_over(place)) as store:
            own = store.run(TRAIN)[1].contents
            others = {key for step in (2, 3, 4) for key in store.run(TRAIN)[step].contents.object_sizes}
            model = [
                own.keys.key(int(own.locations.object[row]))
                for row in range(len(own.digests))
                if own.layout.heads.components[int(own.layout.chunks.tensor[row])] == "model"
            ]
        missing = next(key for key in model if key not in others)
        place.delete([missing])
        report = full(place)
        assert [each.step for each in report.trims] == [2]
        assert missing in report.failures[0][1]
        with contextlib.closing(store_over(place)) as store:
            assert store.run(TRAIN)[1].state == "damaged"  # as every saver tells it
        assert not full(place).trims


def test_a_reader_that_has_begun_finishes():
    with trained(1, 2, 3) as place, contextlib.closing(store_over(place)) as store:
        reading = store.run(TRAIN)[1]
        with reading.reading():
            contents = reading.contents
            assert contents.layout
            trim(open_tier(place), RUN_KEY, reading.entry.attempt, ["optimizer"], reason="test")
            report = full(place)
            assert [one.reason.partition(":")[0] for one in report.stays] == ["being read"]
            assert same(reading.load(), state_at(1))
        assert full(place).collected
        assert not garbage(place)
        check(place, (1,), trimmed=(1,))


# --- a process that ends, or whose storage fails, at every call ------------------------------------------


def trim_first(backend, attempt):
    trim(open_tier(backend), RUN_KEY, attempt, ["optimizer"], reason="test")


@pytest.mark.parametrize("kind", ["crash", "crash_after", "error", "error_after"])
def test_the_old_record_counts_until_the_new_one_is_there(monkeypatch, kind):
    all_inline(monkeypatch)
    seen = set()
    with trained(1, 2, 3, policy=None) as place:
        attempt = newest_attempt(place, 1)
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            trim_first(backend, attempt)
        for call in backend.log:
            changes = call.op in ("put", "delete", "sync")
            if not changes and kind != "crash":
                continue
            with copy_of(place) as copy:
                with contextlib.suppress(SimulatedCrash, CkptstoreError):
                    trim_first(FaultBackend(copy, [Fault(kind, n=call.n)]), attempt)
                has = components(copy)[1]
                seen.add(tuple(has))
                check(copy, (1,), trimmed=() if has == BOTH else (1,))
                if not changes:
                    continue
                # Whoever comes next ends what is silent, carries the policy out, and leaves nothing over.
                for document in intents.list_intents(open_tier(copy)):
                    age(copy, document.attempt, 3600)
                write_policy([open_tier(copy)], None, KEEP_TWO)
                full(copy)
                assert components(copy) == {1: LESS, 2: BOTH, 3: BOTH}
                assert not garbage(copy)
                assert not list(intents.list_intents(open_tier(copy)))
                check(copy, (1, 2), trimmed=(1,))
    assert seen == {tuple(BOTH), tuple(LESS)}


def test_a_round_with_trims_that_ends_anywhere_is_finished_by_the_next(monkeypatch):
    all_inline(monkeypatch)
    with trained(1, 2, 3) as place:
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            full(backend)
        changing = [call for call in backend.log if call.op in ("put", "delete", "sync")]
        for call in changing:
            with copy_of(place) as copy:
                with contextlib.suppress(SimulatedCrash):
                    full(FaultBackend(copy, [Fault("crash_after", n=call.n)]))
                trimmed = tuple(step for step, has in components(copy).items() if has == LESS)
                check(copy, (1, 2, 3), trimmed=trimmed)
                for document in intents.list_intents(open_tier(copy)):
                    age(copy, document.attempt, 3600)
                copy.delete(["gc/lock"])  # it would lapse, too
                full(copy)
                assert components(copy) == {1: LESS, 2: BOTH, 3: BOTH}
                assert not garbage(copy)


def test_what_is_being_deleted_or_has_no_such_component_is_left_alone():
    with trained(1, 2, 3, policy=None) as place:
        tier, attempt = open_tier(place), newest_attempt(place, 1)
        before = sorted(info.key for info in place.list(""))
        assert trim(tier, RUN_KEY, attempt, ["ema"], reason="test") is None
        with pytest.raises(UsageError, match="without any component"):
            trim(tier, RUN_KEY, attempt, BOTH, reason="test")
        assert sorted(info.key for info in place.list("")) == before
        place.put(f"dooms/{RUN_KEY}/{attempt}.mp", [b"x"])
        assert trim(tier, RUN_KEY, attempt, ["optimizer"], reason="test") is None
        assert not list(intents.list_intents(tier))


def test_a_trim_that_was_fenced_changes_nothing(monkeypatch):
    with trained(1, 2, 3, policy=None) as place:
        attempt = newest_attempt(place, 1)
        real = trimming.without

        def fenced(*args, **options):
            (document,) = intents.list_intents(open_tier(place))
            trimming.commits.fence(open_tier(place), RUN_KEY, document.attempt, "silent")
            return real(*args, **options)

        monkeypatch.setattr(trimming, "without", fenced)
        with pytest.raises(SaveFailedError, match="fenced"):
            trim_first(place, attempt)
        assert components(place)[1] == BOTH
        check(place, (1, 2, 3))


# --- which -------------------------------------------------------------------------------------------------


def entry_at(step, **facts):
    made = derive(f"a{step}", {}, (), (), doomed=False)
    return Entry(f"c{step}", f"a{step}", 0, step, 1, step, float(step), made)


def due(rules, *steps, has, holders=()):
    candidates = [Candidate(entry_at(step), ("pinned",) if step in holders else ()) for step in steps]
    parts = {f"c{step}": has[step] for step in steps}
    return [(entry.step, names) for entry, names in trims_due(rules, candidates, parts, 1e9)]


def test_rules_of_a_component_count_the_checkpoints_that_have_it():
    has = {1: {"m", "o"}, 2: {"m", "o"}, 3: {"m"}, 4: {"m", "o"}, 5: {"m"}}
    assert due({"o": Keep(last=2)}, 1, 2, 3, 4, 5, has=has) == [(1, ("o",))]
    assert due({"o": Keep(last=1)}, 1, 2, 3, 4, 5, has=has) == [(1, ("o",)), (2, ("o",))]
    assert due({"o": Keep(last=1)}, 1, 2, 3, 4, 5, has=has, holders=(1,)) == [(2, ("o",))]
    assert due({"o": Keep(every=2)}, 1, 2, 3, 4, 5, has=has) == []  # 1 is the lowest step of 0 to 1
    assert due({"o": Keep(last=1), "m": Keep(last=4)}, 1, 2, 3, 4, 5, has=has) == [(2, ("o",))]


# --- what is said of it ------------------------------------------------------------------------------------

SAID = r"the optimizer of run 'train/exp 1' step 1 was trimmed by policy \(optimizer: last 2, any tag\)"


@pytest.fixture(scope="module")
def trimmed_store():
    with trained(1, 2, 3) as place:
        full(place)
        with contextlib.closing(store_over(place)) as store:
            yield store


def test_loading_says_that_a_component_was_trimmed(trimmed_store, tmp_path):
    checkpoint = trimmed_store.run(TRAIN)[1]
    with pytest.raises(NotFoundError, match=SAID) as caught:
        checkpoint.load(only="optimizer.*")
    assert caught.value.hint.startswith("take what is left: only=['model', 'texts']; or another step")
    with pytest.raises(TensorNotFoundError, match=SAID):
        checkpoint.tensors["optimizer.large"]
    with pytest.raises(NotFoundError, match=SAID):
        export(checkpoint, tmp_path / "x.npz", component="optimizer")
    with pytest.raises(StateMismatchError, match=SAID) as caught:
        checkpoint.restore(blank_like(state_at(1)))
    assert caught.value.problems == (
        "the optimizer of run 'train/exp 1' step 1 was trimmed by policy (optimizer: last 2, any tag)",
    )
    assert caught.value.hint.startswith("take what is left")
    state = blank_like(state_at(1))
    checkpoint.restore(state, only="model")
    assert same(state["model"], state_at(1)["model"])
    report = checkpoint.restore(blank_like(state_at(1)), strict=False)
    assert {name.partition(".")[0] for name in report.missing} == {"optimizer"}
    with pytest.raises(NotFoundError, match="nothing named"):
        checkpoint.load(only="optimise")


def test_an_average_says_so_too(trimmed_store):
    run = trimmed_store.run(TRAIN)
    with pytest.raises(StateMismatchError, match=SAID) as caught:
        trimmed_store.run("mean").average([run[1], run[3]], step=1)
    assert len(caught.value.problems) == 1
    made = trimmed_store.run("mean").average([run[1], run[3]], step=1, only="model")
    expected = 0.5 * state_at(1)["model"]["large"] + 0.5 * state_at(3)["model"]["large"]
    assert np.array_equal(made.load()["model"]["large"], expected)


def test_a_fork_of_it_has_lost_the_same(trimmed_store):
    forked = trimmed_store.run("forked").fork_from(trimmed_store.run(TRAIN)[1])
    assert forked.record.trimmed["optimizer"].reason == "optimizer: last 2, any tag"
    assert same(forked.load(), without_optimizer(1))


# --- other tiers -------------------------------------------------------------------------------------------


def test_a_trim_does_not_spread_to_other_tiers():
    with replicated.places() as (hot, cold):
        saved(hot, 1, 2)
        with contextlib.closing(replicated.opened(hot, cold)) as store:
            replicated.replicate(store)
            trim(store.tiers[0], RUN_KEY, store.run(TRAIN)[1].entry.attempt, ["optimizer"], reason="test")
            assert not replicated.replicate(store).sent
        with contextlib.closing(replicated.alone(cold)) as store:
            assert same(store.run(TRAIN)[1].load(), state_at(1))


def test_a_colder_copy_that_is_whole_stands_in_for_one_that_was_trimmed_and_not_the_other_way_round():
    with replicated.places() as (hot, cold):
        saved(hot, 1, 2, 3)
        with contextlib.closing(replicated.opened(hot, cold)) as store:
            replicated.replicate(store)
            run = store.run(TRAIN)
            in_cold = {
                found.step: next(copy.attempt for copy in found.copies if copy.tier is store.tiers[1])
                for found in run.checkpoints()
            }
            trim(store.tiers[0], RUN_KEY, run[1].entry.attempt, ["optimizer"], reason="test")
            trim(store.tiers[1], RUN_KEY, in_cold[2], ["optimizer"], reason="test")
            plan = store.plan_evict([f"{TRAIN}@1", f"{TRAIN}@2"])
            goes = {one.step: one.goes for one in plan.evictions}
            assert goes == {1: True, 2: False}
            assert store.evict(plan).collected
        with contextlib.closing(replicated.opened(hot, cold)) as store:
            assert same(store.run(TRAIN)[1].load(), state_at(1))
            assert same(store.run(TRAIN)[2].load(), state_at(2))


def test_a_repair_does_not_take_away_what_only_the_damaged_copy_has():
    with replicated.places() as (hot, cold):
        saved(hot, 1, 2)
        with contextlib.closing(replicated.opened(hot, cold)) as store:
            replicated.replicate(store)
            own = next(copy for copy in store.run(TRAIN)[1].copies if copy.tier is store.tiers[1])
            contents = own.contents
            row = next(
                row
                for row in range(len(contents.digests))
                if contents.layout.heads.names[int(contents.layout.chunks.tensor[row])] == "model.large"
            )
            key = contents.keys.key(int(contents.locations.object[row]))
            trim(store.tiers[0], RUN_KEY, store.run(TRAIN)[1].entry.attempt, ["optimizer"], reason="test")
            cold.delete([key])
            assert store.verify(tier="cold").problems
            store.replication.repair(store.tiers[1])
        with contextlib.closing(replicated.alone(cold)) as store:
            assert same(store.run(TRAIN)[1].load(), state_at(1))


# --- as people meet it -------------------------------------------------------------------------------------


def test_a_training_state_and_show_say_it(cli, tmp_path):
    torch = pytest.importorskip("torch")
    place = tmp_path / "ckpts"
    with ckptstore.init(place) as store:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        state = ckptstore.TrainState(model=model, optimizer=optimizer)
        run = store.run("gpt")
        for step in (1, 2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            run.save(step, state, wait=True)
    assert cli("-s", place, "policy", "set", "gpt", "--component", "optimizer", "--last", 1).code == 0
    assert "without optimizer" in cli("-s", place, "policy", "test", "gpt").out
    planned = cli("-s", place, "gc", "--dry-run").out
    assert "trim    gpt@1, optimizer" in planned
    assert "1 checkpoint trimmed" in cli("-s", place, "gc", "-v").out
    with ckptstore.open(place) as store:
        run = store.run("gpt")
        with pytest.raises(StateMismatchError, match="the optimizer of run 'gpt' step 1 was trimmed"):
            run[1].restore(state)
        run[1].restore(state, only="model")
        assert run.restore(state) == 2
    text = cli("-s", place, "show", "gpt@1").out
    assert "trimmed: optimizer" in text
    assert "by policy: optimizer: last 1, any tag" in text
    (said,) = cli("-s", place, "show", "gpt@1", "--json").json["trimmed"]
    assert (said["component"], said["reason"]) == ("optimizer", "optimizer: last 1, any tag")
