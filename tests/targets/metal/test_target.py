"""The Metal target: what it writes, and whole models in the emulator."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.partitioning.plan import HOST
from npu_compiler.support.errors import BackendError, InputError
from npu_compiler.target_config import target_config
from npu_compiler.targets.simt.lang.program import unpack
from npu_runtime import CPUBackend, Executor, MetalBackend, MixedModel, get_backend, load_weights
from npu_runtime.llm.loader import Loader
from npu_runtime.llm.model import LLM
from npusim.cli import main

from ...llm import small_model
from ...metal_emulator import Library, translate
from ...models.gate import cast, compile_whole, expect, run
from ...models.random_models import image_model, images, randomise
from ...support.metal_backend import EmulatedMetal
from ...support.sweeps import IN_FULL


class Small(nn.Module):
    """A convolution, a norm over rows, a product: one kernel of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3, stride=2), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.relu(self.conv(x)).mean((2, 3))))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return randomise(Small())


@pytest.fixture(scope="module")
def program(small: nn.Module) -> CompiledProgram:
    return npu_compiler.compile(capture(small, (images(2, 16),)), target="metal")


@pytest.mark.parametrize("size", [128, 256, 512])
def test_attention_with_large_heads_fits_in_a_threadgroup(size: int) -> None:
    """Eight query rows share the keys, in parts that are combined. Heads above the target's limit are products."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v)

    rng = np.random.default_rng(0)
    inputs = [torch.from_numpy(rng.standard_normal((1, 1, n, size)).astype(np.float32)) for n in (8, 300, 300)]
    program = npu_compiler.compile(capture(Attention(), tuple(inputs)), target="metal:apple7")
    kinds = {c.kind for c in program.entry().calls}
    fused = size <= target_config("metal:apple7").max_head_dim
    assert kinds == ({"attention", "combine_attention"} if fused else {"gemm", "loops"})
    executor = Executor(program, load_weights(program, {}, backend := EmulatedMetal(checks=False)), backend)
    result = executor.run([x.numpy() for x in inputs])[program.outputs[0].name]  # refuses what Metal has not
    np.testing.assert_allclose(result, Attention()(*inputs).numpy(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- artifact
def test_a_stored_program_runs(small: nn.Module, program: CompiledProgram, tmp_path: Path) -> None:
    program.save(tmp_path / "small.npubin")
    loaded = CompiledProgram.load(tmp_path / "small.npubin")
    assert loaded.target == "metal" and loaded.requires == ("metal3.1",)
    x = images(2, 16)
    (result,) = Executor(loaded, state_dict_numpy(small), EmulatedMetal()).run([x.numpy()]).values()
    with torch.no_grad():
        np.testing.assert_allclose(result, small(x).numpy(), rtol=1e-5, atol=1e-5)


def test_the_text_needs_no_memory_but_what_it_is_given(program: CompiledProgram) -> None:
    """Every launch binds as many buffers as its kernel has, within Metal's limits."""
    entries, code = unpack(program.binary)
    kernels = {k.name: k for k in translate_text(code["text"])}
    for launch in entries[program.entries["main"].symbol]:
        kernel = kernels[launch.function]
        assert len(launch.arguments) + launch.checks == len(kernel.buffers) <= 31
        assert launch.threads <= kernel.max_threads <= 1024 and launch.shared == 0


def translate_text(text: str) -> list:
    from ...metal_emulator.build import preprocess

    return translate(preprocess(text, "program.metal"), "program.metal").kernels


def test_emitted_source_compiles_file_by_file(tmp_path: Path, small: nn.Module, program: CompiledProgram) -> None:
    folder = tmp_path / "source"
    assert (
        main(
            [
                "compile",
                "resnet18",
                "--target",
                "metal",
                "--emit-source",
                str(folder),
                "-o",
                str(tmp_path / "r.npubin"),
                "-q",
            ]
        )
        == 0
    )
    files = {f.name: f.read_text() for f in folder.iterdir()}
    kernels = {name: text for name, text in files.items() if name.endswith(".metal")}
    assert len(kernels) > 10 and all(name.endswith(".h") for name in files.keys() - kernels.keys())
    for name, text in kernels.items():
        assert text.count("[[kernel") == 1 and f"void {name.removesuffix('.metal')}(" in text

    def preprocessed(name: str, seen: set[str]) -> str:
        """A file with what it includes, every header once."""
        parts = re.split(r'^#include "(\S+)"\n', files[name].replace("#pragma once\n", ""), flags=re.MULTILINE)
        for n in range(1, len(parts), 2):
            included = parts[n]
            parts[n] = "" if included in seen else (seen.add(included), preprocessed(included, seen))[1]
        return "".join(parts)

    library = Library({name: preprocessed(name, set()) for name in kernels})
    assert {f"{n}.metal" for n in library.functions} == set(kernels)


def test_an_index_out_of_range_names_the_kernel() -> None:
    class Pick(nn.Module):
        def forward(self, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(at, table)

    table, at = torch.arange(12.0).reshape(4, 3), torch.tensor([1, 3])
    program = npu_compiler.compile(capture(Pick(), (table, at)), target="metal")
    run = Executor(program, None, EmulatedMetal("shuffled"))
    (result,) = run.run([table.numpy(), at.numpy()]).values()
    np.testing.assert_array_equal(result, table[at])
    with pytest.raises(InputError, match="an index is out of range in kernel"):
        run.run([table.numpy(), np.array([1, 4])])


def test_float64_stays_on_the_host(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double().sin().float() @ x

    plan = npu_compiler.partition(capture(Wide(), (torch.ones(3, 3),)), target="metal")
    assert any(p.device == HOST for p in plan.partitions)
    assert any("float64" in str(reason) for reason in plan.reasons.values())
    npu_compiler.compile_plan(plan, "metal").save(tmp_path / "wide.npubin")
    loaded = npu_compiler.load_program(tmp_path / "wide.npubin")
    assert isinstance(loaded, MixedProgram) and loaded.target == "metal" and loaded.programs
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    torch.testing.assert_close(MixedModel(loaded, None, EmulatedMetal())(x), Wide()(x))


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac")
def test_without_a_mac_one_line_says_what_is_missing() -> None:
    for make in (MetalBackend, lambda: get_backend("metal")):
        with pytest.raises(BackendError, match=r"^Metal needs a Mac with an Apple GPU, and this is linux; [^\n]*$"):
            make()


def test_the_command_line_compiles_a_language_model(tmp_path: Path) -> None:
    model, folder = small_model.write_model(tmp_path / "small"), tmp_path / "source"
    to = ["--target", "metal", "--max-len", "32", "--emit-source", str(folder), "-o", str(tmp_path / "small.npubin")]
    assert main(["compile", str(model), *to, "-q"]) == 0
    assert CompiledProgram.load(tmp_path / "small.npubin").target == "metal"
    assert (folder / "prelude.h").exists() and len(list(folder.glob("*.metal"))) > 5


# --------------------------------------------------------------------------------------------------------------- models
@IN_FULL  # tests/runtime/metal/test_models.py runs its first half, too
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resnet18(dtype: str) -> None:
    model, runs = image_model("resnet18", 32), [(images(2, 32),)]
    wanted = expect(model, runs, dtype)
    low = copy.deepcopy(model).to(getattr(torch, dtype))
    inputs = [cast(args, getattr(torch, dtype)) for args in runs]
    program, held = compile_whole(capture(low, inputs[0]), target="metal"), state_dict_numpy(low)
    watched = run(program, held, inputs, EmulatedMetal())
    wanted.check(watched)
    wanted.check_ranking(watched)
    other = run(program, held, inputs, EmulatedMetal("shuffled", seed=3, checks=False))
    np.testing.assert_array_equal(watched[0], other[0])


@IN_FULL  # tests/runtime/metal/test_models.py runs a decoder, too
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_llama(tmp_path: Path, dtype: str) -> None:
    """Prompts in chunks and single tokens, against the CPU target, which is tested against PyTorch."""
    path = small_model.write_model(tmp_path / "small", torch_dtype=dtype)
    logits, compiled = {}, {t: Loader(t, None, 64, None, False).compile(path) for t in ("cpu", "metal")}
    for name, backend in (
        ("cpu", CPUBackend()),
        ("ascending", EmulatedMetal()),
        ("shuffled", EmulatedMetal("shuffled", seed=5, checks=False)),
    ):
        llm = LLM(*compiled[backend.name], backend)
        logits[name] = llm.logits([(7 * i * i + 3 * i) % 256 for i in range(43)], 40).astype(np.float64)
    np.testing.assert_array_equal(logits["ascending"], logits["shuffled"])
    scale = np.sqrt(np.mean(logits["cpu"] ** 2))
    error = np.sqrt(np.mean((logits["ascending"] - logits["cpu"]) ** 2)) / scale
    assert error < {"float32": 2e-6, "bfloat16": 2e-2}[dtype]
    np.testing.assert_array_equal(logits["ascending"].argmax(-1), logits["cpu"].argmax(-1))
