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
    network = _Network()
    for (a, b), c in capacity.items():
        network.connect(network.number(a), network.number(b), c)
    s, t = network.number(source), network.number(sink)
    while (level := network.distances(s, reverse=False))[t] >= 0:
        network.saturate(s, t, level)
    reach = network.distances(t, reverse=True)
    return {node for node, i in network.index.items() if reach[i] >= 0}


class _Network:
    """The residual network of a flow: nodes and edges are numbers; edge e and e ^ 1 are each other's reverse."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}
        self._to: list[int] = []
        self._left: list[float] = []  # capacity
        self._edges: list[list[int]] = []  # of each node

    def number(self, node: Hashable) -> int:
        """Return the number of a node, which is added if it is new."""
        if node not in self.index:
            self.index[node] = len(self._edges)
            self._edges.append([])
        return self.index[node]

    def connect(self, u: int, v: int, capacity: float) -> None:
        """Add an edge from ``u`` to ``v``."""
        for tail, head, left in ((u, v, capacity), (v, u, 0.0)):
            self._edges[tail].append(len(self._to))
            self._to.append(head)
            self._left.append(left)

    def distances(self, start: int, reverse: bool) -> list[int]:
        """Return breadth-first distances from ``start`` along (or against) edges with capacity left; -1 if cut off."""
        level = [-1] * len(self._edges)
        level[start] = 0
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for e in self._edges[u]:
                if self._left[e ^ 1 if reverse else e] > 0 and level[self._to[e]] < 0:
                    level[self._to[e]] = level[u] + 1
                    queue.append(self._to[e])
        return level

    def saturate(self, s: int, t: int, level: Sequence[int]) -> None:
        """Send flow along paths from ``s`` to ``t`` on which the distance rises by one with each edge, until none is
        left: a blocking flow, by depth-first search."""
        cursor = [0] * len(self._edges)  # the edge of each node that is tried next
        path: list[int] = []
        u = s
        while True:
            if u == t:
                self._augment(path)
                path, u = [], s
                continue
            edges = self._edges[u]
            while cursor[u] < len(edges) and not self._advances(u, edges[cursor[u]], level):
                cursor[u] += 1
            if cursor[u] < len(edges):
                path.append(edges[cursor[u]])
                u = self._to[path[-1]]
            elif path:
                u = self._to[path.pop() ^ 1]
                cursor[u] += 1
            else:
                return

    def _advances(self, u: int, e: int, level: Sequence[int]) -> bool:
        return self._left[e] > 0 and level[self._to[e]] == level[u] + 1

    def _augment(self, path: Sequence[int]) -> None:
        flow = min(self._left[e] for e in path)
        for e in path:
            self._left[e] -= flow
            self._left[e ^ 1] += flow
