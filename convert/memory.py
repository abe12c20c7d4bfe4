"""How much memory a worker takes: an upper estimate from the plan, checked against measurements in the tests."""

from __future__ import annotations

import math

from container.layout import VEC_DIM
from convert.device import CPU, HOST_BYTES
from convert.experts import SAMPLE_BYTES, SAMPLE_EXPERTS
from convert.plan import ConversionPlan
from convert.quality import LARGEST_SAMPLE_VECTORS
from convert.trunk import STRIP_WEIGHTS

# Interpreter, numpy, faiss and compiled kernels (measured: 0.20 GiB), and what allocators keep.
BASE_BYTES = 320 << 20
# Source bytes per weight at the widest dtype we read (F32); the sample is bounded by SAMPLE_BYTES anyway.
SOURCE_BYTES_PER_WEIGHT = 4
# f32 copies of a training sample alive at once per kind: vectors, residual, faiss's input, labels and distances.
TRAINING_COPIES = 4
# f32 temporaries of one trunk strip, per strip in flight.
STRIP_COPIES = 10
STRIPS_IN_FLIGHT = 4


def worker_memory(plan: ConversionPlan, device: str = CPU) -> int:
    """Peak bytes of one worker, whatever the number of layers; a device's own memory is not among them."""
    trunk = STRIPS_IN_FLIGHT * STRIP_COPIES * 4 * STRIP_WEIGHTS
    layouts = [job.experts.layout for job in plan.jobs if job.experts is not None]
    experts = 0
    for layout in layouts[:1]:  # all layers have the same shapes
        expert_bytes = SOURCE_BYTES_PER_WEIGHT * sum(math.prod(shape) for shape in layout.shapes.values())
        sample = max(expert_bytes, min(SAMPLE_EXPERTS * expert_bytes, SAMPLE_BYTES))
        training = 3 * TRAINING_COPIES * 4 * VEC_DIM * LARGEST_SAMPLE_VECTORS
        in_flight = 2 * (expert_bytes + 3 * layout.stride_bytes)
        experts = sample + max(training, in_flight)
    return BASE_BYTES + (0 if device == CPU else HOST_BYTES) + max(trunk, experts)
