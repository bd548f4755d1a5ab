"""The two graph problems of partitioning: fewest alternating runs, and minimum cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence


def fewest_runs(labels: Sequence[str], deps: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return a topological order of items ``0..n-1`` with the fewest runs of equal label.

    ``deps[i]`` are the items that precede ``i`` (a DAG). Each run takes every ready item of its label, and those that
    thereby become ready, before the label changes; both first labels are tried. This is optimal, by induction over
    runs: after ``k`` runs the greedy order has finished every item that any order with the same first label has
    finished, because an item whose predecessors are finished is ready for the greedy order, too.
    """
    names = sorted(set(labels))
    orders = [_greedy(labels, deps, names[i:] + names[:i]) for i in range(len(names))]
    return min(orders, key=len, default=[])


def _greedy(labels: Sequence[str], deps: Sequence[Iterable[int]], names: list[str]) -> list[list[int]]:
    waiting = [0] * len(labels)
    users: list[list[int]] = [[] for _ in labels]
    for item, before in enumerate(deps):
        for d in set(before):
            waiting[item] += 1
            users[d].append(item)
    ready = {name: deque(i for i, n in enumerate(waiting) if n == 0 and labels[i] == name) for name in names}
    runs: list[list[int]] = []
    turn = 0
    while any(ready.values()):
        queue, run = ready[names[turn % len(names)]], []
        while queue:
            item = queue.popleft()
            run.append(item)
            for user in users[item]:
                waiting[user] -= 1
                if waiting[user] == 0:
                    ready[labels[user]].append(user)
        if run:
            runs.append(sorted(run))
        turn += 1
    return runs


def min_cut(capacity: Mapping[tuple[Hashable, Hashable], float], source: Hashable, sink: Hashable) -> set[Hashable]:
    """Return the sink side of a minimum cut of a directed network: the nodes that still reach the sink.

    Of all minimum cuts this has the smallest sink side. Dinic's algorithm ("Algorithm for solution of a problem of
    maximum flow in networks with power estimation", 1970).
    """
    index: dict[Hashable, int] = {}
    to: list[int] = []
    left: list[float] = []
    edges: list[list[int]] = []  # node -> edge numbers; edge e and e ^ 1 are each other's reverse

    def number(node: Hashable) -> int:
        if node not in index:
            index[node] = len(edges)
            edges.append([])
        return index[node]

    for (a, b), c in capacity.items():
        u, v = number(a), number(b)
        for tail, head, cap in ((u, v, c), (v, u, 0.0)):
            edges[tail].append(len(to))
            to.append(head)
            left.append(cap)
    s, t = number(source), number(sink)

    def distances(start: int, reverse: bool) -> list[int]:
        """Breadth-first distance from ``start`` along (or against) edges with capacity left; -1 if cut off."""
        level = [-1] * len(edges)
        level[start] = 0
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for e in edges[u]:
                if left[e ^ 1 if reverse else e] > 0 and level[to[e]] < 0:
                    level[to[e]] = level[u] + 1
                    queue.append(to[e])
        return level

    while (level := distances(s, reverse=False))[t] >= 0:
        cursor = [0] * len(edges)
        path: list[int] = []
        u = s
        while True:
            if u == t:
                flow = min(left[e] for e in path)
                for e in path:
                    left[e] -= flow
                    left[e ^ 1] += flow
                path, u = [], s
                continue
            while cursor[u] < len(edges[u]):
                e = edges[u][cursor[u]]
                if left[e] > 0 and level[to[e]] == level[u] + 1:
                    break
                cursor[u] += 1
            if cursor[u] < len(edges[u]):
                path.append(edges[u][cursor[u]])
                u = to[path[-1]]
            elif path:
                u = to[path.pop() ^ 1]
                cursor[u] += 1
            else:
                break
    reach = distances(t, reverse=True)
    return {node for node, i in index.items() if reach[i] >= 0}
