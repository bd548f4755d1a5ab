"""For a process of its own: a GPU program whose last kernel leaves its memory, and what can be done after it."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import torch

import npu_compiler
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.support.errors import BackendError
from npu_runtime import Executor

from ...models.random_models import images
from .test_gpu import compiled


def main() -> None:
    """Print the error of the broken program, that of another one behind it, and whether the CPU still computes."""
    model, program = compiled()
    plain = msgpack.unpackb(program.binary)
    last = plain["entries"][program.entries["main"].symbol][-1]
    last[4] = [[buffer, offset + 2**44] for buffer, offset in last[4]]
    x = images(2, 16)
    for run in (replace(program, binary=msgpack.packb(plain)), program):
        try:
            Executor(run, state_dict_numpy(model)).run([x.numpy()])
        except BackendError as error:
            print(error)
    (result,) = Executor(npu_compiler.compile(capture(model, (x,))), state_dict_numpy(model)).run([x.numpy()]).values()
    with torch.no_grad():
        print(np.abs(result - model(x).numpy()).max() < 1e-4)
