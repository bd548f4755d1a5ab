"""Static post-training quantisation of convolutional networks: ranges from sample inputs, then 8-bit operands."""

METHODS = ("minmax", "mse", "percentile")  # of choosing the range of an activation: see ranges.py
