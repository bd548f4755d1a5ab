"""Language models with real weights say what PyTorch says."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("gguf")

from npu_compiler.artifact.describe import bytes_by_format  # noqa: E402
from npu_compiler.frontend.llm import open_checkpoint  # noqa: E402
from npu_compiler.frontend.llm.gguf_file import GGUFFile  # noqa: E402
from npusim import LLM  # noqa: E402
from npusim.models.download import RegistryUnavailable  # noqa: E402

from ..support.sweeps import FULL, IN_FULL  # noqa: E402
from .teacher import divergence, teacher  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.network]

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. One day, she saw "
    "a big, red ball in the sky. It"
)


TEXT = Path(__file__).parents[2] / "LICENSE"


@cache
def load(name: str, max_len: int, dtype: str) -> LLM:
    try:
        return LLM.load(name, max_len=max_len, dtype=dtype)
    except RegistryUnavailable as error:
        pytest.skip(str(error))


@IN_FULL  # test_checkpoint.py has its story
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tinystories(dtype: str) -> None:
    answer = load("tinystories-15m", 256, dtype).generate([1], max_tokens=40, stream=False)
    assert len(answer.tokens) == 40 and answer.text == STORY


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=IN_FULL)])
def test_smollm2(dtype: str) -> None:
    llm = load("smollm2-135m", 256, dtype)
    assert llm.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    answer = llm.generate("The capital of France is", max_tokens=10, stream=False)
    assert answer.tokens == [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34]
    assert answer.text == " Paris.\n\nThe answer is: 2"
    counting = llm.generate("1, 2, 3, 4, 5,", max_tokens=20, stream=False)
    assert counting.text.startswith(" 6, 7, 8, 9, 10, 11")


def transformers_llama(path: Path) -> Any:
    """The checkpoint in transformers, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    checkpoint = open_checkpoint(path, "float32")
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied_embedding,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(np.array(array)) for name, array in checkpoint.weights.items()}
    assert set(model.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("name", "window", "dtype"),
    [
        ("tinystories-15m", 256, "bfloat16"),  # 256 is what it was made for
        pytest.param("tinystories-15m", 256, "float32", marks=IN_FULL),
        pytest.param("smollm2-135m", 512, "bfloat16", marks=IN_FULL),
        pytest.param("smollm2-135m", 512, "float32", marks=IN_FULL),
    ],
)
def test_teacher_forced_logits(name: str, window: int, dtype: str) -> None:
    """A text, token by token and as prompts of many lengths. Divergence is also taken from the model as it
    was before its weights were rounded."""
    llm = load(name, window, dtype)
    ids = llm.encode(TEXT.read_text())[: 512 if FULL else window]
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    model = transformers_llama(llm.path)
    with torch.no_grad():
        plain = np.concatenate([model(torch.tensor([w])).logits[0].double().numpy() for w in windows])
    forced = teacher(model, dtype, windows)
    logits = np.concatenate([llm.logits(w) for w in windows])
    print(f"{name} {dtype}, token by token: {forced.check(logits)}")
    lengths = np.arange(8, window + 1, 8 if FULL else 31)
    prompts = np.concatenate([llm.logits(windows[0][:n], prompt=n) for n in lengths])
    print(f"{name} {dtype}, {len(lengths)} prompts: {forced.check(prompts, lengths - 1)}")
    if dtype != "float32":
        ours, theirs = (divergence(plain, x).mean() for x in (logits.astype(np.float64), forced.eager))
        print(f"{name} {dtype}, KL from float32 weights: {ours:.3g} per token, transformers {theirs:.3g}")
        assert ours <= 1.1 * theirs


def test_smollm2_stays_in_the_blocks_of_its_file() -> None:
    """Tensors have the numbers of the package ``gguf``, and the loaded weights take no more memory than the file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    llm = load("smollm2-135m", 256, "bfloat16")
    size, held = llm.path.stat().st_size, bytes_by_format(llm.program)
    assert held.keys() - {"bfloat16", "float32"} == {"q4_1", "q8_0"} and held["q4_1"] + held["q8_0"] > 0.98 * size
    assert llm.weights.nbytes <= size
    file = GGUFFile(llm.path)
    for tensor in GGUFReader(llm.path).tensors[:: 1 if FULL else 20]:
        theirs = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        np.testing.assert_array_equal(file.read(tensor.name).view(np.uint32), theirs.view(np.uint32))


TOKENIZER = 32 << 20  # most bytes of these, of an open tokenizer and of the modules that the first answer imports

MEASURE = """
import sys
from npu_runtime.llm.model import LLM

def resident():
    line = next(x for x in open("/proc/self/status") if x.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024

before = resident()
llm = LLM.load(sys.argv[1], dtype="bfloat16", max_len=int(sys.argv[2]))
loaded = resident() - before
llm.generate("The capital of France is", max_tokens=8, stream=False)
print(loaded, resident() - before, sum(b.size_bytes for b in llm.state.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is resident")
def test_a_loaded_file_takes_the_memory_of_the_file_and_of_its_caches() -> None:
    """At the second start, which needs neither the compiler nor PyTorch. With a short cache, the tokenizer counts."""
    length = 4096 if FULL else 256  # the program that other tests compile
    path = load("smollm2-135m", length, "bfloat16").path
    command = [sys.executable, "-c", MEASURE, str(path), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded, held, caches = map(int, done.stdout.split())
    size = path.stat().st_size
    numbers = (f"{n / 2**20:.1f}" for n in (loaded, held, size, caches))
    print("{} MiB, with a tokenizer {}, for a file of {} and caches of {}".format(*numbers))
    assert loaded <= 1.1 * size + caches
    assert held <= 1.1 * size + caches + (0 if FULL else TOKENIZER)
