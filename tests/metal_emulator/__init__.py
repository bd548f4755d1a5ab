"""Runs Metal compute kernels on the CPU, and says what is wrong with them. See README.md."""

from .library import ORDERS, EmulatorError, Function, Library, Window
from .msl import translate
from .tokens import MSLError

__all__ = ["ORDERS", "EmulatorError", "Function", "Library", "MSLError", "Window", "translate"]
