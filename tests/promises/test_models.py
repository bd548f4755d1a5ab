"""The models of the descriptions, from their IR files: image classifiers end to end, a decoder's prompt and step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import npu_compiler
from npu_runtime import Executor, execute_cpu_partition

from ..support.ir_files import FILES, random_weights
from .compiled import compiled


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.astype(np.float64).ravel(), b.astype(np.float64).ravel())[0, 1])


def test_resnet18_agrees_with_pytorch_on_the_top_5() -> None:
    model = compiled("resnet18")
    (found,) = Executor(model.program, model.weights).run([model.x]).values()
    (wanted,) = model.reference().values()
    assert correlation(found, wanted) > 0.99
    for ours, theirs in zip(found, wanted, strict=True):
        assert set(np.argsort(-ours)[:5]) == set(np.argsort(-theirs)[:5]) and ours.argmax() == theirs.argmax()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_are_supported_as_a_whole(name: str) -> None:
    path = FILES / f"{name}.json"
    assert not npu_compiler.check(path) and len(npu_compiler.partition(path).partitions) == 1


def decoder_inputs(ir: Any) -> dict[str, np.ndarray]:
    """A prompt of random tokens under a causal mask, or one token at the first position with empty caches."""
    rng, made = np.random.default_rng(0), {}
    for t in ir.graph_inputs:
        if t.name == "input_ids":
            made[t.name] = rng.integers(0, 128, t.shape)
        elif t.name == "attention_mask":
            queries, keys = t.shape[-2:]
            hidden = np.arange(keys) > np.arange(queries)[:, None]
            made[t.name] = np.broadcast_to(np.where(hidden, np.float32(-3e38), np.float32(0)), t.shape).copy()
        elif t.dtype == "int64":
            made[t.name] = np.arange(t.numel).reshape(t.shape)
        else:
            made[t.name] = np.zeros(t.shape, np.float32)
    return made


def test_a_decode_step_agrees_with_pytorch() -> None:
    """Keys and values go into caches of a fixed length by index_copy; the step attends to them by its mask."""
    ir = npu_compiler.load_ir(FILES / "qwen2_decode.json")
    weights, inputs = random_weights(ir, 0), decoder_inputs(ir)
    found = Executor(npu_compiler.compile(ir), weights).run(inputs)
    wanted = execute_cpu_partition(ir, {k: v.copy() for k, v in inputs.items()}, dict(weights))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert correlation(found[name], value) > 0.99, name
    logits = next(iter(wanted))
    np.testing.assert_array_equal(found[logits].argmax(-1), wanted[logits].argmax(-1))


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_qwen_in_bfloat16_is_supported_as_a_whole(step: str) -> None:
    ir = npu_compiler.load_ir(FILES / f"qwen2_{step}_bf16.json")
    plan = npu_compiler.partition(ir, npu_compiler.is_op_supported)
    assert len(plan.partitions) == 1 and plan.partitions[0].device == "npu"
    caches = [t for t in (*ir.graph_inputs, *ir.graph_outputs) if len(t.shape) == 4 and t.name != "attention_mask"]
    assert caches and {t.dtype for t in caches} == {"bfloat16"}
