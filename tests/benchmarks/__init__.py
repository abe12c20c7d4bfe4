"""Benchmarks, printed as ratios of things measured side by side; nothing here asserts a time."""
