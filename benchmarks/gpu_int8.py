"""The 8-bit ResNets of ``gpu.py``: programs that ``npusim quantize``'s code makes, and the results that they must have.

ResNet-50 has trained weights and is calibrated on photographs: the errors of 8 bits add up in 50 layers of random
weights. It has the strides of the float16 parts, not those with which it was trained. ResNet-18, of which no trained
weights are known, has random ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

BATCH = 256
CHECKED = 16  # images whose results are compared
NAMES = ("resnet18", "resnet50")
SIZES = (224, 240, 256, 288, 320, 352)  # shorter sides of the photographs from which images are cropped


def files(work: Path, name: str) -> tuple[Path, Path]:
    """Return the program, whose weights are beside it, and the file with images and results."""
    return work / f"{name}-int8_{BATCH}.npubin", work / f"{name}-int8_checks.npz"


def compile_quantised(work: Path, name: str) -> Iterator[Path]:
    """Write the files of a network that are not in ``work`` yet, and yield their paths. It needs no GPU."""
    program, checks = files(work, name)
    if program.exists() and checks.exists():
        return
    import npu_compiler
    from npu_compiler.frontend import capture, state_dict_numpy
    from npu_runtime import CPUBackend, Executor
    from npusim.program_files import save_program
    from npusim.quantization import calibrate
    from npusim.quantization.network import Network

    model, images = (trained if name == "resnet50" else random)(name)
    weights = state_dict_numpy(model)

    def network(batch: int) -> Network:
        return Network(capture(model, (torch.zeros(batch, 3, 224, 224),)), weights)

    one = network(1)
    (key,) = (t.name for t in one.ir.graph_inputs)
    samples = [{key: image[None]} for image in images]
    parameters = calibrate.parameters(one, calibrate.observe(one, samples, "cpu"), "minmax")
    (few, stored), (graph, _) = (network(batch).quantized(parameters) for batch in (CHECKED, BATCH))
    (cpu,) = Executor(npu_compiler.compile(few, "cpu"), stored, CPUBackend()).run([images]).values()
    with torch.no_grad():
        exact = model(torch.from_numpy(images)).numpy()
    yield from save_program(npu_compiler.compile(graph, "cuda"), stored, program)
    np.savez_compressed(checks, images=images, exact=exact, cpu=cpu)
    yield checks


def trained(name: str) -> tuple[nn.Module, np.ndarray]:
    """Return ResNet-50 with trained weights, and crops of photographs."""
    from npusim.models.resnet import Bottleneck, ResNet
    from npusim.models.weights import resnet50_weights

    model = ResNet(Bottleneck, (3, 4, 6, 3), 1000, conv_bias=True, bn_eps=1e-3)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in resnet50_weights().items()})
    return model.eval(), np.concatenate(list(crops()))[:CHECKED]


def crops() -> Iterable[np.ndarray]:
    """Return the photographs as inputs, in several sizes."""
    from npusim.models.images import photos, resize_and_crop, resnet50_input

    pictures = [image for image, _ in photos().values()]
    return [resnet50_input(resize_and_crop(image, size)) for size in SIZES for image in pictures]


def random(name: str) -> tuple[nn.Module, np.ndarray]:
    """Return a network with random weights, batch norm statistics that keep activations in scale, and random images."""
    from gpu_models import with_statistics

    from npusim import models

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(CHECKED, 3, 224, 224, generator=generator)
    return with_statistics(getattr(models, name)(), images), images.numpy()


def verdict(found: np.ndarray, checks: Any, allowed: float) -> dict[str, Any]:
    """Compare the results for the checked images with those of the CPU target, which must be equal, and with those of
    the network in float32: the largest difference relative to the largest score, and the most likely classes.

    Classes whose scores differ by less than the allowed error may change places.
    """
    exact = checks["exact"]
    largest, first = np.abs(exact).max(), found.argmax(1)
    error = float(np.abs(found - exact).max() / largest)
    equal = float((found == checks["cpu"]).mean())
    lost = exact.max(1) - exact[np.arange(len(exact)), first]
    return {
        "error": error, "allowed": allowed, "equal_to_cpu": equal,
        "top1_agreement": float((first == exact.argmax(1)).mean()),
        "within_gate": error <= allowed and equal == 1.0, "top_kept": bool((lost <= allowed * largest).all()),
    }  # fmt: skip
