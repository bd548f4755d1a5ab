"""npusim's command line on a machine whose GPU is the stand-in.

``python -m tests.support.metal_api generate smollm2-135m --target metal --dtype float32 -p "The capital of France is"``
"""

from __future__ import annotations

import sys

from npusim import cli

from .device import Device, installed

if __name__ == "__main__":
    with installed(Device()):
        sys.exit(cli.main(sys.argv[1:]))
