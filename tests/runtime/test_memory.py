"""The memory plan: against the figures published for Kimi K3, and against what the runtime really holds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import MoedockError
from container.layout import (
    ALIGNMENT,
    MIN_QUANTISED_ELEMENTS,
    TRUNK_ALIGNMENT,
    VQ3R,
    TrunkFormat,
    align_up,
    bank_name,
)
from container.manifest import BankEntry, Manifest, TrunkEntry
from container.model import ModelConfig, canonical_config
from container.reader import ContainerReader
from container.records import RecordLayout
from container.trunk import trunk_size
from runtime.memory.plan import (
    EMBEDDING_NAME,
    MemoryPlan,
    merged_ranges,
    minimum_slots,
    plan_memory,
    resident_entries,
)
from runtime.models.kimi import tensor_needs
from runtime.options import RunOptions
from runtime.state import SequenceState
from tests.checkpoints import K3_DIMENSIONS, k3_config
from tests.checkpoints.inventory import tensor_table

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
ROUTER = "block_sparse_moe.gate.weight"
# published: context → smallest budget in GiB
PUBLISHED_FLOORS = {4096: 29.05, 32_768: 30.54, 131_072: 35.63, 1_048_576: 83.21}
PUBLISHED_TRUNK = 27.28
PUBLISHED_WORKING_SET = 17.0


def real_k3() -> ModelConfig:
    return ModelConfig.from_config(canonical_config(k3_config(**K3_DIMENSIONS)))


def trunk_entries(config: dict[str, Any], *, router: TrunkFormat) -> tuple[TrunkEntry, ...]:
    """Trunk entries without bytes: the formats of docs/FORMAT.md, the router's as given."""
    entries, offset = [], 0
    few = config | {"num_experts": 16}  # listing half a million expert tensors would take seconds
    for spec in tensor_table(k3_config(**few)):
        if ".experts." in spec.name:
            continue
        # a convolution kernel of an image is stored flattened
        shape = (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) == 4 else spec.shape
        if spec.name.endswith((ROUTER, "e_score_correction_bias")):
            shape = (config["num_experts"], *shape[1:])
        fmt = TrunkFormat.Q4G
        if len(shape) == 1 or math.prod(shape) < MIN_QUANTISED_ELEMENTS:
            fmt = TrunkFormat.F32
        elif spec.name.endswith(("embed_tokens.weight", "lm_head.weight")) or spec.name.startswith(("vision", "mm_")):
            fmt = TrunkFormat.Q8G
        elif spec.name.endswith(ROUTER):
            fmt = router
        offset, size = align_up(offset, TRUNK_ALIGNMENT), trunk_size(shape, fmt)
        scale_offset = None if fmt is TrunkFormat.F32 else offset + size.values_bytes
        entries.append(
            TrunkEntry(
                name=spec.name,
                fmt=fmt,
                shape=shape,
                offset=offset,
                n_bytes=size.total_bytes,
                scale_offset=scale_offset,
            )
        )
        offset += size.total_bytes
    return tuple(entries)


def k3_manifest(router: TrunkFormat) -> Manifest:
    model = real_k3()
    bank_bytes = RecordLayout(VQ3R, model.expert_shapes).stride_bytes * model.moe.n_experts
    return Manifest(
        arch="kimi-k3",
        tensor_prefix="language_model.",
        config={},
        expert_quant=VQ3R,
        layers={
            layer: BankEntry(
                file=bank_name(layer), n_experts=model.moe.n_experts, n_bytes=bank_bytes, codebook_base=9 * layer
            )
            for layer in model.moe_layers
        },
        trunk=trunk_entries(K3_DIMENSIONS, router=router),
    )


@pytest.fixture(scope="module", params=[TrunkFormat.Q4G, TrunkFormat.Q8G], ids=["router-4-bit", "router-8-bit"])
def k3_release(request: pytest.FixtureRequest) -> Manifest:
    """Kimi K3 in real shapes, with the router as the published container has it (4 bits) and as ours has it (8)."""
    return k3_manifest(request.param)


def k3_plan(manifest: Manifest, context: int) -> MemoryPlan:
    return plan_memory(manifest, real_k3(), RunOptions(context=context), n_threads=4)


def test_the_published_trunk_is_everything_but_embedding_and_vision_with_a_4_bit_router() -> None:
    published = k3_manifest(TrunkFormat.Q4G)
    resident = resident_entries(published)
    assert sum(entry.n_bytes for entry in resident) / GIB == pytest.approx(PUBLISHED_TRUNK, abs=0.005)
    # our 8-bit router: 92 layers × 896 × 7168 weights, half a byte more each
    ours = sum(entry.n_bytes for entry in resident_entries(k3_manifest(TrunkFormat.Q8G)))
    assert ours - sum(entry.n_bytes for entry in resident) == 92 * 896 * 7168 // 2
    assert ours / GIB == pytest.approx(27.56, abs=0.005)
    # what is left out is not little
    left_out = {entry.name for entry in published.trunk} - {entry.name for entry in resident}
    assert {name.split(".")[0] for name in left_out} == {"language_model", "vision_tower", "mm_projector"}
    assert [name for name in left_out if name.startswith("language_model.")] == [f"language_model.{EMBEDDING_NAME}"]


def test_published_floors(k3_release: Manifest) -> None:
    for context, gib in PUBLISHED_FLOORS.items():
        assert k3_plan(k3_release, context).floor_bytes / GIB == pytest.approx(gib, rel=0.03)


def test_published_growth_and_working_set(k3_release: Manifest) -> None:
    short, long = k3_plan(k3_release, 4096), k3_plan(k3_release, 1_048_576)
    # 24 layers × (512 + 64) f32; the published engine keeps a score per head of one layer too: 96 × 4 bytes
    assert short.latent_bytes_per_position == 24 * 576 * 4 == 55_680 - 96 * 4
    assert long.floor_bytes - short.floor_bytes == (1_048_576 - 4096) * short.latent_bytes_per_position
    assert short.working_set_bytes == 16 * 92 * 12_406_784
    assert short.working_set_bytes / GIB == pytest.approx(PUBLISHED_WORKING_SET, abs=0.01)


def test_the_shapes_are_the_release_s() -> None:
    path = ROOT.parent / "shared" / "data" / "k3" / "config.json"
    if not path.is_file():
        pytest.skip("the release's config.json is not here")
    assert ModelConfig.from_config(canonical_config(json.loads(path.read_text()))) == real_k3()


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
def test_what_is_resident_is_what_the_model_reads(family: str, request: pytest.FixtureRequest) -> None:
    with ContainerReader.open(request.getfixturevalue(family)) as reader:
        prefix = reader.manifest.tensor_prefix
        resident = {entry.name.removeprefix(prefix) for entry in resident_entries(reader.manifest)}
        needed = set(tensor_needs(reader.model)) - {EMBEDDING_NAME}
    assert needed <= resident
    unused = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert resident - needed == (unused if family == "k3" else set())


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
def test_the_state_is_as_large_as_planned(family: str, request: pytest.FixtureRequest) -> None:
    with ContainerReader.open(request.getfixturevalue(family)) as reader:
        plan = plan_memory(reader.manifest, reader.model, RunOptions(context=77), n_threads=1)
        state = SequenceState.empty(reader.model, 77)
    for position in (0, 1, 77):
        state.resume_at(position)
        assert state.n_bytes == plan.kda_state_bytes + position * plan.latent_bytes_per_position
    assert state.n_bytes == plan.kda_state_bytes + plan.latent_bytes
    with pytest.raises(MoedockError, match="--ctx 78"):
        state.resume_at(78)


@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 50_000)), min_size=1, max_size=20))
def test_ranges_cover_every_tensor_once(places: list[tuple[int, int]]) -> None:
    """Tensors at some distance from one another; the last but one of every four reaches over the next."""
    entries, offset = [], 0
    for n, (gap, n_elements) in enumerate(places):
        offset += gap
        n_bytes = 4 * (n_elements + (300_000 if n % 4 == 2 else 0))
        entries.append(
            TrunkEntry(name=f"t{n}", fmt=TrunkFormat.F32, shape=(n_bytes // 4,), offset=offset, n_bytes=n_bytes)
        )
        offset += 4 * n_elements
    ranges = merged_ranges(entries)
    assert [entry for part in ranges for entry in part.entries] == entries
    for part in ranges:
        assert part.start % ALIGNMENT == part.stop % ALIGNMENT == 0
        assert all(part.start <= e.offset and e.offset + e.n_bytes <= part.stop for e in part.entries)
        # neither a large hole nor what lies before or behind is read
        covered = sorted((e.offset, e.offset + e.n_bytes) for e in part.entries)
        ends = accumulate((end for _, end in covered), max)
        assert all(start - end <= MOST_GAP for end, (start, _) in zip(ends, covered[1:], strict=False))
        assert part.n_bytes <= max(end for _, end in covered) - covered[0][0] + 2 * ALIGNMENT
    assert all(one.stop < other.start for one, other in pairwise(ranges))


MOST_GAP = (64 << 10) + 2 * ALIGNMENT


@given(st.integers(0, 200 * GIB), st.integers(0, 200 * GIB))
def test_a_budget_is_never_overdrawn(one: int, more: int) -> None:
    plan = FIXED
    small, large = (plan.n_slots(plan.floor_bytes + extra) for extra in (one, one + more))
    assert plan.minimum_slots <= small <= large <= plan.n_experts
    assert plan.cache_bytes(plan.floor_bytes + one) == small * plan.stride_bytes
    taken = plan.floor_bytes - plan.minimum_cache_bytes + small * plan.slot_bytes
    assert taken <= plan.floor_bytes + one
    if small < plan.n_experts:  # and less than one expert is left over
        assert taken > plan.floor_bytes + one - plan.slot_bytes


def test_room_for_a_layer_and_as_much_read_ahead() -> None:
    assert minimum_slots(8, 6656) == 16
    assert minimum_slots(8, 12) == 12


FIXED = plan_memory(k3_manifest(TrunkFormat.Q8G), real_k3(), RunOptions(), n_threads=2)


def test_planning_needs_no_compiled_code() -> None:
    modules = "runtime.memory.plan, runtime.memory.budget, runtime.memory.report"
    code = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
