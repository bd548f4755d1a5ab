"""The language of SIMT kernels: dialects, functions, scalar expressions, the layout of a program."""
