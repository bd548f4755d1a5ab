"""``.npubin`` files of all targets, of programs and of mixed models: bytes, the tree behind a right checksum, the
launch lists of GPUs, and the graph of a mixed model."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import npu_compiler
from npu_compiler.artifact import container, serialize
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.mixed import serialize as mixed_file
from npu_compiler.mixed.program import MixedProgram, load_program, parse_program
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.support.errors import NPUError
from npu_compiler.targets.simt.lang import program as launch_list
from npu_runtime import CPUBackend, Executor, MixedModel, load_weights

from ...support import handmade, mixed_model
from ...unit.artifact.test_artifact import with_header
from ..mutations import mutate_bytes, mutate_tree

_DATA = Path(__file__).parents[2] / "data" / "ir"
_EXPRESSION = [["const", "float32", [], 1.0], ["index", "int64", [], 0], ["add", "float32", [0, 0], None]]
_VALUES = ("main", "npu_main", "arena", "state", "weight", "const", "load", "where", b"", b"\0" * 16, _EXPRESSION)

_NODES = ("m", "first", "y", "npu", "host", "x", "p_w", "count", "carry", ["y", 0], "aten.special_bessel_j1.default")
_NATIVE = ("binary", "sources", "requires")


@cache
def programs() -> list[bytes]:
    """Whole files: one written by hand, a multi-layer perceptron for each target that compiles here, and mixed models,
    with and without programs."""
    made = [serialize.dumps(handmade.rich_program())]
    for target in ("cpu", "cuda", "metal"):
        try:
            made.append(serialize.dumps(npu_compiler.compile(npu_compiler.load_ir(_DATA / "mlp.json"), target=target)))
        except NPUError:  # no NVRTC, no compiler
            continue
    on_host = npu_compiler.partition(mixed_model.graph(), lambda op: False)
    return [*made, *map(mixed_file.dumps, (mixed_model.small_model(), MixedProgram(on_host, {}, "cpu", "float32")))]


@cache
def _trees() -> list[tuple[int, Any]]:
    """(kind of contents, body) of the files."""
    return [container.unpack(data) for data in programs()]


@cache
def _state_dict() -> dict[str, np.ndarray]:
    return {**handmade.weights(), **handmade.every_weight(), **mixed_model.weights()}


def prepare() -> None:
    """Compile what cases damage."""
    _trees()


def case(rng: random.Random, folder: Path) -> None:
    path = folder / "a.npubin"
    if rng.random() < 0.2:
        data = mutate_bytes(rng, rng.choice(programs()), rng.choice(programs()))
        path.write_bytes(data)
        load_program(path)
        assert data in programs(), "the checksum did not notice the damage"
        return
    contents, tree = copy.deepcopy(rng.choice(_trees()))
    native = copy.deepcopy(_native(tree))
    if contents == container.MIXED:
        _damage_model(rng, tree)
    else:
        _damage(rng, tree)
    try:
        path.write_bytes(with_header(msgpack.packb(tree), contents))
    except (OverflowError, ValueError, TypeError):  # what msgpack cannot hold is in no file
        return
    program = load_program(path)
    data = _dumps(program)
    assert _dumps(parse_program(data)) == data
    assert program.describe() and json.dumps(program.to_json(), allow_nan=False)
    if program.target != "cpu":
        if isinstance(program, CompiledProgram):
            launch_list.unpack(program.binary)
    elif _native(tree) == native:  # damaged native code may do anything, so it is not run
        _run(program)


def _dumps(program: CompiledProgram | MixedProgram) -> bytes:
    return serialize.dumps(program) if isinstance(program, CompiledProgram) else mixed_file.dumps(program)


def _native(tree: Any) -> list[Any]:
    """What a machine executes, of all programs in a file."""
    if "partitions" not in tree:
        return [tree[name] for name in _NATIVE]
    parts = tree["partitions"] if isinstance(tree["partitions"], list) else []
    programs = [part.get("program") for part in parts if isinstance(part, dict)]
    return [p.get(name) for p in programs if isinstance(p, dict) for name in _NATIVE]


def _damage_model(rng: random.Random, tree: Any) -> None:
    """Damage a mixed model: its partitions and reasons, its graph, or one of its programs."""
    document, programs = json.loads(tree["ir"]), [p["program"] for p in tree["partitions"] if p["program"]]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        match rng.randrange(4):
            case 0:
                mutate_tree(rng, tree["partitions"], _NODES)
            case 1:
                mutate_tree(rng, document, _NODES)
            case 2 if programs:
                mutate_tree(rng, rng.choice(programs), _VALUES)
            case _:
                tree["ir"] = json.dumps(document)
                mutate_tree(rng, tree, _VALUES)
                return
    tree["ir"] = json.dumps(document)


def _damage(rng: random.Random, tree: Any) -> None:
    if tree["target"] != "cpu" and rng.random() < 0.5:
        launches = msgpack.unpackb(tree["binary"])
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate_tree(rng, launches)
        try:
            tree["binary"] = msgpack.packb(launches)
        except (OverflowError, ValueError, TypeError):
            return
    else:
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            mutate_tree(rng, tree, _VALUES)


def _run(program: CompiledProgram | MixedProgram) -> None:
    weights = {w.key: _state_dict().get(w.key, np.zeros(w.shape, numpy_dtype(w.dtype))) for w in program.weights}
    if isinstance(program, MixedProgram):
        MixedModel(program, weights, CPUBackend(1)).run([_zeros(t.shape, t.dtype) for t in program.inputs])
        return
    store = load_weights(program, weights, CPUBackend(1))
    for name, entry in program.entries.items():
        executor = Executor(program, store, CPUBackend(1), name)
        executor.run([_zeros(i.shape, i.dtype) for i in entry.inputs])


def _zeros(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.zeros(tuple(shape), numpy_dtype(dtype))
