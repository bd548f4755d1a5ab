"""The kinds of buffers of a program. :class:`npu_compiler.schedule.buffers.Buffer` says what each is."""

CONSTANT = ("weight", "const")  # filled when weights are loaded
READ_ONLY = ("input", *CONSTANT)  # filled before the first kernel runs; no kernel writes them
SHARED = (*CONSTANT, "state")  # by all entry points of a program
KINDS = (*READ_ONLY, "output", "state", "arena")
