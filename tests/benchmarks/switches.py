"""Every switch of the runtime against the PyTorch reference, on small models of both families: one table of errors.

Threads, lookahead, the size of the cache and the checking of records place work and reads; they must change no bit of
the base run. A prompt token by token adds up in another order than in chunks. The reference computes in float64 from
the same container. Run as `python -m tests.benchmarks.switches`; a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from container.layout import VQ3R, VQ4P
from tests.containers import build_container, k3_config, kimi_linear_config
from tests.runtime.switches import Compared, compared

MODELS = {
    "K3, VQ3R": (k3_config(num_experts_per_token=4), VQ3R),
    "K3, VQ4P": (k3_config(num_experts_per_token=4), VQ4P),
    "Kimi-Linear, VQ3R": (kimi_linear_config(num_experts_per_token=4), VQ3R),
}
N_IDS = 70
TOLERANCE = 1e-5


def main() -> int:
    ids = np.random.default_rng(0).integers(0, 640, N_IDS).tolist()
    print(f"\n{N_IDS} tokens against the reference in float64, relative errors", flush=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as folder:
        for name, (config, quant) in MODELS.items():
            container = build_container(Path(folder) / name, config, quant=quant)
            print(f"{name}\n{'':75}{'logits':>10}{'worst layer':>13}{'experts':>10}   bits of its base", flush=True)
            for found in compared(container, ids):
                print(line(found), flush=True)
                good &= found.same_bits and found.same_routing and found.logits_error < TOLERANCE
    print("as they should be" if good else "NOT as they should be")
    return 0 if good else 1


def line(found: Compared) -> str:
    routing, bits = ("equal" if same else "DIFFER" for same in (found.same_routing, found.same_bits))
    return f"{found.switches!s:75}{found.logits_error:10.1e}{found.worst_layer_error:13.1e}{routing:>10}   {bits}"


if __name__ == "__main__":
    sys.exit(main())
