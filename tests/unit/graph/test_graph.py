"""The core graph: what building nodes computes at once, rewriting, and structural equality."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.graph.graph import Graph, Value, broadcast_shapes, result_type
from npu_compiler.graph.structure import main_weight, structural_key


def test_views_that_change_nothing_are_the_value_itself() -> None:
    x = Graph().input("x", (2, 3), "float32")
    assert x.reshape(2, -1) is x.permute(0, 1) is x.expand(-1, 3) is x.slice(1, 0, 3) is x.cast("float32") is x
    assert x.graph.concat([x], 0) is x
    assert x.transpose(0, 1).shape == (3, 2) and x.slice(1, -2, 9).shape == (2, 2)
    with pytest.raises(AssertionError, match="cannot reshape"):
        x.reshape(4)


def test_arithmetic_promotes_as_pytorch() -> None:
    g = Graph()
    half, scalar, ints = (g.input(n, s, d) for n, s, d in (
        ("h", (2,), "float16"), ("s", (), "float32"), ("i", (2,), "int32")))  # fmt: skip
    assert result_type([half, scalar]) == "float16"  # dims outrank a 0-d tensor of the same category
    assert result_type([ints, scalar]) == "float32" and result_type([ints, 2.5]) == "float32"
    assert result_type([ints, True]) == "int32" and result_type([2, True]) == "int64"
    assert (half + 1).dtype == "float32"  # half types compute in float32


def test_broadcasting() -> None:
    assert broadcast_shapes((3, 1), (2,), ()) == (3, 2)
    with pytest.raises(ValueError, match="do not broadcast"):
        broadcast_shapes((3,), (2,))


def diamond() -> tuple[Graph, Value, Value]:
    g = Graph()
    x = g.input("x", (2,), "float32")
    unused = g.input("unused", (2,), "float32")
    double = x + x
    _dead = unused * 3.0
    g.outputs = [("y", double * double)]
    return g, x, double


def test_dead_nodes_go_and_inputs_stay() -> None:
    g, _, double = diamond()
    g.clean()
    assert [n.op for n in g.nodes] == ["input", "input", "pointwise", "pointwise"]
    assert {n.op for n in g.users()[double]} == {"pointwise"} and len(g.users()[double]) == 2


def test_replacement_follows_chains_and_keeps_an_order_that_can_run() -> None:
    g, x, double = diamond()
    late, later = x * 2.0, x * 4.0  # appended behind their new users
    g.replace({double: late, late: later})
    assert g.outputs[0][1].node.inputs == [later, later]
    seen: set[Value] = set()
    for node in g.nodes:
        assert seen.issuperset(node.inputs)
        seen.update(node.outputs)


def test_equal_computations_have_equal_keys() -> None:
    def made(factor: float, data: list[float]) -> object:
        g = Graph()
        scaled = g.weight("w", (2,), "float32") * factor + g.const(np.float32(data))
        keys: dict[Value, object] = {}
        for node in scaled.graph.nodes:
            keys[node.out] = structural_key(node, [keys[v] for v in node.inputs])
        return keys[scaled]

    assert made(2.0, [1, 2]) == made(2.0, [1, 2])
    assert made(2.0, [1, 2]) != made(2.0, [1, 3]) != made(3.0, [1, 3])


def test_the_largest_weight_names_a_value() -> None:
    g = Graph()
    large, small = g.weight("large", (8,), "float32"), g.weight("small", (1,), "float32")
    assert main_weight(large * small + small) == "large"
    assert main_weight(g.const(np.zeros(3, np.float32))) == "const"
