"""Graph -> graph passes, one file a phase; :mod:`npu_compiler.pipeline` lists them in order."""
