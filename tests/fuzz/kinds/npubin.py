"""``.npubin`` files of all targets: bytes, the program's tree behind a right checksum, and the launch lists of GPUs."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import npu_compiler
from npu_compiler.artifact import serialize
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.errors import NPUError
from npu_compiler.targets.simt.lang import program as launch_list
from npu_runtime import CPUBackend, Executor, load_weights

from ...support import handmade
from ...unit.artifact.test_artifact import repack
from ..mutations import mutate_bytes, mutate_tree

_DATA = Path(__file__).parents[2] / "data" / "ir"
_EXPRESSION = [["const", "float32", [], 1.0], ["index", "int64", [], 0], ["add", "float32", [0, 0], None]]
_VALUES = ("main", "npu_main", "arena", "state", "weight", "const", "load", "where", b"", b"\0" * 16, _EXPRESSION)

_NATIVE = ("binary", "sources", "requires")


@cache
def programs() -> list[bytes]:
    """Whole files: one written by hand, and a multi-layer perceptron for each target that compiles here."""
    made = [serialize.dumps(handmade.rich_program())]
    for target in ("cpu", "cuda", "metal"):
        try:
            made.append(serialize.dumps(npu_compiler.compile(npu_compiler.load_ir(_DATA / "mlp.json"), target=target)))
        except NPUError:  # no NVRTC, no compiler
            continue
    return made


@cache
def _trees() -> list[Any]:
    return [serialize.program_to_plain(CompiledProgram.loads(data)) for data in programs()]


@cache
def _state_dict() -> dict[str, np.ndarray]:
    return {**handmade.weights(), **handmade.every_weight()}


def case(rng: random.Random, folder: Path) -> None:
    path = folder / "a.npubin"
    if rng.random() < 0.2:
        data = mutate_bytes(rng, rng.choice(programs()), rng.choice(programs()))
        path.write_bytes(data)
        CompiledProgram.load(path)
        assert data in programs(), "the checksum did not notice the damage"
        return
    tree = copy.deepcopy(rng.choice(_trees()))
    native = copy.deepcopy([tree[name] for name in _NATIVE])
    _damage(rng, tree)
    try:
        path.write_bytes(repack(tree))
    except (OverflowError, ValueError, TypeError):  # what msgpack cannot hold is in no file
        return
    program = CompiledProgram.load(path)
    assert serialize.dumps(CompiledProgram.loads(serialize.dumps(program))) == serialize.dumps(program)
    assert program.describe() and json.dumps(program.to_json(), allow_nan=False)
    if program.target != "cpu":
        launch_list.unpack(program.binary)
    elif [tree[name] for name in _NATIVE] == native:  # damaged native code may do anything, so it is not run
        _run(program)


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


def _run(program: CompiledProgram) -> None:
    weights = {w.key: _state_dict().get(w.key, np.zeros(w.shape, w.dtype)) for w in program.weights}
    store = load_weights(program, weights, CPUBackend(1))
    for name, entry in program.entries.items():
        executor = Executor(program, store, CPUBackend(1), name)
        executor.run([np.zeros(i.shape, i.dtype) for i in entry.inputs])
