"""Panics of libraries that are written in Rust."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether Rust code gave up on a bug of its own. Such an exception is not an ``Exception``, and its class has no
    name that could be imported."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)
