"""Where experts are encoded, by name: the processor or a GPU. What a GPU needs is reckoned here, without torch."""

from __future__ import annotations

import re

CPU = "cpu"
# The GPU's path run on the processor, so that machines without a GPU can test it; far slower than CPU.
TORCH_CPU = "torch-cpu"

# Host threads that use the device at once, each with a stream of its own: while one encodes, the other copies and
# packs. They bound the device's memory.
STREAMS = 2
# Weights of the rows that are on the device at once per stream; one matrix of a K3 expert has 11 million.
STRIP_WEIGHTS = 1 << 24
# Processes on one GPU unless the user says otherwise; see prepare.
DEVICE_WORKERS = 2
# Temporaries of a strip outside the search, in bytes per weight: f32 rows, and f64 copies for the sums.
STRIP_BYTES_PER_WEIGHT = 40
# Temporaries of the search, which takes the vectors of a strip in pieces.
SEARCH_BYTES = 512 << 20
# What CUDA takes on the device for a process, and what torch and CUDA take of the host's memory.
CONTEXT_BYTES = 640 << 20
HOST_BYTES = 2 << 30


def is_device(name: str) -> bool:
    """Whether `name` can be chosen: cpu, cuda, cuda:N, or torch-cpu."""
    return name in (CPU, TORCH_CPU) or re.fullmatch(r"cuda(:[0-9]{1,3})?", name) is not None


def kind_of(name: str) -> str:
    """The device without its number: what decides the bytes."""
    return name.partition(":")[0]


def device_memory() -> int:
    """Most bytes of the device that one worker takes, whatever the model."""
    return CONTEXT_BYTES + STREAMS * (SEARCH_BYTES + STRIP_WEIGHTS * STRIP_BYTES_PER_WEIGHT)
