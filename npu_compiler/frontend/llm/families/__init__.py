"""Families of decoders, one file each; ``family.py`` finds and explains them."""
