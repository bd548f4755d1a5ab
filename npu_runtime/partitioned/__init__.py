"""Running a partitioned model: NPU programs, and PyTorch for the rest."""
