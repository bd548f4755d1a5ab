"""A small mixed model: two NPU partitions, one on the host, and buffers that every kind of partition keeps."""

from __future__ import annotations

from functools import cache

import numpy as np

import npu_compiler
from npu_compiler.aten.ir import IRGraph, StateUpdate
from npu_compiler.mixed.program import MixedProgram

from .toy_ir import ADD, HEAVY, ODD, SHAPE, Builder


def graph() -> IRGraph:
    """A model with three buffers: the host keeps ``count``, the NPU ``acc``; ``carry`` is passed between partitions."""
    b = Builder(weights=("w", "count", "carry", "acc"))
    b.node("m", HEAVY, "x", "p_w").node("carry_new", HEAVY, "p_carry", "m").node("first", ODD, "carry_new")
    b.node("count_new", ODD, "p_count").node("sum", "aten.special_bessel_j0.default", "count_new")
    b.node("z", HEAVY, "first", "p_carry").node("acc_new", ADD, "p_acc", "z").node("y", HEAVY, "acc_new", "sum")
    ir = b.out("y", "x", "m", "y", "p_w")
    ir.model_name = "small"
    for key in ("count", "carry", "acc"):
        ir.state.append(StateUpdate(key, b.specs[f"{key}_new"]))
    return ir


def weights() -> dict[str, np.ndarray]:
    """The model's state_dict."""
    rng = np.random.default_rng(3)
    return {key: rng.uniform(0.1, 0.6, SHAPE).astype(np.float32) for key in ("w", "count", "carry", "acc")}


def example() -> np.ndarray:
    """An input."""
    return np.linspace(-1, 1, 16, dtype=np.float32).reshape(SHAPE)


@cache
def small_model() -> MixedProgram:
    """The model, compiled for the CPU."""
    compiled = npu_compiler.compile_plan(npu_compiler.partition(graph()))
    assert isinstance(compiled, MixedProgram)
    return compiled
