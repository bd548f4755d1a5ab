"""Loop nests that several targets generate in the same way."""
