"""The worked examples of ``docs/porting.md`` in use: a target with its backend, and a weight format, from outside of
this package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from npu_compiler import capture, partition, target_config, targets
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend.tensors import state_dict_numpy
from npu_compiler.partitioning import constraint_checker
from npu_compiler.pipeline import compile_graph, compile_ir
from npu_compiler.support.errors import ConfigError
from npu_compiler.weights import format as registry
from npu_compiler.weights.format import register_format
from npu_runtime import DAGExecutor, Executor, get_backend, load_weights
from npu_runtime.llm.loader import Loader
from npu_runtime.llm.model import LLM
from npu_runtime.registry import _registered, register_backend

from ..conformance.cases import cases_for, check, compile_cases
from ..llm import small_model
from ..models.gate import compile_and_run, expect, run
from ..models.random_models import images, randomise
from .backend import HostBackend
from .rows8 import FORMAT
from .target import CXX, TARGET, FirstStage, HostTarget

pytestmark = pytest.mark.skipif(CXX is None, reason="g++ is not installed")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The two calls that make it known; undone for other tests."""
    with pytest.MonkeyPatch.context() as patch:
        for table in (target_config._registered, targets._registered, _registered):
            patch.setitem(table, "host", None)  # what was there before is put back
        targets.register_target(TARGET)
        register_backend("host", HostBackend)
        yield


def test_operators_of_every_family_conform() -> None:
    """Three cases of each file of operators, in one program."""
    families: dict[str, list] = {}
    for case in cases_for("host"):
        chosen = families.setdefault(case.family, [])
        if len(chosen) < 3 and case.op_type not in {c.op_type for c in chosen}:
            chosen.append(case)
    batch = compile_cases([case for chosen in families.values() for case in chosen])
    assert len(families) > 15 and not batch.failed
    program = compile_graph(batch.graph, "host")
    run = Executor(program, load_weights(program, {}, get_backend("host")), get_backend("host"))
    results = run.run({k: np.array(v, order="C") for k, v in batch.inputs.items()})
    for case, names in batch.outputs.items():
        check(case, [results[n] for n in names], batch.summing[case])


def test_products_of_integers_on_the_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two activations: the right one is transposed first, and the epilogue subtracts the zero point of the left."""
    config, dialect = HostTarget.config, HostTarget.dialect
    config = replace(config, matrix_dtypes=(*config.matrix_dtypes, "uint8"))
    monkeypatch.setattr(HostTarget, "config", config)
    monkeypatch.setitem(target_config._registered, "host", config)
    monkeypatch.setattr(HostTarget, "dialect", replace(dialect, matrix_types=(*dialect.matrix_types, "uint8")))
    batch = compile_cases([case for case in cases_for("host") if case.op_type == "aten._int_mm.default"])
    program = compile_graph(batch.graph, "host")
    assert len(batch.outputs) > 3 and "(DEVICE const u8s8*)" in program.sources["kernels.cpp"]
    run = Executor(program, load_weights(program, {}, get_backend("host")), get_backend("host"))
    results = run.run({k: np.array(v, order="C") for k, v in batch.inputs.items()})
    for case, names in batch.outputs.items():
        check(case, [results[n] for n in names], batch.summing[case])


def test_settings_take_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_TARGET", "host")
    assert target_config.default_target() == "host"
    monkeypatch.setenv("NPU_TARGET", "ghost")
    with pytest.raises(ConfigError, match=r"'ghost'.*cpu, cuda, metal, host"):
        target_config.default_target()


def test_a_port_starts_with_loops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no kernel yet runs on the host, and the plan says so; the rest runs on the new target."""
    for table in (target_config._registered, targets._registered):
        monkeypatch.setitem(table, "host", None)  # what was there before is put back
    targets.register_target(FirstStage())
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 10), nn.Softmax(-1)
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 16, 16)
    ir = capture(model, (x,))
    plan = partition(ir, target="host", minimise_transfers=False)
    ops = {n.name: n.op_type for n in ir.nodes}
    assert {ops[n]: r.detail for n, r in plan.reasons.items()} == {
        "aten.conv2d.default": "no conv2d kernel yet",
        "aten.linear.default": "no gemm kernel yet",
    }
    assert {name: reason for name, _, reason in constraint_checker.check(ir, "host")} == plan.reasons
    out = DAGExecutor(plan, HostBackend(), weights=model.state_dict()).execute([x])
    np.testing.assert_allclose(*out.values(), model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_convolutional_model_passes_the_gate(dtype: str) -> None:
    layers = nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.MaxPool2d(2), nn.Flatten()
    torch.manual_seed(0)
    model, runs = randomise(nn.Sequential(*layers, nn.Linear(24 * 6 * 6, 10)), images(8, 32)), [(images(4, 32),)]
    expect(model, runs, dtype).check(compile_and_run(model, runs, dtype, HostBackend()))


def test_a_language_model_says_what_it_says_on_the_cpu(tmp_path: Path) -> None:
    path = small_model.write_model(tmp_path / "small")
    loader = Loader("host", None, 64, None, False)
    program, weights, manifest = loader.compile(path)
    program.save(tmp_path / "small.npubin")
    there = LLM(CompiledProgram.load(tmp_path / "small.npubin"), weights, manifest)
    here = LLM.load(path, max_len=64, cache=False)
    answers = [m.generate("hello", max_tokens=30, ignore_eos=True, stream=False).tokens for m in (here, there)]
    assert answers[0] == answers[1] and there.program.target == "host"


# -- the weight format ------------------------------------------------------------------------------------------------
def test_a_weight_format_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated MLP on the CPU, within the error gate of what ``decode`` says."""
    monkeypatch.setitem(registry._registered, "rows8", FORMAT)
    register_format(FORMAT)
    torch.manual_seed(0)
    model, runs = nn.Sequential(nn.Linear(96, 256), nn.SiLU(), nn.Linear(256, 40)).eval(), [(torch.randn(64, 96),)]
    ir = capture(model, runs[0])
    program = compile_ir(ir, "cpu", weights="rows8")
    weights = state_dict_numpy(model)
    for layer in (model[0], model[2]):
        w = layer.weight.detach().numpy()
        layer.weight.data = torch.from_numpy(FORMAT.decode(FORMAT.encode(w), w.shape[1]))
    assert [b.format for b in program.buffers if b.format] == ["rows8.panels"] * 2
    assert "struct rows8" in program.sources["kernels_0.cpp"]  # the sources can be compiled anywhere
    expect(model, runs, "float32").check(run(program, weights, runs))


def test_a_language_model_in_a_weight_format_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the model whose matrices are the decoded ones."""
    monkeypatch.setitem(registry._registered, "rows8", FORMAT)
    settings = {"tie_word_embeddings": False}
    given = small_model.write_model(tmp_path / "given", **settings)
    exact = small_model.write_model(tmp_path / "decoded", **settings)
    arrays = safetensors.numpy.load_file(exact / "model.safetensors")
    for name, w in arrays.items():
        if w.ndim == 2 and "embed" not in name:
            arrays[name] = FORMAT.decode(FORMAT.encode(w), w.shape[1])
    safetensors.numpy.save_file(arrays, exact / "model.safetensors")
    ours = LLM.load(given, max_len=64, cache=False, weights="rows8")
    assert any(b.format == "rows8.panels" for b in ours.program.buffers)
    theirs = LLM.load(exact, max_len=64, cache=False, weights=None)
    text = [7 * i * i % 256 for i in range(48)]
    np.testing.assert_allclose(ours.logits(text, 40), theirs.logits(text, 40), rtol=1e-3, atol=1e-3)
