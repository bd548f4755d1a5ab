"""Whole models: a decoder with its caches, a model with parts on the host, a network for images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.partitioning.plan import HOST
from npu_compiler.pipeline import compile_graph
from npu_runtime import CPUBackend, Executor, MixedModel, load_weights
from npu_runtime.backends.metal import MetalBackend
from npu_runtime.llm.loader import Loader
from npu_runtime.llm.model import LLM
from npu_runtime.packed_weights import read_packed, write_packed

from ...conformance.cases import cases_for, check, compile_cases
from ...llm import small_model
from ...models.gate import compile_and_run, expect
from ...models.random_models import image_model, images
from ...support import metal_api
from ...support.sweeps import FULL

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(21)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.write_model(tmp_path_factory.mktemp("models") / "small", num_hidden_layers=1)


def decoder(folder: Path, backend: CPUBackend | MetalBackend) -> LLM:
    compiled, weights, manifest = Loader(backend.name, None, 64, backend, False).compile(folder)
    return LLM(compiled, weights, manifest, backend)


def answer(llm: LLM, **options: float) -> list[int]:
    return [t.id for t in llm.generate(PROMPT, max_tokens=20, ignore_eos=True, **options)]  # type: ignore[arg-type]


def test_a_decoder_says_what_the_cpu_says(
    device: metal_api.Device, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks, then tokens that the GPU feeds into the next step while the host reads the last one. The CPU
    target is tested against PyTorch."""
    cpu, backend = decoder(folder, CPUBackend()), MetalBackend()
    metal = decoder(folder, backend)
    assert {"greedy", "sample"} <= metal.program.entries.keys()
    assert answer(metal) == answer(cpu)
    assert answer(metal) == answer(cpu)  # with the caches of the first answer
    sampled = {"temperature": 0.7, "top_k": 5, "seed": 3}
    assert answer(metal, **sampled) == answer(cpu, **sampled)
    with (tmp_path / "packed").open("wb") as file:
        write_packed(file, "key", metal.weights, metal.program)
    stored = read_packed((tmp_path / "packed").open("rb"), "key", backend).store(metal.program)
    assert answer(LLM(metal.program, stored, metal.manifest, backend)) == answer(cpu)
    used = [id(made) for made in device.indirect]
    monkeypatch.setenv("NPU_METAL_INDIRECT", "0")
    assert answer(LLM(metal.program, stored, metal.manifest, MetalBackend())) == answer(cpu)
    assert len(used) >= 3 and {id(made) for made in device.indirect} <= set(used)


def test_a_model_with_parts_on_the_host(device: metal_api.Device) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x).double().sin().float() @ x

    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    plan = npu_compiler.partition(capture(Wide(), (x,)), target="metal")
    assert sum(p.device != HOST for p in plan.partitions) == 2 and any(p.device == HOST for p in plan.partitions)
    mixed = npu_compiler.compile_plan(plan, "metal")
    assert isinstance(mixed, MixedProgram)
    model = MixedModel(mixed, None, MetalBackend())
    for scale in (1.0, 0.5):
        torch.testing.assert_close(model(scale * x), Wide()(scale * x))


def test_states(device: metal_api.Device) -> None:
    """Buffers that a run reads and overwrites, two of which change places."""

    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(3))
            self.register_buffer("b", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.a + x, self.b * 2
            self.a.copy_(b)
            self.b.copy_(a)
            return a - b

    model, x = Swap(), torch.tensor([1.0, 2.0, 3.0])
    program = npu_compiler.compile(capture(model, (x,)), target="metal")
    executor = MetalBackend().create_executor(program, {k: v.numpy().copy() for k, v in model.state_dict().items()})
    first = [executor.run([x])[executor.outputs[0].name] for _ in range(3)]
    executor.reset()
    again = [executor.run([x])[executor.outputs[0].name] for _ in range(3)]
    with torch.no_grad():
        wanted = [model(x).numpy() for _ in range(3)]
    np.testing.assert_array_equal(first, wanted)
    np.testing.assert_array_equal(again, wanted)


def test_resnet(device: metal_api.Device) -> None:
    model, runs = image_model("resnet18" if FULL else "two_stages", 32), [(images(2, 32),)]
    wanted = expect(model, runs, "float32")
    found = compile_and_run(model, runs, "float32", MetalBackend())
    wanted.check(found)
    wanted.check_ranking(found)


def test_samples_of_operators(device: metal_api.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of every fourth overload, in one program; with ``NPU_CONFORMANCE=full`` of every one."""
    first = {case.op_type: case for case in reversed(cases_for("metal"))}
    batch = compile_cases(list(first.values())[:: 1 if FULL else 4])
    assert len(batch.outputs) > 60 and not batch.failed
    program, backend = compile_graph(batch.graph, "metal"), MetalBackend()
    executor = Executor(program, load_weights(program, {}, backend), backend)
    inputs = {k: np.array(v, order="C") for k, v in batch.inputs.items()}
    results = executor.run(inputs)
    monkeypatch.setenv("NPU_METAL_INDIRECT", "0")
    again = Executor(program, load_weights(program, {}, backend), backend).run(inputs)
    assert all(np.array_equal(results[n], again[n], equal_nan=results[n].dtype.kind in "fV") for n in results)
    for case, names in batch.outputs.items():
        check(case, [results[n] for n in names], batch.summing[case])
