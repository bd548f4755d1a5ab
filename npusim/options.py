"""Options that verbs of the command line share, and the types of their values. Only argparse is imported here."""

from __future__ import annotations

import argparse

DTYPE = "{float32,float16,bfloat16}"


# -- groups of options ------------------------------------------------------------------------------------------------
def model(p: argparse.ArgumentParser, what: str) -> None:
    """Add the argument MODEL, described by ``what``, and the target."""
    p.add_argument("model", help=what)
    p.add_argument(
        "--target", help="cpu, cuda or metal, or a device of one like cuda:sm_80 (default: NPU_TARGET, else cpu)"
    )


def compiling(p: argparse.ArgumentParser) -> None:
    """Add how a model is compiled."""
    p.add_argument("--dtype", type=storage_dtype, metavar=DTYPE, help="store float32 tensors in this type")
    p.add_argument(
        "--disable",
        type=names,
        default=(),
        metavar="NAMES",
        help="passes and rewrites to skip, separated by commas; 'help' lists them",
    )
    p.add_argument("--batch", type=positive, default=1, help="images per run, for a built-in model")


def placing(p: argparse.ArgumentParser) -> None:
    """Add which nodes run on the host."""
    p.add_argument(
        "--force-cpu",
        type=names,
        action="extend",
        default=[],
        metavar="OPS",
        help="run these ops or nodes on the host, in PyTorch; separated by commas, in the spelling of the IR "
        "(aten.relu_.default) or of the functional variant (aten.relu.default)",
    )
    p.add_argument(
        "--minimise-transfers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="move cheap neighbours of host nodes to the host, too, if that saves transfers (default); with --no-… "
        "only what is excluded or unsupported moves",
    )
    p.add_argument(
        "--fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="nodes that cannot run on the NPU run on the host, in PyTorch (default, as in npusim.build, so that "
        "every model runs); with --no-fallback, exit with status 3 and the reasons: what is written then runs "
        "without PyTorch",
    )


def weights(p: argparse.ArgumentParser, default: str) -> None:
    """Add the weight format; ``default`` in words."""
    text = "weight format of the matrices of products: bf16c12 is lossless, q8_0 rounds to 8 bits; or none"
    text = f"{text} (default: {default})"
    p.add_argument("--weights", dest="weight_format", metavar="FORMAT", help=text)


def speed(p: argparse.ArgumentParser) -> None:
    """Add the choice between speed and memory."""
    text = "on GPUs, also store the elements of weights in a format, so that prompts need not decode them"
    p.add_argument("--speed-over-memory", action="store_true", help=text)


def storage(p: argparse.ArgumentParser) -> None:
    """Add the types in which a language model is stored."""
    about = "type of weights and caches (default: the model's own)"
    p.add_argument("--dtype", type=storage_dtype, metavar=DTYPE, help=about)
    weights(p, "the blocks that the file holds, else bf16c12")


def kv_cache(p: argparse.ArgumentParser) -> None:
    """Add the type of the KV caches."""
    about = "type of a language model's KV caches: 8-bit integers or floats, a scale a row (default: --dtype)"
    p.add_argument("--kv-cache", type=kv_cache_of, metavar="{int8,fp8}", help=about)


def activations(p: argparse.ArgumentParser) -> None:
    """Add the type to which activations are rounded."""
    about = "fp8: round rows of prompts to 8 bits in front of matrices in an fp8 format; or none (default: what a "
    about += "checkpoint says, on GPUs that multiply such rows)"
    p.add_argument("--activations", type=activations_of, default="auto", metavar="fp8", help=about)


def threads(p: argparse.ArgumentParser) -> None:
    """Add the number of threads."""
    p.add_argument("--threads", type=positive, help="default: NPU_NUM_THREADS, else all cores")


def precision(p: argparse.ArgumentParser) -> None:
    """Add the precision of float32 products."""
    p.add_argument(
        "--float32-precision",
        choices=("highest", "tf32"),
        default="highest",
        help="tf32: products and convolutions of float32 round their operands to 10 bits of fraction, on an NVIDIA "
        "GPU (default: highest)",
    )


def language(p: argparse.ArgumentParser) -> None:
    """Add options of language models for verbs that take all kinds of models."""
    p.set_defaults(speed_over_memory=False)
    kv_cache(p)
    activations(p)
    p.add_argument("--max-len", type=positive, help="tokens of a language model's context (default: at most 4096)")
    p.add_argument("--no-cache", action="store_true", help="do not cache a language model for the next start")


# -- types of values --------------------------------------------------------------------------------------------------
def activations_of(text: str) -> str | None:
    """Return the type of activations, 'auto' or None."""
    from npu_compiler.support.dtypes import ACTIVATIONS

    if text not in (*ACTIVATIONS, "auto", "none"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(ACTIVATIONS)}, auto, none")
    return None if text == "none" else text


def kv_cache_of(text: str) -> str:
    """Return the type of KV caches."""
    from npu_compiler.support.dtypes import KV_CACHES

    if text not in KV_CACHES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(KV_CACHES)}")
    return text


def storage_dtype(text: str) -> str:
    """Return a storage type."""
    from npu_compiler.support import dtypes
    from npu_compiler.support.errors import ConfigError

    try:
        return dtypes.storage_dtype(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def names(text: str) -> tuple[str, ...]:
    """Return names that commas or blanks separate."""
    return tuple(text.replace(",", " ").split())


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def seconds(text: str) -> float:
    """Return a number of seconds, at most a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, at most 86400")
    return value


def fraction(text: str) -> float:
    """Return a fraction that may be written as a percentage."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a percentage like 5% nor a fraction like 0.05")
    return value
