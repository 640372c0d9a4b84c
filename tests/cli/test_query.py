from __future__ import annotations

import csv
import io
import json
import time

import pytest


@pytest.fixture
def ask(cli, place):
    def call(*args, **more):
        return cli("-s", place, "query", *args, **more)

    return call


STEPS = "select step, state from v_checkpoints where run = 'gpt'"


def test_rows_are_a_table_by_default(ask):
    answer = ask(STEPS)
    assert answer.code == 0
    assert answer.out.splitlines() == ["step  state", "  10  ok", "  20  ok", "  30  ok"]
    assert ask(STEPS, "--no-header").out.splitlines()[0] == "  10  ok"


def test_columns_without_a_value_and_answers_without_a_row_keep_their_heading(ask):
    assert ask("select 1 as a, null as b, 2 as c").out.splitlines() == ["a  b  c", "1     2"]
    assert ask("select run from runs where 0").out == "run\n"


def test_the_other_formats(ask):
    rows = [{"step": step, "state": "ok"} for step in (10, 20, 30)]
    assert ask(STEPS, "--json").json == rows
    assert ask(STEPS, "--format", "json").json == rows
    for lines in (ask(STEPS, "--nl"), ask(STEPS, "--format", "nl"), ask(STEPS, "--nl", "--json")):
        assert [json.loads(line) for line in lines.out.splitlines()] == rows
    read = list(csv.reader(io.StringIO(ask(STEPS, "--csv").out)))
    assert read == [["step", "state"], ["10", "ok"], ["20", "ok"], ["30", "ok"]]
    assert ask(STEPS, "--csv", "--no-header").out == "10,ok\n20,ok\n30,ok\n"
    assert ask(STEPS, "--csv", "--json").code == 2
    assert ask(STEPS, "--csv", "--nl").code == 2


def test_parameters(ask):
    sql = "select step from v_checkpoints where run = :run and step > :step"
    assert ask(sql, "-p", "run=gpt", "--param", "step=15", "--nl").out == '{"step": 20}\n{"step": 30}\n'
    kinds = "select typeof(:a) as a, typeof(:b) as b, typeof(:c) as c, typeof(:d) as d, :e as e"
    given = ["-p", "a=12", "-p", "b=1.5e-3", "-p", "c=007", "--text-param", "d=12", "-p", "e=x=y"]
    assert ask(kinds, *given, "--json").json == [
        {"a": "integer", "b": "real", "c": "text", "d": "text", "e": "x=y"}
    ]
    assert ask("select :a", "-p", f"a={2**63}", "--json").json == [{":a": str(2**63)}]
    assert ask("select :a", "-p", "nonsense").code == 2
    assert ask("select :a", "-p", "a=1", "--text-param", "a=2").code == 2
    assert "binding parameter" in ask("select :a").err


def test_the_question_may_come_on_stdin(process, place, tmp_path):
    answer = process("-s", place, "query", "-", "--nl", input="select count(*) as n\nfrom runs;")
    assert answer.out == '{"n": 2}\n'
    (tmp_path / "latin").write_bytes("select 'é'".encode("latin-1"))
    with (tmp_path / "latin").open("rb") as file:
        assert process("-s", place, "query", "-", stdin=file).code == 2


@pytest.mark.parametrize(
    "sql",
    [
        "delete from runs",
        "update checkpoints set step = 1",
        "insert into runs default values",
        "drop table runs",
        "create table x (a)",
        "create temp table x (a)",
        "attach database 'other.db' as other",
        "vacuum into 'other.db'",
        "vacuum",
        "pragma journal_mode = wal",
        "pragma writable_schema = on",
        "begin immediate",
        "select load_extension('x')",
        "select writefile('other.db', 'x')",
        "select 1; delete from runs",
        "with a as (select 1) delete from runs",
        "select * from nowhere",
        "",
        "/* nothing */",
    ],
)
def test_sql_cannot_write_or_attach(ask, place, tmp_path, sql):
    before = (place / "manifest.db").read_bytes() if (place / "manifest.db").exists() else None
    answer = ask(sql)
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert not (tmp_path / "other.db").exists()
    assert ask("select count(*) as n from runs", "--nl").out == '{"n": 2}\n'
    if before is not None:
        assert (place / "manifest.db").read_bytes() == before


@pytest.mark.parametrize(
    "sql",
    [
        "with recursive a(x) as (select 1 union all select x + 1 from a) select count(*) from a",
        "with recursive a(x) as (select 1 union all select x + 1 from a) select x from a where x < 0",
        "select count(*) from " + ", ".join(f"pragma_table_info('v_checkpoints') as t{i}" for i in range(8)),
    ],
)
def test_sql_cannot_hang(ask, sql):
    started = time.monotonic()
    answer = ask(sql, "--limit-seconds", "1")
    assert time.monotonic() - started < 10
    assert answer.code in (0, 2)
    if answer.code:
        assert "stopped after 1 s" in answer.err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "3601", "x"])
def test_the_limit_is_a_number_of_seconds(ask, seconds):
    assert ask("select 1", "--limit-seconds", seconds).code == 2


def test_a_blob_and_a_number_json_lacks(ask):
    rows = ask("select x'00ff' as b, 9e999 as i, 'a' as x, 'b' as x", "--json").json
    assert rows == [{"b": {"$base64": True, "encoded": "AP8="}, "i": "Infinity", "x": "a", "x_2": "b"}]


def test_json_is_json_where_stdout_lacks_the_characters(process, place):
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    answer = process("-s", place, "query", "select 'é 名 😀' as x", "--json", env=ascii_only)
    assert answer.json == [{"x": "é 名 😀"}]
    answer = process("-s", place, "query", "select 'é 名 😀' as x", "--nl", env=ascii_only)
    assert json.loads(answer.out) == {"x": "é 名 😀"}


def test_ids_go_through_a_pipe_into_verify(process, place):
    sql = "select checkpoint from v_checkpoints where verified_at is null and run = 'gpt'"
    ids = process("-s", place, "query", sql, "--csv", "--no-header").out
    assert process("-s", place, "verify", "-", "--json", input=ids).json["checkpoints"] == 3
    assert process("-s", place, "query", sql, "--csv", "--no-header").out == ""
