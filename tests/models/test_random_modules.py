"""Random modules give PyTorch's results: ops, dtypes, shapes and layouts in combinations that no other test has.

``python -m tests.models.test_random_modules SEED COUNT [TARGET]`` runs COUNT modules. It shortens those that fail, and
prints them. TARGET is 'cpu', 'metal' (in the emulator where no Apple GPU is at hand) or 'host' (of tests/porting).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
import torch

import npu_compiler
import npusim
from npu_compiler import targets
from npu_compiler.pipeline import run_phases
from npu_compiler.support.errors import CaptureError, CompileError
from npu_runtime.backends.metal import missing_parts
from npu_runtime.registry import register_backend

from ..porting.backend import HostBackend
from ..porting.target import TARGET
from ..support import random_lines, random_patterns  # noqa: F401 - register the lines
from ..support.metal_backend import EmulatedMetal
from ..support.random_modules import Maker, Program
from ..support.sweeps import FULL

# Of the largest result: what the order of a sum may cost. float64 has no reference that is more exact.
ROOM = {torch.float64: 2**-36, torch.float32: 2**-21, torch.float16: 2**-8, torch.bfloat16: 2**-5}
# By PyTorch, buffers that another call would find in another shape, and what PyTorch makes functional in a wrong way.
REFUSED = ("torch.export failed", "removing in-place operations failed", "changes the shape of", "through unfold()")


def program(seed: int) -> Program:
    rng = random.Random(seed)
    return Maker(rng, nonfinite=rng.random() < 0.15).build(rng.randint(4, 24))


def check(p: Program, target: str = "cpu") -> None:
    """Two runs of the built module against two of PyTorch's: what the first one writes is there in the second."""
    module, exact = p.module(), p.module(wide=True)
    try:
        built = npusim.build(p.module(), tuple(p.arguments()), target=target)
    except CaptureError as error:
        if any(text in str(error) for text in REFUSED):
            return
        raise
    for run in range(2):
        with torch.no_grad():
            wanted = [t.clone() for t in module(*p.arguments())]
            torch.set_default_dtype(torch.float64)  # for tensors that the module makes
            try:
                references = [t.clone() for t in exact(*p.arguments(wide=True))]
            except RuntimeError:  # such as transposed convolutions without results, which PyTorch has in float32 alone
                references = wanted
            finally:
                torch.set_default_dtype(torch.float32)
        found = built(*p.arguments())
        for name, *results in zip(p.outputs, found, wanted, references, strict=True):
            compare(f"{name}, run {run}", *results, exact=name in p.exact)


def compare(where: str, found: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, exact: bool) -> None:
    """Exact values are equal. Others have eager's non-finite elements, if float64 has them, too, and an error of at
    most 8 times eager's largest."""
    assert (found.shape, found.dtype) == (eager.shape, eager.dtype), where
    if exact or not eager.is_floating_point():
        torch.testing.assert_close(found, eager, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")
        return
    ours, theirs = found.double(), eager.double()
    for special in (torch.isnan, torch.isinf):
        if torch.equal(special(theirs), special(reference)):
            assert torch.equal(special(ours), special(theirs)), f"{where}: {special.__name__}"
    finite = ours.isfinite() & theirs.isfinite() & reference.isfinite()
    if finite.any():
        ours, theirs, reference = (t[finite] for t in (ours, theirs, reference))
        allowed = 8 * (theirs - reference).abs().max() + ROOM[eager.dtype] * reference.abs().max()
        error = (ours - reference).abs().max()
        assert error <= allowed, f"{where}: an error of {error:.3g}, allowed {allowed:.3g}"


def check_rewrites(p: Program, target: str) -> None:
    """Compile without generating code: NPU_VERIFY=2 compares graph and kernels after every step, in numpy."""
    try:
        run_phases(npu_compiler.capture(p.module(), tuple(p.arguments())), target, until="memory")
    except (CaptureError, CompileError) as error:
        if isinstance(error, CompileError) and "cannot run on the NPU" not in str(error):
            raise


@pytest.mark.parametrize("first", range(0, 400 if FULL else 5, 5))
def test_results_are_pytorchs(first: int) -> None:
    for seed in range(first, first + 5):
        p = program(seed)
        try:
            check(p)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{p.describe()}") from error


@pytest.mark.parametrize("target", ["cpu:amx", "cuda:sm_80", "cuda:sm_90", "metal"])
def test_rewrites_keep_the_results(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VERIFY", "2")
    for seed in range(1000, 1100 if FULL else 1001):
        p = program(seed)
        try:
            check_rewrites(p, target)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{p.describe()}") from error


def failure(p: Program, checks: Callable[[Program], None]) -> str:
    """The class of the error, or the first words of a failed assertion; empty if the checks pass."""
    try:
        checks(p)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(p: Program, checks: Callable[[Program], None]) -> Program:
    """A smaller program with an error of the same class."""
    kind = failure(p, checks).partition(":")[0]
    while smaller := next((q for q in p.smaller() if failure(q, checks).partition(":")[0] == kind), None):
        p = smaller
    return p


def main(first: int, count: int, target: str) -> None:
    if target == "metal" and missing_parts():
        register_backend("metal", lambda: EmulatedMetal("shuffled"))
    elif target == "host":
        targets.register_target(TARGET)
        register_backend("host", HostBackend)

    def checks(p: Program) -> None:
        check(p, target)

    for seed in range(first, first + count):
        if failure(program(seed), checks):
            p = shrunk(program(seed), checks)
            print(f"seed {seed}: {failure(p, checks)}\n{p.describe()}\n", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:] or ["cpu"])
