"""Classify an image with a ResNet through the partitioner, and compare with PyTorch: the five most likely classes.

python examples/run_resnet.py photo.jpg
python examples/run_resnet.py photo.jpg --model resnet18 --force-cpu-ops aten.relu_.default
"""

from __future__ import annotations

import argparse

import numpy as np
from common import run

import npu_compiler
from npu_compiler.support.text import table
from npu_runtime import DAGExecutor
from npusim.builtin import BUILTINS, RANDOM, captured, trained
from npusim.classes import top_classes
from npusim.latency import torch_call
from npusim.models import images
from npusim.models.download import RegistryUnavailable
from npusim.models.weights import imagenet_labels


def main(args: argparse.Namespace) -> None:
    """Run the example."""
    builtin = BUILTINS[args.model]
    picture = images.read_image(args.image) if args.image else images.photos(("chelsea",))["chelsea"][0]
    x = getattr(images, builtin.images)(picture)
    module, ir, weights = captured(args.model, 1)
    plan = npu_compiler.partition(ir, force_cpu=args.force_cpu_ops)
    print(plan.summary())
    logits = DAGExecutor(plan, "cpu", weights=weights).execute([x])[plan.ir.output_names()[0]][0]
    reference = torch_call(module, [x], threads=1)().numpy()[0]
    eager = {r["class"]: r["probability"] for r in top_classes(reference, None, reference.size)}
    rows = [
        (f"{r['probability']:.4f}", f"{eager[r['class']]:.4f}", r["class"], r["name"] or "")
        for r in top_classes(logits, class_names())
    ]
    print("\n".join(table(("npusim", "PyTorch", "class", "name"), rows, indent="")))
    if builtin.weights is None:
        print(f"the weights are {RANDOM}; {trained()} have trained ones")
    error = np.abs(logits - reference).max() / np.abs(reference).max()
    print(f"against PyTorch: largest logit error {error:.2e} of the largest logit")


def class_names() -> list[str] | None:
    """Return the names of ImageNet's classes; None without network, if they were not downloaded before."""
    try:
        return imagenet_labels()
    except RegistryUnavailable as error:
        print(f"the classes have no names: {error}")
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", help="PNG, JPEG, BMP, GIF or WebP (default: a photograph of a cat)")
    text = "default: resnet50-imagenet, whose weights are downloaded; resnet18 and resnet50 have random weights"
    parser.add_argument("--model", choices=list(BUILTINS), default="resnet50-imagenet", help=text)
    parser.add_argument("--force-cpu-ops", nargs="+", default=[], metavar="OP", help="op types to leave to PyTorch")
    run(main, parser)
