"""The op registry. Importing it declares every op: the modules of this package are imported, one for each family."""

from importlib import import_module
from pkgutil import iter_modules

from .registry import REGISTRY, OpDef, find, get_supported_ops, is_op_supported, lower_call

__all__ = ["REGISTRY", "OpDef", "find", "get_supported_ops", "is_op_supported", "lower_call"]

for _module in sorted(m.name for m in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
