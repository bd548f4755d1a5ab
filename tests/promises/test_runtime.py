"""The runtime: executors, backends, buffers, weights, the profiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import npu_compiler
from npu_compiler.support.errors import BackendError, InputError, WeightError
from npu_compiler.target_config import target_config
from npu_runtime import Backend, DAGExecutor, DeviceBuffer, EntryProfile, Executor, get_backend, load_weights

from ..support import cuda_gpu
from ..support.names_page import ROOT, row_of
from .compiled import Compiled


@pytest.fixture
def executor(convnet: Compiled) -> Executor:
    return Executor(convnet.program, convnet.weights, get_backend("cpu"))


def test_a_model_runs_without_torch(convnet: Compiled, tmp_path: Path) -> None:
    """IR -> .npubin -> executor; loading and running need neither PyTorch nor the compiler's passes."""
    convnet.program.save(tmp_path / "m.npubin")
    safetensors.numpy.save_file(convnet.weights, tmp_path / "m.safetensors")
    np.save(tmp_path / "x.npy", convnet.x)
    code = """if True:
        import sys, numpy as np, npu_runtime
        run = npu_runtime.load("m.npubin", weights="m.safetensors")
        np.save("y.npy", run(np.load("x.npy")))
        assert not {"torch", "npusim", "npu_compiler.pipeline"} & set(sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    convnet.check({"linear": np.load(tmp_path / "y.npy")})


def test_everything_expensive_happens_before_a_run(executor: Executor, convnet: Compiled) -> None:
    """run() looks buffers up and launches: it loads no entry, evaluates no recipe and compiles nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (npu_compiler, "compile"),
            (type(executor.backend), "load_entry"),
            (Executor, "load_weights"),
        ):
            patch.setattr(owner, name, None)
        outputs = [executor.run([convnet.x]) for _ in range(2)]
    convnet.check(outputs[0])
    np.testing.assert_array_equal(outputs[0]["linear"], outputs[1]["linear"])


def test_weights_come_from_safetensors_by_recipe(convnet: Compiled, tmp_path: Path) -> None:
    """Batch norm is folded, dtypes are converted and matrices are packed while the file is read."""
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file(convnet.weights, path)
    store = load_weights(convnet.program, path)
    assert len(store) == len(convnet.program.recipes.outputs) < len(convnet.weights)
    w, var = convnet.weights["blk.b1.weight"], convnet.weights["blk.b1.running_var"]
    shift = convnet.weights["blk.b1.bias"] - convnet.weights["blk.b1.running_mean"] * w / np.sqrt(var + 1e-5)
    folded = [b.to_numpy() for b in store.values() if b.shape == shift.shape and b.dtype == np.float32]
    assert any(np.allclose(array, shift, rtol=1e-5, atol=1e-6) for array in folded)
    convnet.check(Executor(convnet.program, store).run([convnet.x]))


def test_the_backend_contract(convnet: Compiled) -> None:
    backend = get_backend("cpu")
    assert isinstance(backend, Backend)
    buffer = backend.allocate_zeros((2, 3), np.dtype(np.float32), (2, 4))
    assert isinstance(buffer, DeviceBuffer) and buffer.dtype == np.float32
    assert (buffer.shape, buffer.alloc_shape, buffer.size_bytes) == ((2, 3), (2, 4), 32)
    assert buffer.native_handle and not buffer.to_numpy().any()
    backend.synchronize()
    outputs = backend.execute(convnet.program, [convnet.x], convnet.weights)
    convnet.check({name: value.to_numpy() for name, value in outputs.items()})


@pytest.mark.parametrize("name", ["row_079_metal_runtime", "row_080_mps_matmul"])
def test_metal_programs_have_not_run_on_a_mac_yet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for Metal compile everywhere; without pyobjc, making the backend says in one line what is missing."""
    monkeypatch.setitem(sys.modules, "Metal", None)
    with pytest.raises(BackendError, match=r"needs a Mac|pyobjc-framework-Metal is needed") as caught:
        get_backend("metal")
    assert "\n" not in str(caught.value)
    row = row_of("metal_backend.MetalBackend" if name.startswith("row_079") else "MPSMatrixMultiplication")
    row.check()
    assert "not run on a Mac yet" in row.differs or "own kernels" in row.differs


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
def test_row_088_dag_executor_on_cuda_and_the_host(convnet: Compiled) -> None:
    plan = npu_compiler.partition(convnet.ir, target="cuda", force_cpu=["max_pool2d"])
    assert {p.device for p in plan.partitions} == {"npu", "host"}
    convnet.check(DAGExecutor(plan, cuda_gpu.backend(), weights=convnet.weights).execute([convnet.x]))


def test_row_090_a_backend_has_a_device() -> None:
    """The number of the device, as PyTorch counts them; there is no class Device."""
    assert get_backend("cpu").device == 0
    row_of("Device").check()


def test_row_091_allocate_buffer_takes_a_spec(executor: Executor, convnet: Compiled) -> None:
    spec = executor.inputs[0]
    buffer = executor.backend.allocate_buffer(convnet.x.astype(np.float16), None, spec)
    assert buffer.dtype == np.float32 and executor.run([buffer])["linear"].shape == (2, 10)
    with pytest.raises(InputError, match=r"input 'x': shape \[3, 32, 32\], expected \[2, 3, 32, 32\]"):
        executor.backend.allocate_buffer(convnet.x[0], spec=spec)


def test_row_092_an_executor_before_its_weights(convnet: Compiled) -> None:
    """The documented way to run a program, typed literally."""
    inputs, weights, program = {"x": convnet.x}, convnet.weights, convnet.program
    backend = get_backend("cpu")
    executor = backend.create_executor(program)
    with pytest.raises(WeightError, match=r"run\(inputs, weights\)"):
        executor.run(inputs)
    outputs = executor.run(inputs, weights)
    convnet.check(outputs)


@pytest.mark.parametrize("order", ["Executor(program, device)", "load_weights(weights, program, device)"])
def test_rows_096_and_103_arguments_in_the_documented_order(convnet: Compiled, order: str) -> None:
    backend = get_backend("cpu")
    with pytest.raises(WeightError, match=r"arguments are \(program, weights, backend\), got"):
        if order.startswith("Executor"):
            Executor(convnet.program, backend)
        else:
            load_weights(convnet.weights, convnet.program, backend)  # type: ignore[arg-type]
    row_of(order).check()


def test_a_model_is_not_a_plan(convnet: Compiled) -> None:
    with pytest.raises(InputError, match=r"npu_compiler\.partition\(ir\) makes a plan"):
        DAGExecutor(convnet.ir)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_row_101_half_precision_checkpoints_of_a_float32_model(convnet: Compiled, dtype: type) -> None:
    half = {k: v.astype(dtype) for k, v in convnet.weights.items()}
    wide = {k: v.astype(np.float32) for k, v in half.items()}
    results = [Executor(convnet.program, w).run([convnet.x])["linear"] for w in (half, wide)]
    np.testing.assert_array_equal(*results)


def test_row_102_weights_are_padded_to_panels(convnet: Compiled) -> None:
    """The documents pad channels to 64 elements; here the columns of a weight are padded to a panel with zeros."""
    store = load_weights(convnet.program, convnet.weights)
    packed, columns = store["fc.weight"].to_numpy(), len(convnet.weights["fc.weight"])
    assert packed.shape[-1] == target_config("cpu").panel > columns
    assert packed[..., :columns].any() and not packed[..., columns:].any()
    row_of("channel_alignment_bytes").check()


def test_kernels_are_timed(executor: Executor, convnet: Compiled) -> None:
    profile = executor.profile([convnet.x], runs=2, warmup=0)
    assert isinstance(profile, EntryProfile) and [r.name for r in profile.rows] == [
        c.name for c in executor.entry.calls
    ]
    assert profile.seconds > 0 and all(r.seconds >= 0 for r in profile.rows)


@pytest.mark.parametrize(
    "documented",
    [
        pytest.param("cublasGemmEx", id="row_085_cublas"),
        pytest.param("cuda_compiler/cuda_codegen.py", id="row_087_cuda_compiler"),
        pytest.param("cuda_runtime/cuda_backend.py", id="row_087_cuda_runtime"),
        pytest.param("DeviceBuffer.to_numpy(spec)", id="row_094_to_numpy"),
        pytest.param("NPUBuffer.from_numpy(data, spec)", id="row_094_from_numpy"),
        pytest.param("NPUBuffer.zeros(shape)", id="row_094_zeros"),
        pytest.param("NPUBuffer", id="row_095_npu_buffer"),
        pytest.param("DispatchStrategy", id="row_104_dispatch_strategy"),
    ],
)
def test_names_that_differ_by_design(documented: str) -> None:
    row_of(documented).check()
