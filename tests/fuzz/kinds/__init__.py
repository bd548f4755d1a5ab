"""One module a kind of input; :func:`tests.fuzz.harness.kinds` finds them by file name."""
