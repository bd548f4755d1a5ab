"""The file of a mixed model: what is written is read, what does not fit is refused with its place."""

from __future__ import annotations

import json
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import npu_compiler
from npu_compiler.artifact import container, serialize
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.mixed import serialize as mixed_file
from npu_compiler.mixed.program import MixedProgram, load_program, parse_program
from npu_compiler.partitioning.plan import HOST, PartitionPlan
from npu_compiler.support.errors import ArtifactError

from ...support import handmade
from ...support.mixed_model import small_model
from ...support.toy_ir import HEAVY, ODD, Builder
from ..artifact.test_artifact import with_header


def dumps(model: MixedProgram) -> bytes:
    return mixed_file.dumps(model)


def plain() -> Any:
    """The model as the body of its file has it; it may be changed."""
    return msgpack.unpackb(msgpack.packb(mixed_file.to_plain(small_model())))


def repack(body: Any) -> bytes:
    return with_header(msgpack.packb(body), container.MIXED)


def facts(plan: PartitionPlan) -> Any:
    steps = [(p.id, p.device, p.nodes, p.inputs, p.outputs, ir_to_dict(p.ir)) for p in plan.partitions]
    return plan.to_dict(), steps, plan.feeds, ir_to_dict(plan.ir)


# -- round trip -------------------------------------------------------------------------------------------------------
def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = small_model()
    assert [p.device for p in model.plan.partitions] == ["npu", "host", "npu"] and model.plan.feeds
    model.save(tmp_path / "a.npubin")
    again = load_program(tmp_path / "a.npubin")
    assert isinstance(again, MixedProgram)
    assert facts(again.plan) == facts(model.plan)
    for field in ("name", "target", "device", "dtype", "build", "inputs", "outputs", "weights", "states", "host_ops"):
        assert getattr(again, field) == getattr(model, field), field
    assert again.programs.keys() == model.programs.keys()
    assert dumps(again) == dumps(model) == (tmp_path / "a.npubin").read_bytes()
    assert dumps(pickle.loads(pickle.dumps(model))) == dumps(model)


def test_what_a_model_needs_and_gives() -> None:
    model = small_model()
    assert [t.name for t in model.inputs] == ["x"] and [t.name for t in model.outputs] == ["y", "x", "m", "y#1", "p_w"]
    assert {w.key for w in model.weights} == {"w", "count", "carry"} and model.states == ["count", "carry", "acc"]
    assert model.host_ops == ["aten.special_bessel_j0.default", ODD]


def test_a_plain_program_keeps_its_header() -> None:
    data = serialize.dumps(handmade.program())
    assert struct.unpack_from("<8sII", data) == (container.MAGIC, container.FORMAT_VERSION, 0)
    assert isinstance(parse_program(data), CompiledProgram)


def test_a_model_that_runs_whole_on_the_npu_is_a_program() -> None:
    plan = npu_compiler.partition(Builder().node("y", HEAVY, "x", "x").out("y"))
    program = npu_compiler.compile_plan(plan)
    assert isinstance(program, CompiledProgram) and list(program.entries) == ["main"]
    with pytest.raises(ArtifactError, match="one NPU program computes the whole model"):
        dumps(MixedProgram(plan, {0: program}, "cpu", "float32"))


def test_a_model_that_runs_whole_on_the_host_has_a_file() -> None:
    plan = npu_compiler.partition(Builder().node("o", ODD, "x").out("o", "x"))
    model = npu_compiler.compile_plan(plan, "cpu:avx2")
    assert isinstance(model, MixedProgram) and (model.programs, model.device) == ({}, "cpu:avx2")
    assert facts(MixedProgram.loads(dumps(model)).plan) == facts(plan)


def test_a_storage_type_and_a_weight_format() -> None:
    b = Builder(weights=("w",)).node("m", HEAVY, "x", "p_w").node("o", ODD, "m")
    plan = npu_compiler.partition(b.out("o"))
    model = npu_compiler.compile_plan(plan, dtype="float16", weights="q8_0")
    assert isinstance(model, MixedProgram) and model.dtype == "float16"
    again = MixedProgram.loads(dumps(model))
    assert facts(again.plan) == facts(plan) and [t.dtype for t in again.outputs] == ["float32"]


def test_ops_of_libraries_are_allowed_by_the_caller_alone() -> None:
    ir = npu_compiler.load_ir(Builder().node("o", "mylib.op.default", "x").out("o"), allowed_ops=["mylib.op.default"])
    data = dumps(MixedProgram(npu_compiler.partition(ir), {}, "cpu", "float32"))
    assert MixedProgram.loads(data).plan.ir.allowed_ops == frozenset()
    allowed = MixedProgram.loads(data, ["mylib.op.default"])
    assert all(p.ir.allowed_ops == {"mylib.op.default"} for p in allowed.plan.partitions)


# -- description ------------------------------------------------------------------------------------------------------
def test_the_description_says_what_runs_where_and_why() -> None:
    text, data = small_model().describe(), small_model().to_json()
    assert "runs on the host, with PyTorch: aten.special_bessel_j0.default, aten.special_bessel_j1.default" in text
    assert "partition 1 on host" in text and "no lowering for aten.special_bessel_j1.default" in text
    assert "entry p0" in text and "entry p2" in text and "state   carry" in text
    assert data["kind"] == "mixed" and data["programs"].keys() == {"0", "2"}
    assert data["totals"]["kernels"] == sum(p["totals"]["kernels"] for p in data["programs"].values())
    assert data["plan"]["reasons"]["first"]["rule"] == "no_kernel"


def test_control_characters_do_not_reach_the_terminal() -> None:
    body = plain()
    body["build"] = {"by\x1b[1m": "\x1b]0;title\x07"}
    body["ir"] = body["ir"].replace('"small"', '"sm\\u001b[2Jall"')
    shown = parse_program(repack(body)).describe()
    assert all(c.isprintable() or c == "\n" for c in shown)


# -- damage -----------------------------------------------------------------------------------------------------------
def test_each_loader_names_what_the_file_holds(tmp_path: Path) -> None:
    small_model().save(tmp_path / "mixed.npubin")
    handmade.program().save(tmp_path / "program.npubin")
    with pytest.raises(ArtifactError, match=r"mixed\.npubin: offset 12: the file holds a mixed model, not a program"):
        CompiledProgram.load(tmp_path / "mixed.npubin")
    with pytest.raises(ArtifactError, match="the file holds a program, not a mixed model; use"):
        MixedProgram.load(tmp_path / "program.npubin")
    with pytest.raises(ArtifactError, match="offset 12: contents of kind 7"):
        parse_program(with_header(msgpack.packb({}), 7))
    with pytest.raises(ArtifactError, match=r"none\.npubin: cannot be read"):
        load_program(tmp_path / "none.npubin")


def test_truncated_and_flipped_files_are_found() -> None:
    data = dumps(small_model())
    for length in (0, 10, 55, 56, len(data) // 2, len(data) - 1):
        with pytest.raises(ArtifactError, match="offset"):
            parse_program(data[:length])
    for bit in range(8 * 12, 8 * len(data), 40_009):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArtifactError):
            parse_program(bytes(damaged))


def _swap_partitions(body: Any) -> None:
    body["partitions"].reverse()


def _drop_partition(body: Any) -> None:
    del body["partitions"][2]


def _swap_programs(body: Any) -> None:
    first, _, last = body["partitions"]
    first["program"], last["program"] = last["program"], first["program"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(version=2), "version: 2, this build reads 1; compile the model again"),
        (lambda b: b.pop("reasons"), r"body: expected the fields .*\(missing or unknown: reasons\)"),
        (lambda b: b.update(target="../cpu"), "target: expected a text like"),
        (lambda b: b.update(target="cuda"), r"partitions\[0\]\.program\.device: it was compiled for cpu"),
        (lambda b: b.update(ir="{"), "ir cannot be read as JSON"),
        (lambda b: b.update(ir="[]"), r"ir: \$: expected an object"),
        (lambda b: b.update(ir=b["ir"].replace('"x"', '"q"', 1)), "ir: "),
        (lambda b: b.update(ir=b["ir"].replace("[4,4]", "[4,5]")), "ir: |partitions"),
        (lambda b: b["partitions"][0].update(device="gpu"), r"partitions\[0\]\.device: expected 'npu' or 'host'"),
        (lambda b: b["partitions"][0].update(device="host"), r"partitions\[0\]\.program: expected null"),
        (lambda b: b["partitions"][0].update(program=None), r"partitions\[0\]\.program: expected a map"),
        (lambda b: b["partitions"][0]["nodes"].append("m"), r"nodes\[2\]: expected a node of the graph, each once"),
        (lambda b: b["partitions"][0]["nodes"].append("zz"), r"nodes\[2\]: expected a node of the graph, each once"),
        (lambda b: b["partitions"][1]["nodes"].reverse(), "'sum' reads 'count_new', which runs later"),
        (_swap_partitions, "which runs later"),
        (_drop_partition, "partitions: node 'z' is in none of them"),
        (_swap_programs, r"partitions\[0\]\.program\.entries\[0\]\.inputs: they are not those of the partition"),
        (lambda b: b["partitions"][0]["program"]["entries"].clear(), r"partitions\[0\]\.program\.entries: there is no"),
        (lambda b: b["partitions"][0]["program"].update(name=3), r"partitions\[0\]\.program\.name: expected a text"),
        (lambda b: b["reasons"].append(["m", "r", "d", ""]), r"reasons\[\d\]\[0\]: expected a node on the host"),
        (lambda b: b["reasons"].append(b["reasons"][0]), r"reasons\[\d\]\[0\]: expected a node on the host"),
        (lambda b: b.update(build={"a": b""}), "build.a: expected a text"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[Any], Any], message: str) -> None:
    body = plain()
    change(body)
    with pytest.raises(ArtifactError, match=message):
        parse_program(repack(body))


def test_a_program_with_other_weights_or_buffers_is_refused() -> None:
    body, other = plain(), plain()
    document = json.loads(body["ir"])
    document["state"] = [u for u in document["state"] if u["key"] != "acc"]
    body["ir"] = json.dumps(document)
    with pytest.raises(ArtifactError, match=r"partitions\[2\]\.program\.buffers: the states \['acc'\] are not"):
        parse_program(repack(body))
    other["ir"] = other["ir"].replace('"p_w":"w"', '"p_w":"acc"')
    with pytest.raises(ArtifactError, match=r"partitions\[0\]\.program"):
        parse_program(repack(other))


def test_a_plan_that_was_changed_is_not_saved(tmp_path: Path) -> None:
    model = MixedProgram.loads(dumps(small_model()))
    model.plan.partitions[0].outputs = ()
    with pytest.raises(ArtifactError, match="the plan was changed"):
        model.save(tmp_path / "a.npubin")
    del (other := MixedProgram.loads(dumps(small_model()))).programs[0]
    with pytest.raises(ArtifactError, match="the programs are not those of the NPU partitions"):
        other.save(tmp_path / "a.npubin")
    assert list(tmp_path.iterdir()) == []


def test_many_partitions_take_linear_time() -> None:
    """Whatever a file claims: each of its nodes is a partition, and all of them read one weight."""
    b = Builder(weights=("w",))
    for i in range(1500):
        b.node(f"n{i}", HEAVY, f"n{i - 1}" if i else "x", "p_w")
    model = MixedProgram(npu_compiler.partition(b.out("n1499"), lambda op: False), {}, "cpu", "float32")
    body = mixed_file.to_plain(model)
    body["partitions"] = [{"device": HOST, "nodes": [f"n{i}"], "program": None} for i in range(1500)]
    start = time.process_time()
    plan = MixedProgram(**mixed_file.parse(body)).plan
    assert len(plan.partitions) == 1500 and plan.partitions[-1].inputs == (("n1498", 0),)
    assert time.process_time() - start < 10  # a quadratic search takes minutes
