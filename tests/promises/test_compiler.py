"""The compiler: IR reader, constraint checker, optimisation, fusion, code generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import npu_compiler
from npu_compiler import CompiledProgram, CompileError, target_config, targets
from npu_compiler.pipeline import run_phases, switches
from npu_compiler.support.errors import ConfigError, IRError
from npu_compiler.targets.cpu.target import CPUTarget
from npu_runtime import Executor

from ..support.ir_files import FILES
from ..support.names_page import row_of
from ..support.toy_ir import ADD, HEAVY, ODD, RELU, SHAPE, Builder
from .compiled import Compiled

CONV, NORM = "aten.conv2d.default", "aten.batch_norm.default"


def kernels(ir: Any, **options: Any) -> list[tuple[str, ...]]:
    """The IR nodes that each kernel stands for."""
    schedule = run_phases(npu_compiler.load_ir(ir), "cpu", until="schedule", **options).schedule
    assert schedule is not None
    return [k.sources for k in schedule.kernels]


def mlp() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FILES / "mlp.json").read_text())
    return data


def one_node(op: str, shape: tuple[int, ...] = SHAPE, dtype: str = "float32", **attrs: Any) -> dict[str, Any]:
    """IR JSON of one op on a tensor ``x``."""
    x = {"name": "x", "shape": list(shape), "dtype": dtype}
    node = {"name": "y", "op_type": op, "inputs": [{**x, "producer_node": "x", "producer_output_idx": 0}]}
    y = {**x, "name": "y"}
    return {
        "model_name": "one", "graph_inputs": [x], "graph_outputs": [y], "weights": [], "weight_name_mapping": {},
        "nodes": [{**node, "outputs": [y], "attrs": attrs}],
    }  # fmt: skip


# -- IR reader --------------------------------------------------------------------------------------------------------


def test_the_ir_has_inputs_outputs_weights_nodes_and_the_name_mapping(convnet: Compiled) -> None:
    ir, data = npu_compiler.load_ir(convnet.path), json.loads(Path(convnet.path).read_text())
    assert [(t.name, list(t.shape), t.dtype) for t in ir.graph_inputs] == [("x", [2, 3, 32, 32], "float32")]
    assert [t.name for t in ir.graph_outputs] == ["linear"] and len(ir.weights) == len(data["weights"])
    assert ir.weight_name_mapping == data["weight_name_mapping"]
    assert [(n.name, n.op_type) for n in ir.nodes] == [(n["name"], n["op_type"]) for n in data["nodes"]]
    assert ir.nodes[0].attrs == {"stride": [2, 2], "padding": [1, 1]} and ir.nodes[0].outputs


def test_a_path_a_dict_and_a_graph_are_read_alike(convnet: Compiled) -> None:
    data = json.loads(Path(convnet.path).read_text())
    graphs = [npu_compiler.load_ir(convnet.path), npu_compiler.load_ir(data), npu_compiler.load_ir_from_dict(data)]
    assert all(g == convnet.ir for g in graphs)


def test_torch_ir_objects_are_read() -> None:
    torch_ir = pytest.importorskip("torch_ir", reason="pytorch-ir is not installed")
    theirs = torch_ir.IR.from_dict(mlp())
    assert npu_compiler.load_ir(theirs) == npu_compiler.load_ir(mlp())


def test_row_026_unique_names_need_no_producers() -> None:
    """Edges of the documented IR are tensor names; a name that only one node has identifies it."""
    data = mlp()
    for node in data["nodes"]:
        for t in node["inputs"]:
            t.pop("producer_node", None)
            t.pop("producer_output_idx", None)
    assert npu_compiler.load_ir(data) == npu_compiler.load_ir(mlp())


def test_row_027_weights_by_their_own_names() -> None:
    """With an empty mapping, nodes refer to weights by the names that the state_dict has."""
    data = mlp()
    names = data["weight_name_mapping"]
    for node in data["nodes"]:
        for t in node["inputs"]:
            t["name"] = names.get(t["name"], t["name"])
    data["weight_name_mapping"] = {}
    assert not npu_compiler.check(data) and len(npu_compiler.partition(data).partitions) == 1
    state = run_phases(npu_compiler.load_ir(data), "cpu", until="memory")
    assert state.schedule is not None and len(state.schedule.kernels) == len(kernels(mlp()))


# -- constraint checker -----------------------------------------------------------------------------------------------


def test_shapes_are_static() -> None:
    with pytest.raises(IRError, match="shape"):
        npu_compiler.load_ir(one_node(RELU, ("batch", 4)))  # type: ignore[arg-type]


def test_unsupported_ops_are_rejected_by_compile_and_listed() -> None:
    ir = Builder().node("o", ODD, "x").node("y", RELU, "o").out("y")
    with pytest.raises(CompileError, match="special_bessel_j1") as caught:
        npu_compiler.compile(ir)
    assert [(name, op) for name, op, _ in caught.value.reasons] == [("o", ODD)]
    assert caught.value.reasons == npu_compiler.check(ir)


@pytest.mark.parametrize(
    ("ir", "target", "rule"),
    [(one_node(RELU, dtype="float64"), "metal", "dtype"), (one_node(RELU, (1,) * 9), "cpu", "rank")],
    ids=["float64 on Metal", "rank 9"],
)
def test_row_030_compile_asks_the_constraint_checker(ir: dict[str, Any], target: str, rule: str) -> None:
    refused = npu_compiler.check(ir, target)
    assert [reason.rule for _, _, reason in refused] == [rule]
    with pytest.raises(CompileError) as caught:
        npu_compiler.compile(ir, target)
    assert caught.value.reasons == refused


def test_row_031_channels_are_not_padded_by_design(convnet: Compiled) -> None:
    """The documents pad channels to 64 bytes; here only weights are kept in panels of columns."""
    row = row_of("channel_alignment_bytes")
    row.check()
    assert "channels are not padded" in row.differs
    shapes = {b.shape[-1] for b in convnet.program.buffers if b.kind == "arena" and len(b.shape) == 4}
    assert shapes and shapes <= {3, 8}, "the model has 3 and 8 channels"


def test_row_032_the_advice_on_channels_is_true(convnet: Compiled) -> None:
    """A weight of 10 columns costs as much as its panel, and the packed weight really has that size."""
    panel = target_config.target_config("cpu").panel
    hints = {text for _, _, text in npu_compiler.explain(convnet.path).hints()}
    assert f"10 output channels cost as much as {panel}: its weights are kept in panels of {panel}" in hints
    assert not any("padded" in text for text in hints)
    packed = next(b for b in convnet.program.buffers if b.kind == "weight" and b.name == "fc.weight")
    assert packed.shape[-1] == panel and convnet.weights["fc.weight"].shape[0] == 10


def test_row_035_a_region_that_lost_its_body() -> None:
    """A rotary table is restored when the IR is read; is_op_supported() has no answer for regions in general."""
    ir = npu_compiler.load_ir(FILES / "qwen2_prefill.json")
    assert not any(n.op_type == "wrap_with_set_grad_enabled" for n in ir.nodes) and not npu_compiler.check(ir)
    assert not npu_compiler.is_op_supported("wrap_with_set_grad_enabled")
    row_of("wrap_with_set_grad_enabled").check()


def test_the_op_table_has_more_than_50_ops_and_all_that_are_listed() -> None:
    listed = """conv2d batch_norm relu max_pool2d adaptive_avg_pool2d matmul linear bmm add mul div neg silu pow rsqrt
    cos sin embedding transpose cat slice expand index_copy softmax mean reshape view alias detach to dropout"""
    supported = npu_compiler.get_supported_ops()
    assert isinstance(supported, frozenset) and len(supported) > 50
    assert not set(listed.split()) - {op.split(".")[1] for op in supported}
    assert npu_compiler.is_op_supported("<built-in function getitem>")
    assert npu_compiler.is_op_supported(CONV) and not npu_compiler.is_op_supported(ODD)


# -- optimisation and fusion ------------------------------------------------------------------------------------------


def test_batch_norm_is_folded_into_the_convolution(convnet: Compiled) -> None:
    fused = [k.sources for k in convnet.program.entry().calls if k.kind == "conv2d"]
    assert fused[0] == ("conv2d", "batch_norm", "relu"), "Conv+BN+ReLU is one kernel"
    read = {node.attrs["key"] for node in convnet.program.recipes.nodes if node.op == "weight"}
    assert "bn.running_var" in read, "statistics are recipes, which are evaluated when weights are loaded"


def test_residual_add_and_relu_are_one_kernel(convnet: Compiled) -> None:
    assert any({"add_", "relu__1"} <= set(k.sources) for k in convnet.program.entry().calls)
    alone = Builder(inputs=("x", "z")).node("s", ADD, "x", "z").node("y", RELU, "s").out("y")
    assert kernels(alone) == [("s", "y")]


def test_noops_are_eliminated() -> None:
    b = Builder().node("a", "aten.alias.default", "x").node("d", "aten.dropout.default", "a", p=0.5, train=False)
    ir = b.node("v", "aten.view.default", "d", size=[4, 4]).node("y", RELU, "v").out("y")
    assert kernels(ir) == [("y",)]


def test_in_place_ops_become_out_of_place(convnet: Compiled) -> None:
    x = convnet.x.copy()
    convnet.check(Executor(convnet.program, convnet.weights).run([x]))
    np.testing.assert_array_equal(x, convnet.x)


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("qwen2_prefill", {"pow_1", "mean", "add", "rsqrt", "mul_2", "mul_3"}),
        ("qwen2_prefill", {"linear_4", "linear_5", "silu", "mul_11"}),
        ("qwen2_prefill", {"add_3", "softmax"}),
        ("qwen2_prefill", {"matmul_1", "softmax", "matmul_2"}),
    ],
    ids=["RMSNorm", "SiLU and gate", "masked softmax", "attention with its transposed keys"],
)
def test_patterns_of_a_decoder_are_one_kernel(file: str, pattern: set[str]) -> None:
    assert any(pattern <= set(sources) for sources in kernels(FILES / f"{file}.json"))


def test_an_expanded_operand_is_broadcast_inside_the_kernel() -> None:
    b = Builder(inputs=("x", "row")).node("e", "aten.expand.default", "row", size=[4, 4])
    ir = b.node("y", ADD, "x", "e").out("y")
    assert len(kernels(ir)) == 1


def test_a_transpose_before_a_product_is_folded() -> None:
    b = Builder(inputs=("x", "w")).node("t", "aten.transpose.int", "w", dim0=0, dim1=1)
    ir = b.node("y", HEAVY, "x", "t").out("y")
    state = run_phases(ir, "cuda", until="schedule")
    assert state.schedule is not None and [k.kind for k in state.schedule.kernels] == ["gemm"]


@pytest.mark.parametrize("target", ["cuda", "metal"])
def test_a_chain_of_elementwise_ops_is_one_gpu_kernel(target: str) -> None:
    b = Builder(inputs=("x", "z")).node("s", "aten.silu.default", "x").node("m", "aten.mul.Tensor", "s", "z")
    state = run_phases(b.node("a", ADD, "m", "x").node("y", RELU, "a").out("y"), target, until="schedule")
    assert state.schedule is not None and [k.sources for k in state.schedule.kernels] == [("s", "m", "a", "y")]


@pytest.mark.parametrize(("op", "batch"), [("aten.matmul.default", ()), ("aten.bmm.default", (3,))])
@pytest.mark.parametrize("rows", [1, 64], ids=["vector", "tiles"])
def test_products_of_one_row_of_many_rows_and_of_batches(op: str, batch: tuple[int, ...], rows: int) -> None:
    ir = one_node(op, (*batch, rows, 32))
    x, y = ir["graph_inputs"][0], ir["graph_outputs"][0]
    w = {"name": "w", "shape": [*batch, 32, 16], "dtype": "float32"}
    ir["graph_inputs"].append(w)
    y["shape"] = [*batch, rows, 16]
    ir["nodes"][0] |= {"inputs": [x, w], "outputs": [y]}
    state = run_phases(npu_compiler.load_ir(ir), "cpu", until="schedule")
    assert state.schedule is not None
    # A matrix that is computed at run time is read once for a single row, so packing it would only cost time.
    kinds = [k.kind for k in state.schedule.kernels]
    assert "gemm" in kinds if rows > 1 else kinds == ["loops"]


def test_fusions_can_be_left_out_one_by_one() -> None:
    """The documented way to find a wrong fusion: disable all, verify, and enable one after the other."""
    fusions = [name for name in switches("cpu") if name.startswith("fuse")]
    counts = [len(kernels(mlp(), disable=tuple(fusions[n:]))) for n in range(len(fusions) + 1)]
    assert len(fusions) > 3 and counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


# -- code generation and the artifact ---------------------------------------------------------------------------------


def test_kernel_calls_have_names_sources_and_buffers(convnet: Compiled) -> None:
    ids = {b.id for b in convnet.program.buffers}
    calls = convnet.program.entry().calls
    assert calls and all(c.name and c.sources and ids.issuperset((*c.inputs, *c.outputs)) for c in calls)
    source = "\n".join(convnet.program.sources.values())
    assert all(f"// kind {c.kind}" in source for c in calls if c.kind != "loops")
    assert "stride_h = 2" in source, "parameters are constants of the source"


def test_npubin_is_msgpack_and_can_be_inspected(convnet: Compiled, tmp_path: Path) -> None:
    path = tmp_path / "convnet.npubin"
    convnet.program.save(path)
    body = msgpack.unpackb(path.read_bytes()[56:], strict_map_key=False)
    assert body["name"] == "convnet" and {"entries", "buffers", "weights", "recipes", "dtype"} <= set(body)
    text = CompiledProgram.load(path).describe()
    for part in ("6 kernels", "memory plan", "weight map", "compute dtype float32", "bn.running_mean"):
        assert part in text, f"describe() lists the {part}"


@pytest.mark.parametrize("target", ["cuda", "metal"])
def test_gpu_programs_are_generated_without_a_gpu(target: str) -> None:
    ir = Builder(weights=("w",)).node("p", HEAVY, "x", "p_w").node("y", RELU, "p").out("y")
    state = run_phases(ir, target, until="memory")
    assert state.schedule is not None
    emitted = targets.get_target(target).emit([state.schedule], build=False)
    assert emitted.sources and all(text.strip() for text in emitted.sources.values())


def test_row_050_the_dtype_is_that_of_the_ir_by_design(convnet: Compiled) -> None:
    """The documents convert float32 models to float16; here the caller asks for it."""
    assert convnet.program.dtype == "float32"
    row = row_of("program.compute_dtype")
    row.check()
    assert "float32 models stay float32" in row.differs
    for dtype in ("float16", "bfloat16"):
        state = run_phases(convnet.ir, "cpu", dtype, until="schedule")
        assert state.schedule is not None
        assert {o.dtype for k in state.schedule.kernels for o in k.outputs if o.buffer.kind == "arena"} == {dtype}
        stored = {value.dtype for name, value in state.recipes if "weight" in name and len(value.shape) > 2}
        assert stored == {dtype}, "recipes convert the weights when they are loaded"
    decoder = run_phases(npu_compiler.load_ir(FILES / "qwen2_decode_bf16.json"), "cpu", until="lower")
    assert "bfloat16" in {v.dtype for node in decoder.graph.nodes for v in node.outputs}, (
        "a bfloat16 model stays bfloat16"
    )


def test_row_053_a_code_generator_object_as_target(convnet: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (targets, target_config):
        monkeypatch.setattr(table, "_registered", {})

    asked: list[str] = []

    class Mine(CPUTarget):
        def supports(self, kernel: Any) -> Any:
            asked.append(kernel.name)
            return super().supports(kernel)

    mine = Mine()
    program = npu_compiler.compile(convnet.path, target=mine)
    assert program.target == "cpu" and asked, "the object generates the code"
    with pytest.raises(ConfigError, match=r"target is the class Mine: pass a name .* or an object"):
        npu_compiler.compile(convnet.path, target=Mine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "documented",
    [
        pytest.param("TargetConfig", id="row_054_target_config"),
        pytest.param("METAL_GPU", id="row_054_metal_gpu"),
        pytest.param("CUDA_GPU", id="row_054_cuda_gpu"),
        pytest.param("CodegenTarget", id="row_055_codegen_target"),
        pytest.param("ExecutionPlan", id="row_056_execution_plan"),
        pytest.param("BufferAllocation", id="row_056_buffer_allocation"),
        pytest.param("WeightTransformRecipe", id="row_056_weight_transform_recipe"),
        pytest.param("npu_compiler/graph_optimizer.py", id="row_058_graph_optimizer"),
        pytest.param("npu_compiler/fusion_patterns.py", id="row_058_fusion_patterns"),
        pytest.param("npu_compiler/codegen.py", id="row_058_codegen"),
        pytest.param("npu_compiler/op_support.py", id="row_058_op_support"),
    ],
)
def test_names_that_differ_by_design(documented: str) -> None:
    row_of(documented).check()
