"""Kernels of SIMT targets: each file chooses sizes and instantiates its template."""
