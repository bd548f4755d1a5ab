"""The depth-first order of directed acyclic graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npu_compiler.support.ordering import depth_first

edges = st.lists(st.lists(st.integers(0, 10**6), max_size=3), min_size=1, max_size=12)


@given(edges)
def test_every_item_follows_its_predecessors(random_edges: list[list[int]]) -> None:
    before = [[p % k for p in picks] if k else [] for k, picks in enumerate(random_edges)]
    order = depth_first([len(before) - 1], before.__getitem__)
    assert order[-1] == len(before) - 1 and len(set(order)) == len(order)
    assert all(order.index(p) < order.index(item) for item in order for p in before[item])


def test_roots_and_predecessors_are_visited_in_order() -> None:
    before = {"a": ["c", "b"], "b": ["d"], "c": ["d"], "d": [], "e": ["b"], "unused": []}
    assert depth_first(["e", "a", "e"], before.__getitem__) == ["d", "b", "e", "c", "a"]
    assert depth_first([], before.__getitem__) == []


def test_long_chains_need_no_recursion() -> None:
    assert depth_first([100_000], lambda k: [k - 1] if k else []) == list(range(100_001))
