"""Panics of libraries written in Rust."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a Rust panic. It is a ``BaseException`` whose class cannot be imported."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)
