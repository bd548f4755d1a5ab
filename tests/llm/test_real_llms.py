"""Language models with real weights say what PyTorch says."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("gguf")

from npu_runtime.llm import LLM
from npusim.models.download import RegistryUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.network]

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. One day, she saw "
    "a big, red ball in the sky. It"
)


def load(name: str, **options: object) -> LLM:
    try:
        return LLM.load(name, max_len=256, **options)  # type: ignore[arg-type]
    except RegistryUnavailable as error:
        pytest.skip(str(error))


def test_tinystories() -> None:
    answer = load("tinystories-15m").generate([1], max_tokens=40, stream=False)
    assert len(answer.tokens) == 40 and answer.text == STORY


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2(dtype: str) -> None:
    llm = load("smollm2-135m", dtype=dtype)
    assert llm.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    answer = llm.generate("The capital of France is", max_tokens=10, stream=False)
    assert answer.tokens == [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34]
    assert answer.text == " Paris.\n\nThe answer is: 2"
    counting = llm.generate("1, 2, 3, 4, 5,", max_tokens=20, stream=False)
    assert counting.text.startswith(" 6, 7, 8, 9, 10, 11")
