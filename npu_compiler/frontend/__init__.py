"""PyTorch models to IR. Importing this package imports torch."""

from npu_compiler.frontend.capture import capture
from npu_compiler.frontend.tensors import state_dict_numpy

__all__ = ["capture", "state_dict_numpy"]
