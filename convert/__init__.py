"""A checkpoint in, a container out: `python -m convert`. The work itself is in `run`."""
