"""Arithmetic on weights as they are stored, spread over a team of threads."""
