"""Loading a small random llama: packed weights that are kept, damaged or outdated, and wrong options and models."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import npusim  # noqa: E402
from npu_compiler.support.errors import ArtifactError, ConfigError, IncompressibleError, InputError, WeightError  # noqa: E402
from npu_compiler.support.progress import Step, listening  # noqa: E402
from npu_runtime.llm.model import LLM  # noqa: E402
from npusim.cli import main  # noqa: E402

from . import small_model  # noqa: E402
from .small_model import MAX_LEN, TEXT  # noqa: E402

SECOND_START = """
import sys, json
from npu_compiler.support.progress import listening
from npu_runtime.llm.model import LLM
with listening(lambda step: print(step.text, file=sys.stderr)):
    llm = LLM.load(sys.argv[1], max_len=int(sys.argv[2]))
tokens = llm.generate("hello", max_tokens=5, ignore_eos=True, stream=False).tokens
heavy = [m for m in ("torch", "transformers", "gguf", "jinja2", "npu_compiler.pipeline") if m in sys.modules]
print(json.dumps({"tokens": tokens, "heavy": heavy}))
"""


def test_second_start_neither_compiles_nor_packs(llm: LLM, model: Path, cache: Path) -> None:
    environment = {**os.environ, "NPU_CXX": "/no/compiler", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = [sys.executable, "-c", SECOND_START, str(model), str(MAX_LEN)]
    out = subprocess.run(child, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(out.stdout)
    assert found["heavy"] == [] and not out.stderr
    assert found["tokens"] == llm.generate("hello", max_tokens=5, ignore_eos=True, stream=False).tokens


def only_file(folder: Path) -> Path:
    (path,) = [p for p in folder.rglob("*") if p.is_file()]
    return path


@pytest.mark.parametrize("damage", ["cut", "magic", "header", "length", "flip", "zeros", "removed"])
def test_damaged_packed_weights_are_made_anew(llm: LLM, model: Path, cache: Path, damage: str) -> None:
    expected = llm.generate("hello", max_tokens=5, stream=False).tokens
    path = only_file(cache / "weights")
    data = path.read_bytes()
    middle = len(data) // 2
    broken = {
        "cut": data[:middle], "magic": b"x" + data[1:], "header": data[:20] + b"\xc1" * 40 + data[60:],
        "length": data[:8] + b"\xff" * 8 + data[16:],
        "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "zeros": data[:middle] + bytes(len(data) - middle),
    }  # fmt: skip
    path.write_bytes(broken[damage]) if damage in broken else path.unlink()
    steps: list[str] = []
    with listening(lambda step: steps.append(step.text)):
        again = LLM.load(model, max_len=MAX_LEN)
    assert "packing weights" in steps and not any("compiling" in s for s in steps)
    assert again.generate("hello", max_tokens=5, stream=False).tokens == expected
    assert only_file(cache / "weights").read_bytes() == data


def test_weights_that_another_version_packed_are_packed_again(
    llm: LLM, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, steps = only_file(cache / "weights"), list[str]()
    monkeypatch.setattr("npu_runtime.llm.loader.packing_identity", lambda: "another version")
    with listening(lambda step: steps.append(step.text)):
        LLM.load(model, max_len=MAX_LEN)
    assert "packing weights" in steps and not any("compiling" in s for s in steps)
    (other,) = {p for p in (cache / "weights").rglob("*") if p.is_file()} - {kept}
    other.unlink()


def test_changed_weights_are_noticed(llm: LLM, cache: Path, tmp_path: Path) -> None:
    """Another checkpoint of the same architecture: not compiled again, but with weights of its own."""
    folder = small_model.write_model(tmp_path / "m", seed=0)
    same = LLM.load(folder, max_len=MAX_LEN)
    steps: list[str] = []
    small_model.write_model(folder, seed=1)
    with listening(lambda step: steps.append(step.text)):
        other = LLM.load(folder, max_len=MAX_LEN)
    assert "packing weights" in steps and not any("compiling" in s for s in steps)
    assert np.abs(other.logits([1, 2]) - same.logits([1, 2])).max() > 0.1
    assert other._fingerprint() != same._fingerprint() == llm._fingerprint()


def test_without_cache_nothing_is_kept_and_nothing_removed(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    kept = {p for section in ("programs", "weights") for p in (cache / section).glob("??/*")}
    LLM.load(model, max_len=MAX_LEN + 1, cache=False)
    assert kept and all(p.exists() for p in kept)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache / "kernels")
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "cache"))
    again = LLM.load(model, max_len=MAX_LEN, cache=False)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["kernels"]
    assert again.tokens == [] and again.generate("a", max_tokens=1, stream=False).tokens


def test_nan_weights_are_named_each_time(llm: LLM, cache: Path, tmp_path: Path) -> None:
    folder = small_model.write_model(tmp_path / "nan")
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    arrays["model.norm.weight"][3] = np.nan
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"model\.norm\.weight.*NaN"):
            broken = LLM.load(folder, max_len=MAX_LEN)
    with pytest.raises(Exception, match="logits hold nan"):
        broken.generate("a", max_tokens=1, stream=False)


def test_weights_that_cannot_be_kept_in_fewer_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiled file refuses them; a checkpoint is compiled again, once, for weights as they are, and says so."""
    folder, program = small_model.write_model(tmp_path / "wild", torch_dtype="bfloat16"), tmp_path / "wild.npubin"
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    wild = arrays["model.layers.0.mlp.down_proj.weight"]
    wild *= np.exp2(np.random.default_rng(0).uniform(-60, 0, wild.shape)).astype(np.float32)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (tmp_path / "cache").mkdir()
    with contextmanager(small_model.own_cache)(tmp_path / "cache"):
        assert main(["compile", str(folder), "--max-len", str(MAX_LEN), "-o", str(program), "-q"]) == 0
        with pytest.raises(IncompressibleError, match=r"layers\.0\.mlp\.down_proj\.weight.*weights=None"):
            LLM.load(program)
        steps: set[Step] = set()
        with listening(steps.add):
            first, second = (LLM.load(folder, max_len=MAX_LEN) for _ in range(2))
        texts = [step.text for step in steps]
        assert texts.count("compiling wild") == 1 and texts.count("packing weights") == 2
        (record,) = (r for r in caplog.records if r.name == "npu_runtime.llm.loader")
        said = r".*wild is compiled again without the weight format: weight 'model\.layers\.0\."
        assert re.match(said, record.getMessage())
        monkeypatch.setenv("NPU_DISABLE", "compress_weights")
        plain = LLM.load(folder, max_len=MAX_LEN, cache=False)
    for found in (first, second):
        assert all(b.dtype != "uint8" for b in found.program.buffers)
        np.testing.assert_array_equal(found.logits(TEXT, 40), plain.logits(TEXT, 40))


def test_no_warnings_otherwise(model: Path, cache: Path, llm: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM.load(model, max_len=MAX_LEN)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_len": 0}, InputError, "max_len=0"),
        ({"max_len": "8"}, InputError, "max_len='8'"),
        ({"max_len": 8.0}, InputError, "max_len=8.0"),
        ({"max_len": 300}, InputError, "made for at most 256 positions"),
        ({"target": "abacus"}, Exception, "abacus"),
        ({"dtype": "int8"}, Exception, "int8"),
        ({"weights": "zip"}, ConfigError, "unknown weight format 'zip'"),
    ],
)
def test_wrong_options(model: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM.load(model, **options)


def test_wrong_models(llm: LLM, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match="no-such-model: there is no such file"):
        LLM.load("no-such-model")
    assert npusim.LLM is LLM
    with pytest.raises(InputError, match="the built-in models are smollm2-135m, tinystories-15m"):
        LLM.load("no-such-model")
    with pytest.raises(WeightError, match=r"config\.json"):
        LLM.load(tmp_path)
    folder = small_model.write_model(tmp_path / "vocabulary", vocab_size=100)
    with pytest.raises(WeightError, match="tokenizer"):
        LLM.load(folder)
    path = small_model.write_model(tmp_path / "short") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        LLM.load(path.parent)


def test_programs_of_another_kind(llm: LLM) -> None:
    import dataclasses

    program = dataclasses.replace(llm.program, entries={"prefill_32": llm.program.entries["prefill_32"]})
    with pytest.raises(ArtifactError, match="no entry point for a single token"):
        LLM(program, llm.weights, llm.manifest, llm_backend(llm))


def llm_backend(llm: LLM) -> Any:
    from npu_runtime.backends.base import get_backend

    return get_backend(llm.program.target)


def test_no_longer_context_is_advised_than_the_model_was_made_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "manifest", dataclasses.replace(llm.manifest, limit=MAX_LEN))
    for prompt, options in (([*TEXT, 1], {}), (TEXT[:90], {"max_tokens": 8})):
        with pytest.raises(
            InputError, match=f"was made for {MAX_LEN} tokens, so its context cannot be longer"
        ) as raised:
            llm.generate(prompt, **options)
        assert "larger max_len" not in str(raised.value)


def test_without_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    bare = LLM(llm.program, llm.weights, dataclasses.replace(llm.manifest, tokenizer=None), llm_backend(llm))
    answer = bare.generate([1, 2, 3], max_tokens=4, stream=False)
    assert len(answer.tokens) == 4 and answer.text == ""
    with pytest.raises(InputError, match="pass token ids"):
        bare.generate("text")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        bare.generate([1], stop=["x"])
