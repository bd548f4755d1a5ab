"""Language models: a compiled program with its caches, a tokenizer, sampling, and text."""
