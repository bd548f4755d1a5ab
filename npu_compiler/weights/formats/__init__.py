"""The weight formats of this package: each module has a ``FORMAT`` (see ``weights/format.py``)."""
