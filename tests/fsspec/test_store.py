"""A whole store on file systems of fsspec: save, restore, verify, reuse, collect."""

from __future__ import annotations

import numpy as np
import pytest

import ckptstore

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


def configured(tmp_path, url, options):
    lines = "\n".join(f"{name} = {value}" for name, value in options.items())
    path = tmp_path / "ckptstore.toml"
    path.write_text(f'[[tiers]]\nname = "far"\nurl = "{url}"\n[tiers.options]\n{lines}\n')
    return path


def state(step):
    rng = np.random.default_rng(0)
    frozen = rng.standard_normal((300, 1000), dtype=np.float32)
    return {
        "frozen": frozen,
        "moving": np.full(50_000, step, np.float64),
        "scalar": step,
        "empty": np.zeros(0),
    }


def goes_round(path):
    with ckptstore.init(path) as store:
        run = store.run("train")
        for step in (1, 2, 3):
            run.save(step, state(step)).result()
        run.close()
    with ckptstore.open(path) as store:
        run = store.run("train")
        target = {**state(0), "frozen": np.zeros((300, 1000), np.float32)}
        assert run.restore(target) == 3
        for name, value in state(3).items():
            np.testing.assert_array_equal(target[name], value)
        report = store.verify()
        assert report.complete == report.checkpoints == 3
        assert not report.problems
        run.close()


def test_on_memory(tmp_path, memory_url):
    goes_round(configured(tmp_path, memory_url, {}))


def test_on_azure(tmp_path, azure_environment, bucket):
    goes_round(configured(tmp_path, f"az://{bucket}/store", {"ckptstore": "{create_bucket = true}"}))


def test_on_google(tmp_path, google_environment, bucket):
    options = {"token": '"anon"', "project": '"test"', "ckptstore": "{create_bucket = true}"}
    goes_round(configured(tmp_path, f"gs://{bucket}/store", options))


def test_where_nothing_can_be_created_exclusively(tmp_path, memory_url):
    goes_round(configured(tmp_path, memory_url, {"ckptstore": '{writes = "move"}'}))
