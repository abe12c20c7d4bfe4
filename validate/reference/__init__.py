"""The PyTorch baseline: the forward pass of the Kimi family and the decoding of every stored format.

Obvious and slow on purpose, and free of the arithmetic it checks: it imports `container` for facts about
files and configs, never `convert` or `runtime`.
"""
