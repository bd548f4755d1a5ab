"""What runs on the NPU and what does not: constraints, partitions, explanations."""
