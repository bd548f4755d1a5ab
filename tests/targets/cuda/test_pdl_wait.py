"""Kernels start before the ones ahead of them have ended: what they read before they wait must not be theirs."""

from __future__ import annotations

import re

import pytest

from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig
from npu_compiler.pipeline import run_phases
from npu_compiler.targets.cuda.dialect import DIALECT, HOPPER
from npu_compiler.targets.simt.emit import emit
from npu_compiler.targets.simt.lang.dialect import Dialect

CARD = {
    "vocab_size": 4096, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dialect", [DIALECT, HOPPER], ids=["sm_80", "sm_90a"])
def test_every_kernel_waits_before_it_reads_what_others_wrote(dialect: Dialect, model_type: str) -> None:
    config = LLMConfig.from_hf({**CARD, "model_type": model_type})
    graphs = llm_graphs(config, max_len=2048, chunks=(128,), run_ahead=True)
    for entry, ir in graphs.items():
        schedule = run_phases(ir, "cuda", None, until="memory").schedule
        assert schedule is not None
        written: set[int] = set()
        early = 0
        for kernel in schedule.kernels:
            e = emit(kernel, dialect)
            before, wait, _ = e.text.partition("wait_inputs();")
            assert wait, f"{entry}: {kernel.name} does not wait, so nobody behind it does"
            body = re.sub(r"tile_map_ready\(m\d+\);", "", before.partition("{")[2])  # fetches a map, no tile
            maps = [(number, f"m{i}") for i, (number, _) in enumerate(e.maps)]
            for number, name in [*((n, f"a{n}" if n >= 0 else f"b{~n}") for n in e.operands), *maps]:
                operand = kernel.inputs[number] if number >= 0 else kernel.outputs[~number]
                if re.search(rf"\b{name}\b", body):
                    early += 1
                    assert operand.buffer.id not in written, f"{entry}: {kernel.name} reads {operand} before it waits"
            written |= {o.buffer.id for o in kernel.outputs}
        assert early > 0 or entry.startswith("prefill")


def test_a_decode_step_is_at_most_five_kernels_a_layer() -> None:
    def kernels(layers: int) -> int:
        config = LLMConfig.from_hf({**CARD, "model_type": "qwen2", "num_hidden_layers": layers})
        schedule = run_phases(
            llm_graphs(config, max_len=2048, chunks=())["decode"], "cuda", None, until="memory"
        ).schedule
        assert schedule is not None
        return len(schedule.kernels)

    assert kernels(3) - kernels(2) == 5
