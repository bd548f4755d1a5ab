"""Execution of partitioned models: NPU programs, and PyTorch for the host partitions."""
