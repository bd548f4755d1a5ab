"""On an NVIDIA GPU: models against the error gate, language models against the CPU, memory, interchange, failures.

``pytest -m cuda`` runs these and the conformance suite on the GPU; without one they are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
import npu_runtime
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.partitioning.plan import HOST
from npu_compiler.support.errors import BackendError, InputError
from npu_compiler.support.progress import listening
from npu_runtime import DAGExecutor, Executor, load_weights
from npu_runtime.backends.cuda import CUDABackend, CUDABuffer
from npusim import LLM
from npusim.cli import main
from npusim.models.download import RegistryUnavailable

from ...llm import small_model
from ...models.gate import compile_and_run, expect
from ...models.random_models import image_model, images, randomise
from ...models.test_real_weights import check_resnet50
from ...support import cuda_gpu

pytestmark = cuda_gpu.marks()
ROOT = Path(__file__).parents[3]


@pytest.fixture
def gpu() -> CUDABackend:
    return cuda_gpu.backend()


# ------------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_image_models_pass_the_gate(gpu: CUDABackend, name: str, dtype: str) -> None:
    model, runs = image_model(name, 64), [(images(8, 64, seed),) for seed in range(2)]
    wanted = expect(model, runs, dtype)
    found = compile_and_run(model, runs, dtype, gpu)
    wanted.check(found)
    wanted.check_ranking(found)
    np.testing.assert_array_equal(found[0], compile_and_run(model, runs, dtype, gpu)[0])


@pytest.mark.network
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_resnet50_gives_the_golden_probabilities(gpu: CUDABackend, dtype: str) -> None:
    check_resnet50(dtype, gpu)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from small_model.own_cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_llama_says_what_it_says_on_the_cpu(tmp_path: Path, cache: Path, dtype: str) -> None:
    path = small_model.write_model(tmp_path / "small", torch_dtype=dtype)
    here, there = (LLM.load(path, target=t, max_len=200) for t in ("cpu", "cuda"))
    assert sorted(there._runs) == [1, 128]
    prompt = [(7 * i * i + 3 * i) % 256 for i in range(150)]
    a, b = here.logits(prompt, 140).astype(np.float64), there.logits(prompt, 140).astype(np.float64)
    assert np.sqrt(np.mean((a - b) ** 2)) <= {"float32": 2e-6, "bfloat16": 2e-2}[dtype] * np.sqrt(np.mean(a**2))
    if dtype == "float32":
        answers = [m.generate(prompt[:40], max_tokens=60, ignore_eos=True, stream=False).tokens for m in (here, there)]
        assert answers[0] == answers[1]


@pytest.mark.network
@pytest.mark.parametrize(("name", "prompt"), [("tinystories-15m", [1]), ("smollm2-135m", "The capital of France is")])
def test_real_language_models_say_what_they_say_on_the_cpu(name: str, prompt: list[int] | str) -> None:
    try:
        models = [LLM.load(name, target=t, dtype="float32", max_len=256, cache=False) for t in ("cpu", "cuda")]
    except RegistryUnavailable as error:
        pytest.skip(str(error))
    texts = [m.generate(prompt, max_tokens=40, stream=False).text for m in models]
    assert texts[0] == texts[1] and len(texts[0]) > 40


def test_the_second_start_neither_compiles_nor_packs(tmp_path: Path, cache: Path) -> None:
    path = small_model.write_model(tmp_path / "small", seed=3)
    answers, said = [], []
    for _ in range(2):
        told: list[str] = []
        with listening(lambda step, told=told: told.append(step.text)):
            llm = LLM.load(path, target="cuda", max_len=160)
        answers.append(llm.generate("hello", max_tokens=20, ignore_eos=True, stream=False).tokens)
        said.append(told)
    assert answers[0] == answers[1] and any("compiling" in line for line in said[0]) and not said[1]


def test_loading_a_program_calls_no_compiler(tmp_path: Path) -> None:
    """In a process of its own: neither the compiler's module nor NVRTC's library gets loaded."""
    model = small_model.write_model(tmp_path / "small")
    program = tmp_path / "small.npubin"
    assert main(["compile", str(model), "--target", "cuda", "--max-len", "160", "-o", str(program), "-q"]) == 0
    code = f"""
        import sys
        from npusim import LLM
        llm = LLM.load({str(program)!r}, target="cuda")
        assert len(llm.generate("hello", max_tokens=4, ignore_eos=True, stream=False).tokens) == 4
        assert "torch" not in sys.modules and "npu_compiler.targets.cuda.nvrtc" not in sys.modules
        assert "libnvrtc" not in open("/proc/self/maps").read(), "NVRTC is loaded"
    """
    child(code)


def test_the_command_line_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(small_model.write_model(tmp_path / "small"))
    texts = []
    for target in ("cpu", "cuda"):
        assert main(["generate", model, "--target", target, "-p", "hello", "--max-tokens", "20", "-q"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 5


# ---------------------------------------------------------------------------------------------- memory and interchange
class Small(nn.Module):
    """A convolution, a norm over rows, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3, stride=2), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.relu(self.conv(x)).mean((2, 3))))


def compiled(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, CompiledProgram]:
    torch.manual_seed(0)
    model = randomise(Small()).to(dtype)
    return model, npu_compiler.compile(capture(model, (images(2, 16).to(dtype),)), target="cuda")


def executor(gpu: CUDABackend, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Executor]:
    model, program = compiled(dtype)
    return model, Executor(program, load_weights(program, state_dict_numpy(model), gpu), gpu)


def test_runs_allocate_nothing(gpu: CUDABackend) -> None:
    _, run = executor(gpu)
    source, target = gpu.allocate_buffer(images(2, 16).numpy()), gpu.allocate_zeros((2, 5), np.dtype(np.float32))
    bound = run.bind([source], [target])
    bound()
    bound.finish()
    pool, memory = gpu.cupy.get_default_memory_pool(), gpu.cupy.cuda.runtime.memGetInfo
    before = pool.used_bytes(), pool.total_bytes(), memory()
    for _ in range(100):
        bound()
    bound.finish()
    assert (pool.used_bytes(), pool.total_bytes(), memory()) == before
    assert np.abs(target.to_numpy()).max() > 0


def test_profile_gives_every_kernel_its_time(gpu: CUDABackend) -> None:
    _, run = executor(gpu)
    for _ in range(2):  # the second profile has inputs elsewhere
        profile = run.profile(runs=5)
        assert len(profile.rows) == len(run.entry.calls) and all(0 < r.seconds < 0.1 for r in profile.rows)
        assert (np.diff(profile.times, axis=1) > 0).all() and (profile.times[:, 0] == 0).all()
        assert (profile.whole > 0).all()
    assert gpu.bandwidth == 0 or 1e11 < gpu.bandwidth < 1e14


def test_arrays_of_other_libraries_in_and_out(gpu: CUDABackend) -> None:
    """CuPy arrays and PyTorch's tensors are used where they are; results are theirs without a copy."""
    model, run = executor(gpu)
    x = images(2, 16)
    with torch.no_grad():
        wanted = model(x).numpy()
    theirs = gpu.cupy.asarray(x.numpy())
    adopted = gpu.adopt(theirs)
    assert adopted is not None and adopted.native_handle == theirs.data.ptr
    (result,) = run.run_device([theirs]).values()
    assert isinstance(result, CUDABuffer)
    np.testing.assert_allclose(result.to_numpy(), wanted, rtol=1e-5, atol=1e-5)
    view = gpu.cupy.asarray(result)
    assert view.data.ptr == result.native_handle
    np.testing.assert_array_equal(gpu.cupy.asnumpy(view), result.to_numpy())
    shared = gpu.cupy.from_dlpack(result)
    assert shared.data.ptr == result.native_handle and shared.shape == (2, 5)
    into = gpu.cupy.empty((2, 5), np.float32)
    run.run_into([theirs], [into])
    np.testing.assert_array_equal(gpu.cupy.asnumpy(into), result.to_numpy())
    assert gpu.adopt(x.numpy()) is None and gpu.adopt(theirs[:, :, ::2]) is None
    with pytest.raises(InputError, match="bind buffers of the backend"):
        run.run_into([x.numpy()], [np.empty((2, 5), np.float32)])
    with pytest.raises(InputError, match=r"expected float32\[2, 3, 16, 16\]"):
        run.run([theirs[:1]])


class OnlyDLPack:
    """An array that tells of itself through DLPack alone."""

    def __init__(self, array: object):
        self._array = array

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()  # type: ignore[attr-defined]


def test_dlpack_in(gpu: CUDABackend) -> None:
    array = gpu.cupy.arange(6, dtype=np.float32).reshape(2, 3)
    adopted = gpu.adopt(OnlyDLPack(array))
    assert adopted is not None and adopted.native_handle == array.data.ptr and adopted.shape == (2, 3)


def test_a_model_that_runs_in_part_on_the_host(gpu: CUDABackend, tmp_path: Path) -> None:
    model, x = randomise(Small()), images(2, 16)
    plan = npu_compiler.partition(capture(model, (x,)), target="cuda", force_cpu=["aten.relu.default"])
    assert [p.device for p in plan.partitions].count(HOST) == 1 and len(plan.partitions) == 3
    run = DAGExecutor(plan, gpu, weights=state_dict_numpy(model))
    with torch.no_grad():
        wanted = model(x).numpy()
    for value in (x.numpy(), x, gpu.cupy.asarray(x.numpy()), gpu.allocate_buffer(x.numpy())):
        (result,) = run.execute([value]).values()
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    npu_compiler.compile_plan(plan, "cuda").save(tmp_path / "small.npubin")
    loaded = npu_runtime.load(tmp_path / "small.npubin", state_dict_numpy(model))
    np.testing.assert_allclose(loaded(x.numpy()), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pytorch_tensors_on_the_gpu(gpu: CUDABackend, dtype: torch.dtype) -> None:
    model, run = executor(gpu, dtype)
    x = images(2, 16).to(dtype)
    theirs = x.cuda()
    (result,) = run.run_device([theirs]).values()
    back = torch.from_dlpack(result)
    assert back.is_cuda and back.data_ptr() == result.native_handle and back.dtype == dtype
    with torch.no_grad():
        wanted = model(x).float()
    np.testing.assert_allclose(back.cpu().float().numpy(), wanted.numpy(), rtol=3e-2, atol=3e-2)
    into = torch.empty((2, 5), dtype=dtype, device="cuda")
    run.run_into([theirs], [into])
    torch.testing.assert_close(into, back, rtol=0, atol=0)


def test_threads_take_turns(gpu: CUDABackend) -> None:
    """Runs from threads that never touched the GPU before."""
    _, run = executor(gpu)
    inputs = [images(2, 16, seed).numpy() for seed in range(4)]
    wanted = [next(iter(run.run([x]).values())) for x in inputs]
    found: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        for _ in range(10):
            found[i] = next(iter(run.run([inputs[i]]).values()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, expected in enumerate(wanted):
        np.testing.assert_array_equal(found[i], expected)


# ----------------------------------------------------------------------------------------------------------- failures
def test_an_index_out_of_range_names_the_kernel(gpu: CUDABackend) -> None:
    class Pick(nn.Module):
        def forward(self, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(at, table)

    table, at = torch.arange(12.0).reshape(4, 3), torch.tensor([1, 3])
    run = Executor(npu_compiler.compile(capture(Pick(), (table, at)), target="cuda"), None, gpu)
    with pytest.raises(InputError, match="an index is out of range in kernel"):
        run.run([table.numpy(), np.array([1, 4])])
    (result,) = run.run([table.numpy(), at.numpy()]).values()
    np.testing.assert_array_equal(result, table[at])


def test_a_division_by_zero_names_the_kernel(gpu: CUDABackend) -> None:
    class Divide(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(a, 0) // b

    a, b = torch.arange(6), torch.tensor([1, 2, 3, -1, 5, 6])
    run = Executor(npu_compiler.compile(capture(Divide(), (a, b)), target="cuda"), None, gpu)
    with pytest.raises(InputError, match="an integer is divided by zero in kernel"):
        run.run([a.numpy(), np.zeros(6, np.int64)])
    (result,) = run.run([a.numpy(), b.numpy()]).values()
    np.testing.assert_array_equal(result, torch.cumsum(a, 0) // b)


def test_out_of_memory_is_an_error_and_no_more(gpu: CUDABackend) -> None:
    with pytest.raises(BackendError, match=r"the GPU has no memory for \d+ bytes .* of \d+ bytes are free"):
        gpu.allocate_empty((1 << 42,), np.dtype(np.uint8))
    model, run = executor(gpu)
    (result,) = run.run([images(2, 16).numpy()]).values()
    with torch.no_grad():
        np.testing.assert_allclose(result, model(images(2, 16)).numpy(), rtol=1e-5, atol=1e-5)


def test_bench_waits_for_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A launch takes microseconds, this run more than that."""
    path = tmp_path / "r.npubin"
    npu_compiler.compile(capture(image_model("resnet18", 64), (images(8, 64),)), target="cuda").save(path)
    assert main(["bench", str(path), "--seconds", "0.2", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["results"]["npusim"]
    assert times["p50_ms"] > 0.04


def test_a_launch_that_is_refused_names_the_kernel(gpu: CUDABackend) -> None:
    model, program = compiled()
    plain = msgpack.unpackb(program.binary)
    plain["entries"][program.entries["main"].symbol][-1][2] = 4096  # threads of a group
    broken = replace(program, binary=msgpack.packb(plain))
    name = program.entries["main"].calls[-1].name
    with pytest.raises(BackendError, match=rf"launching kernel {name} \(\w+\) of program 'Small' failed"):
        Executor(broken, load_weights(program, state_dict_numpy(model), gpu), gpu)
    (result,) = Executor(program, state_dict_numpy(model), gpu).run([images(2, 16).numpy()]).values()
    assert np.isfinite(result).all()


def test_there_is_no_such_gpu() -> None:
    with pytest.raises(BackendError, match="there is no GPU number 99"):
        CUDABackend(99)


def child(code: str, status: int = 0, **environment: str) -> str:
    """Run in a process of its own, which ends with ``status``; its standard output."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout


FAILING = "from tests.targets.cuda.failing_kernel import main; main()"


def test_a_kernel_that_fails_costs_the_gpu_but_not_the_process() -> None:
    first, second, works = child(FAILING).splitlines()
    assert "running 'main' of program 'Small' failed: a kernel read or wrote outside of its memory" in first
    for line in (first, second):
        assert "this process cannot use the GPU any more: start it again, or go on with the cpu target" in line
    assert works == "True"


def test_kernels_one_by_one_name_the_one_that_failed() -> None:
    first = child(FAILING, NPU_DEBUG="2").splitlines()[0]
    _, program = compiled()
    assert f"kernel {program.entries['main'].calls[-1].name} (" in first and "of program 'Small' failed" in first


def test_a_process_killed_in_a_run_disturbs_no_other(gpu: CUDABackend) -> None:
    code = """
        import os, signal
        from tests.targets.cuda.test_gpu import cuda_gpu, executor, images
        gpu = cuda_gpu.backend()
        _, run = executor(gpu)
        bound = run.bind([gpu.allocate_buffer(images(2, 16).numpy())], [gpu.allocate_zeros((2, 5), "float32")])
        for _ in range(1000):
            bound()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child(code, -signal.SIGKILL)
    model, run = executor(gpu)
    (result,) = run.run([images(2, 16).numpy()]).values()
    with torch.no_grad():
        np.testing.assert_allclose(result, model(images(2, 16)).numpy(), rtol=1e-5, atol=1e-5)
