"""The op registry. Importing it declares every op: the modules of this package are imported, one for each family."""

from importlib import import_module
from pkgutil import iter_modules

from .registry import REGISTRY, OpDef, Result, find, get_supported_ops, is_op_supported, lower_call, result_of

__all__ = [
    "REGISTRY", "OpDef", "Result", "find", "get_supported_ops", "is_op_supported", "lower_call", "result_of",
]  # fmt: skip

for _module in sorted(m.name for m in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
