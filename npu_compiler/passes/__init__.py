"""Passes from graph to graph, one file each; :mod:`npu_compiler.pipeline` runs them in order."""
