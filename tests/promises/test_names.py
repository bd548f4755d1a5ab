"""Names and files of the descriptions, as written there: each exists, or the table of docs/names.md has it."""

from __future__ import annotations

import pytest

from ..support.names_page import ROOT, resolve, row_of

SAME_NAME = """
npu_compiler.compile npu_compiler.partition npu_compiler.is_op_supported npu_compiler.get_supported_ops
npu_compiler.ir_reader.load_ir npu_compiler.ir_reader.load_ir_from_dict npu_compiler.ir_reader.TensorSpec
npu_compiler.compiled_program.CompiledProgram npu_compiler.compiled_program.CompiledProgram.save
npu_compiler.compiled_program.CompiledProgram.load npu_compiler.compiled_program.CompiledProgram.describe
npu_compiler.partitioner.partition npu_compiler.partitioner.Partition npu_compiler.partitioner.TransferOp
npu_compiler.partitioner.PartitionPlan npu_compiler.target_config.TargetConfig
npu_runtime.executor.Executor npu_runtime.weight_loader.load_weights npu_runtime.profiler.KernelProfile
npu_runtime.Backend.create_executor npu_runtime.Backend.allocate_buffer npu_runtime.Backend.allocate_zeros
npu_runtime.Backend.execute npu_runtime.Backend.synchronize npu_runtime.Backend.device npu_runtime.DeviceBuffer.shape
npu_runtime.DeviceBuffer.alloc_shape npu_runtime.DeviceBuffer.dtype npu_runtime.DeviceBuffer.size_bytes
npu_runtime.DeviceBuffer.native_handle npu_runtime.DeviceBuffer.to_numpy npu_runtime.DAGExecutor.load_weights
npu_runtime.DAGExecutor.execute npu_runtime.execute_cpu_partition npu_runtime.MetalBackend npu_runtime.CUDABackend
""".split()

FILES = """
npu_compiler/ir_reader.py npu_compiler/constraint_checker.py npu_compiler/graph_optimizer.py
npu_compiler/fusion_patterns.py npu_compiler/codegen.py npu_compiler/codegen_core.py npu_compiler/codegen_ops.py
npu_compiler/codegen_fused.py npu_compiler/compiled_program.py npu_compiler/op_support.py npu_compiler/partitioner.py
npu_compiler/target_config.py
npu_runtime/backend.py npu_runtime/metal_backend.py npu_runtime/device.py npu_runtime/buffer.py npu_runtime/executor.py
npu_runtime/dag_executor.py npu_runtime/cpu_fallback.py npu_runtime/weight_loader.py npu_runtime/profiler.py
npu_runtime/_mps_accel.py
cuda_compiler/op_classify.py cuda_compiler/op_support.py cuda_compiler/subgraph_analyzer.py
cuda_compiler/cuda_codegen.py cuda_compiler/cuda_templates.py cuda_compiler/cuda_program.py
cuda_compiler/buffer_planner.py cuda_runtime/cuda_backend.py cuda_runtime/cuda_executor.py metal_kernels/*.metal
tests/test_kernels.py tests/test_extended_kernels.py tests/test_compiler.py tests/test_extensibility.py
tests/test_fusion_correctness.py tests/test_runtime.py tests/test_dag_executor.py
examples/run_qwen_graph.py docs/operators.md
""".split()


@pytest.mark.parametrize("path", SAME_NAME)
def test_names_that_are_the_same_here(path: str) -> None:
    assert resolve(path) is not None


@pytest.mark.parametrize("path", FILES)
def test_files_are_where_they_were_or_in_the_table(path: str) -> None:
    if not (ROOT / path).is_file():
        row_of(path).check()


@pytest.mark.parametrize(
    "documented",
    [
        "partition(ir_dict, is_supported_fn)",
        "create_executor(program)",
        "compile(…, target=CudaCodegenTarget())",
        "program.model_name",
        "program.kernel_calls",
        "program.input_specs",
        "program.output_specs",
        "program.compute_dtype",
        "Partition.target",
        "Partition.partition_id",
        "Partition.input_names",
        "TransferOp.direction",
        "TransferOp.tensor_names",
        "plan.original_ir",
        "load_weights(weights, program, device)",
        "Executor(program, device)",
        "DeviceBuffer.to_numpy(spec)",
        "NPUBuffer.from_numpy(data, spec)",
        "NPUBuffer.zeros(shape)",
        "NPUBuffer",
        "Device",
        "execute_cpu_partition(nodes, pool, weights)",
        "check_constraints(graph)",
        "op_support.get_supported_ops",
        "profile(executor, inputs, weights)",
        "compile_graph(graph)",
        "generate_execution_plan",
        "DispatchStrategy",
        "CUDA_GPU",
        "METAL_GPU",
        "HANDLED_OPS",
        "USE_BFLOAT",
        "find_fusion_groups",
    ],
)
def test_names_that_differ_are_in_the_table(documented: str) -> None:
    row_of(documented).check()
