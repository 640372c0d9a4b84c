"""The protocol's larger models, some millions of states each: `make soak`."""

from __future__ import annotations

import pytest

from ckptstore.testing.protocol import Collector, Network, Process, Reader, Saver, Trimmer, World, search

LIMIT = 50_000_000

MODELS: dict[str, tuple[World, list[Process]]] = {
    "two savers, two collectors": (
        World.of(a={"1.a"}, z={"2.z"}),
        [Saver("b", "a", "1"), Saver("c", "a", "13"), Collector("g", "a"), Collector("h")],
    ),
    "two savers of one's record, two full rounds": (
        World.of(a={"1.a"}, z={"2.z"}),
        [Saver("b", "a", "1"), Saver("c", "z", "2"), Collector("g", "a", strays=True), Collector("h", "a")],
    ),
    "two collectors that want each other's last, and a saver": (
        World.of(a={"1.a", "2.a"}, z={"2.a"}),
        [Saver("b", "a", "13"), Collector("g", "a", strays=True), Collector("h", "z", strays=True)],
    ),
    "two collectors and a network that repeats": (
        World.of(a={"1.a", "2.a"}, z={"2.a"}),
        [Saver("b", "a", "1"), Collector("g", "a"), Collector("h", strays=True), Network("n")],
    ),
    "a trim beside a saver, a reader and two collectors": (
        World.of(a={"1.a", "2.a"}, z={"3.z"}),
        [Trimmer("t", "a", "1"), Reader("r", "a"), Saver("b", "a", "12"), Collector("g"), Collector("h")],
    ),
}

ORDERS = ["bayz", "byaz", "yabz", "zyba"]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_of_a_larger_model_loses_anything(name: str) -> None:
    start, processes = MODELS[name]
    found = search(start, processes, limit=LIMIT)
    assert found.loss is None, f"{found.loss}: {'; '.join(found.steps)}"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("order", ORDERS)
def test_full_rounds_whose_listings_take_their_time_lose_nothing(order: str) -> None:
    start = World.of(a={"1.a"}, y={"1.a"}, z={"2.z"})
    others = [Saver("b", "y", "1"), Collector("g", "y", strays=True, patient=True)]
    found = search(start, [*others, Collector("h", "a", order=order, strays=True)], limit=LIMIT)
    assert found.loss is None, f"{found.loss}: {'; '.join(found.steps)}"
