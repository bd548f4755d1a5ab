"""Placement of nodes on the NPU or the host: constraints, partitions, explanations."""
