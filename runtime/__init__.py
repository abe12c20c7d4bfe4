"""Runs a container: token ids in, logits out, experts read from disk one record at a time."""
