"""Fuzzers: damaged and hostile files of every kind the project reads. A case passes if it works or raises NPUError.

``pytest tests/fuzz --fuzz-cases N`` (or ``NPU_FUZZ_CASES``) runs N cases of each kind in one process;
``python -m tests.fuzz KIND --cases N --jobs J`` runs them in worker processes that may hang, run out of memory or die.
A kind is a module in ``tests/fuzz/kinds/`` with a function ``case(rng, folder)``.
"""
