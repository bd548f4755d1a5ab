"""Convolutional classifiers with random weights and random batch norm statistics."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from npu_compiler.frontend import capture, state_dict_numpy

from ..support.sweeps import FULL, IN_FULL
from .gate import Expected, compile_and_run, compile_whole, expect, run
from .random_models import image_model, images

DTYPES = ("float32", "float16", "bfloat16")
COUNT = 24  # images a gate


@cache
def expected(name: str, size: int, count: int, dtype: str, rounded: bool = True) -> Expected:
    return expect(image_model(name, size), [(x,) for x in images(count, size).split(8)], dtype, rounded)


def check(name: str, size: int, batch: int, dtype: str, count: int = COUNT) -> None:
    wanted = expected(name, size, count, dtype)
    results = compile_and_run(image_model(name, size), [(x,) for x in images(count, size).split(batch)], dtype)
    wanted.check(results)
    wanted.check_ranking(results)


RESNETS = ("resnet18", "resnet50")
BATCHES = (1, 3, 8)
ALL = [(name, dtype, batch) for name in RESNETS for dtype in DTYPES for batch in BATCHES]
# A sample has every network and every dtype.
SAMPLE = [("resnet18", "float32", 1), ("resnet18", "float16", 3), ("resnet50", "bfloat16", 1)]


@pytest.mark.parametrize(("name", "dtype", "batch"), ALL if FULL else SAMPLE)
def test_resnet(name: str, dtype: str, batch: int) -> None:
    check(name, 64, batch, dtype)


DEPTHWISE = [(name, dtype) for name in ("mobilenet_v2", "efficientnet_lite0") for dtype in DTYPES]


@pytest.mark.parametrize(("name", "dtype"), DEPTHWISE if FULL else DEPTHWISE[:1])  # test_real_weights.py has others
def test_depthwise(name: str, dtype: str) -> None:
    check(name, 64, 2, dtype)


@IN_FULL  # cli/test_cli_models.py and test_real_weights.py run ResNets on such images, too
@pytest.mark.parametrize(("name", "dtype"), [("resnet18", "float32"), ("resnet50", "bfloat16")])
def test_at_full_resolution(name: str, dtype: str) -> None:
    check(name, 224, 1, dtype, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"] if FULL else ["bfloat16"])
def test_a_float32_model_stored_in_half(dtype: str) -> None:
    """``compile(dtype=...)``: inputs, outputs and the state_dict stay float32; errors as if all had been converted."""
    model, x = image_model("two_stages", 64), images(COUNT, 64)
    program = compile_whole(capture(model, x[:8]), dtype)
    assert {t.dtype for t in (*program.entries["main"].inputs, *program.entries["main"].outputs)} == {"float32"}
    assert program.dtype == dtype
    results = run(program, state_dict_numpy(model), [(part,) for part in x.split(8)])
    wanted = expected("two_stages", 64, COUNT, dtype, rounded=False)
    wanted.check(results)
    wanted.check_ranking(results)


def test_the_gate_sees_a_wrong_bit_of_the_weights() -> None:
    """A batch norm whose epsilon is forgotten is not a rounding error."""
    model, x = image_model("resnet18", 64), images(8, 64)
    runs = [(image,) for image in x.split(1)]  # of the program that test_resnet has compiled
    wrong = {k: v.copy() for k, v in state_dict_numpy(model).items()}
    wrong["layer4.1.bn2.running_var"] += 2e-4
    results = run(compile_whole(capture(model, runs[0])), wrong, runs)
    with pytest.raises(AssertionError, match=r"rms.* of the errors exceed"):
        expected("resnet18", 64, 8, "float32").check(results)
    assert torch.isfinite(torch.from_numpy(results[0])).all()
