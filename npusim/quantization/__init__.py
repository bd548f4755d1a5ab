"""Static post-training quantisation of convolutional networks: ranges from sample inputs, then 8-bit operands."""
