import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import config, refs
from ckptstore.backend import check_key
from ckptstore.errors import StoreNotFoundError, UsageError
from ckptstore.model.ids import (
    MAX_STEP,
    Attempt,
    ObjectName,
    check_name,
    check_step,
    chunk_key,
    digest_of,
    pack_key,
    run_key,
    split_object_keys,
    ulid,
)
from ckptstore.model.retention import Keep
from tests.model.made import QUICK, session

moments = st.integers(0, 2**48 - 1)
randoms = st.binary(min_size=10, max_size=10)


@QUICK
@given(moments, randoms, moments, randoms)
def test_ulids_sort_by_time_then_by_randomness(when, random, later, other):
    a, b = ulid(when, random), ulid(later, other)
    assert re.fullmatch("[0-9A-HJKMNP-TV-Z]{26}", a)
    assert (a < b) == ((when, random) < (later, other))
    assert (a == b) == ((when, random) == (later, other))


def test_a_ulid_is_that_of_the_specification():
    assert ulid(1469918176385, bytes(10))[:10] == "01ARYZ6S41"
    assert ulid(2**48 - 1, b"\xff" * 10) == "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"


@QUICK
@given(moments, randoms, st.integers(-MAX_STEP - 1, MAX_STEP), st.integers(0, 10**10 - 1))
def test_an_attempt_id_is_read_back(when, random, step, number):
    made = Attempt(ulid(when, random), step, number)
    assert Attempt.parse(str(made)) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        session(),
        f"{session()}-1",
        f"{session()}-1-",
        f"{session()}--1",
        f"{session()}-+1-1",
        f"{session()}-1-1-1",
        f"{session()}-1--1",
        f" {session()}-1-1",
        f"{session()}-1-1\n",
        f"{session().lower()}-1-1" if session().lower() != session() else "a-1-1",
        f"{'I' * 26}-1-1",
        f"{session()}-{'9' * 20}-1",
        f"{session()}-1-{'9' * 11}",
        f"{session()}-\u0661-1",
        f"../{session()}-1-1",
    ],
)
def test_what_is_no_attempt_id_is_refused(text):
    with pytest.raises(ValueError, match="not an attempt id"):
        Attempt.parse(text)


@QUICK
@given(st.binary(max_size=8), st.integers(0, 10**10 - 1), st.booleans())
def test_an_object_key_is_read_back_and_is_a_key_of_the_backend_contract(data, rank, is_pack):
    attempt = str(Attempt(session(3), -5, 7))
    key = (pack_key if is_pack else chunk_key)(digest_of(data), attempt, rank)
    check_key(key)
    assert ObjectName.parse(key) == ObjectName(is_pack, digest_of(data), attempt, rank)
    assert ObjectName.parse(key).key == key


@pytest.mark.parametrize(
    "change", [lambda k: k.upper(), lambda k: "x" + k, lambda k: k + "\n", lambda k: k[:-2]]
)
def test_what_is_no_object_key_is_refused(change):
    key = chunk_key(digest_of(b"a"), f"{session()}-1-1", 0)
    with pytest.raises(ValueError, match="not an object key"):
        ObjectName.parse(change(key))


def test_a_key_in_the_wrong_fan_out_directory_is_refused():
    key = chunk_key(digest_of(b"a"), f"{session()}-1-1", 0)
    with pytest.raises(ValueError, match="not an object key"):
        ObjectName.parse("chunks/00/" + key.split("/")[2])


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)


@QUICK
@given(names, names)
def test_run_keys_are_safe_segments_and_differ_whenever_names_differ(a, b):
    for name in (a, b):
        key = run_key(name)
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*-[0-9a-f]{16}", key)
        assert len(key) <= 57
        check_key(f"commits/{key}/x.mp")
    assert (run_key(a) == run_key(b)) == (a == b)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("llama-8b", "llama-8b"),
        ("team/exp 1", "team-exp-1"),
        ("../../etc/passwd", "etc-passwd"),
        (".", "run"),
        ("..", "run"),
        ("名", "run"),
        ("É", "e"),
        ("a" * 1000, "a" * 40),
        ("CON", "con"),
        ("-rf", "rf"),
        ("a\nb", "a-b"),
        ("%2F", "2f"),
        ("a" * 39 + "/b", "a" * 39),
    ],
)
def test_a_run_key_begins_with_a_readable_slug(name, slug):
    assert run_key(name).rpartition("-")[0] == slug


@pytest.mark.parametrize("name", ["", "a\0b", "a" * 1001, "\ud800", 5, None, b"a"])
def test_a_name_that_cannot_be_used_is_refused(name):
    with pytest.raises(UsageError, match="a run's name"):
        check_name("a run's name", name)


@pytest.mark.parametrize("step", [0, -1, MAX_STEP, -MAX_STEP - 1])
def test_steps_of_64_bits_are_taken(step):
    assert check_step(step) == step


@pytest.mark.parametrize("step", [True, False, 10.0, "10", None, MAX_STEP + 1, -MAX_STEP - 2, 1j, [1]])
def test_other_steps_are_refused(step):
    with pytest.raises(UsageError, match="step"):
        check_step(step)


# --- REFs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "parts"),
    [
        ("run@latest", ("run", "latest")),
        ("a@b@12", ("a@b", "12")),
        ("run@min:loss", ("run", "min:loss")),
        ("01ARZ3", (None, "01ARZ3")),
        ("team/exp 1@best one", ("team/exp 1", "best one")),
    ],
)
def test_a_ref_is_split_at_its_last_at_sign(ref, parts):
    assert refs.split(ref) == parts


@pytest.mark.parametrize("ref", ["@latest", "run@", "@"])
def test_half_a_ref_is_refused(ref):
    with pytest.raises(UsageError, match="no REF"):
        refs.split(ref)


@pytest.mark.parametrize(
    ("text", "step"),
    [("12", 12), ("-3", -3), ("+4", 4), ("007", 7), ("1.0", None), ("", None), ("\u0661", None)],
)
def test_a_selector_that_is_a_number_is_a_step(text, step):
    assert refs.as_step(text) == step


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("min:loss", ("min", "loss")),
        ("max:a:b", ("max", "a:b")),
        ("min:", None),
        ("med:x", None),
        ("min", None),
    ],
)
def test_a_selector_may_ask_for_the_best(text, best):
    assert refs.as_best(text) == best


@pytest.mark.parametrize("tag", ["best", "a/b", "v1.0", "before the spike", "名", "1a", "x:y", "a" * 200])
def test_usable_tags_are_taken(tag):
    assert refs.check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag",
    ["", "12", "-1", "+1", "latest", "min:loss", "max:x", " a", "a ", "a\nb", "a\0", "a" * 201, 5, None],
)
def test_tags_that_would_read_as_something_else_are_refused(tag):
    with pytest.raises(UsageError):
        refs.check_tag(tag)


def test_a_tag_that_a_ref_would_split_is_refused():
    with pytest.raises(UsageError):
        refs.check_tag("a@b")


@QUICK
@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_every_usable_tag_can_be_asked_for_in_a_ref(run, tag):
    try:
        refs.check_tag(tag)
    except UsageError:
        return
    if "@" in tag:
        return  # see the test above
    name, selector = refs.split(f"{run}@{tag}")
    assert (name, selector) == (run, tag)
    assert refs.as_step(selector) is None
    assert refs.as_best(selector) is None


# --- where a store is ----------------------------------------------------------------------------


def test_a_directory_or_url_is_taken_as_it_is():
    assert config.resolve("ckpts").tiers == (config.TierConfig("ckpts", {}),)
    assert config.resolve("s3://bucket/a b%20").tiers[0].url == "s3://bucket/a b%20"
    with pytest.raises(UsageError, match="empty"):
        config.resolve("")


def test_a_toml_file_names_the_tier_relative_to_itself(tmp_path):
    path = tmp_path / "ckptstore.toml"
    path.write_text('store_uuid = "u"\n[[tiers]]\nurl = "sub/ckpts"\noptions = {region = "eu"}\n')
    found = config.resolve(path)
    assert found.store_uuid == "u"
    assert found.tiers == (config.TierConfig(str(tmp_path / "sub/ckpts"), {"region": "eu"}),)
    path.write_text('[[tiers]]\nurl = "memory://x"\n')
    assert config.resolve(path).tiers[0].url == "memory://x"


def test_a_toml_file_names_tiers_hottest_first(tmp_path):
    path = tmp_path / "ckptstore.toml"
    path.write_text("""
[[tiers]]
url = "fast"

[[tiers]]
url = "s3://bucket/ckpts"
replicate = "commit"
max_bytes_per_second = "50MB"
concurrency = 4
[tiers.retention]
last = 3

[[tiers]]
name = "archive"
url = "gs://bucket/ckpts"
replicate = "manual"
""")
    main, s3, archive = config.resolve(path).tiers
    assert (main.name, s3.name, archive.name) == ("main", "s3", "archive")
    assert [tier.requirement for tier in (main, s3, archive)] == ["async", "commit", "manual"]
    assert (s3.limits.max_bytes_per_second, s3.limits.concurrency) == (50_000_000, 4)
    assert (main.limits.max_bytes_per_second, s3.retention) == (None, Keep(last=3))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no tier"),
        ("tiers = 1", "no tier"),
        ("[[tiers]]", "url"),
        ("[[tiers]]\nurl = 5", "url"),
        ('[[tiers]]\nurl = "a"\n[[tiers]]\nname = "b"\nurl = "a"', "two tiers have the url"),
        (
            '[[tiers]]\nurl = "s3://a"\nname = "x"\n[[tiers]]\nname = "x"\nurl = "b"',
            "two tiers have the name 'x'",
        ),
        ('[[tiers]]\nurl = "a"\nname = "a/b"', "'a/b' cannot be the name"),
        ('[[tiers]]\nurl = "a"\nreplicate = "soon"', "replicate = 'soon'"),
        ('[[tiers]]\nurl = "a"\nconcurrency = 0', "concurrency"),
        ('[[tiers]]\nurl = "a"\nmax_bytes_per_second = "fast"', "max_bytes_per_second must be a size"),
        ('[[tiers]]\nurl = "a"\nmax_bytes_per_second = 0', "would stop all copying"),
        ('[[tiers]]\nurl = "a"\nretention = 1', "'retention' in [[tiers]] must be a table"),
        ('[[tiers]]\nurl = "a"\nscope = "host"', "scope"),
        ('[[tiers]]\nurl = "a"\nspeed = 1', "unknown key 'speed'"),
        ('[[tiers]]\nurl = "a"\noptions = 1', "'options' in [[tiers]] must be a table"),
        ('store = 1\n[[tiers]]\nurl = "a"', "unknown key 'store'"),
        ('store_uuid = 1\n[[tiers]]\nurl = "a"', "store_uuid"),
        ("[[", "cannot be read"),
    ],
)
def test_a_toml_file_that_cannot_be_used_names_the_reason(tmp_path, text, word):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(word)):
        config.resolve(path)


def test_a_toml_file_that_is_not_there_is_no_store(tmp_path):
    with pytest.raises(StoreNotFoundError):
        config.resolve(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        config.resolve(tmp_path / "bytes.toml")


def test_the_variable_wins_then_the_nearest_file_above(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert config.find_location(deep, {"CKPTSTORE": "s3://x"}) == "s3://x"
    file = tmp_path / "a" / "ckptstore.toml"
    file.write_text("")
    assert config.find_location(deep, {}) == str(file)
    assert config.find_location(deep, {"CKPTSTORE": ""}) == str(file)
    if not any((parent / "ckptstore.toml").exists() for parent in tmp_path.parents):
        assert config.find_location(tmp_path, {}) is None
    assert os.fspath(file)


def test_many_object_keys_are_split_as_one_is():
    attempt = f"{'0' * 26}--7-1"
    digests = [digest_of(bytes([n])) for n in range(3)]
    keys = [
        chunk_key(digests[0], attempt, 0),
        pack_key(digests[1], attempt, 12),
        chunk_key(digests[2], attempt, 3),
    ]
    parsed = [ObjectName.parse(key) for key in keys]
    assert split_object_keys(keys) == (
        [name.is_pack for name in parsed],
        b"".join(digests),
        [name.attempt for name in parsed],
        [name.rank for name in parsed],
    )
    assert split_object_keys([]) == ([], b"", [], [])
    wrong = keys[1].replace("packs/", "packs/00")
    for bad in ("", wrong, keys[1] + "\n", f"{keys[1]}\n{keys[0]}"):
        with pytest.raises(ValueError, match=r"not an object key"):
            split_object_keys([keys[0], bad])
