"""The plan: offsets, formats and sizes, held against the files really written."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from container.layout import TRUNK_ALIGNMENT, VQ2R, VQ3R, VQ4P, TrunkFormat
from container.manifest import Manifest
from container.reader import ContainerReader
from container.trunk import trunk_size
from convert.arch import detect
from convert.plan import OUTSIDE, plan_conversion, split_outside
from tests.checkpoints import k3_config, kimi_linear_config
from tests.convert.small import small_k3, small_kimi_linear

CONFIGS = {"k3": k3_config, "kimi_linear": kimi_linear_config, "small k3": small_k3, "small linear": small_kimi_linear}


@pytest.fixture(params=CONFIGS)
def plan(request):
    return plan_conversion(detect(CONFIGS[request.param]()), VQ3R, 4)


def test_trunk_slices_follow_one_another(plan):
    entries = plan.trunk
    assert entries[0].offset == 0
    assert all(entry.offset % TRUNK_ALIGNMENT == 0 for entry in entries)
    for before, after in pairwise(entries):
        gap = after.offset - (before.offset + before.n_bytes)
        assert 0 <= gap < TRUNK_ALIGNMENT
    assert plan.trunk_bytes == entries[-1].offset + entries[-1].n_bytes


def test_every_entry_has_its_formats_size(plan):
    for entry in plan.trunk:
        size = trunk_size(entry.shape, entry.fmt)
        assert entry.n_bytes == size.total_bytes
        if entry.fmt is TrunkFormat.F32:
            assert (entry.scale_offset, entry.n_bytes) == (None, 4 * prod(entry.shape))
        else:
            assert entry.scale_offset == entry.offset + size.values_bytes


def test_every_tensor_is_in_one_job(plan):
    names = [item.entry.name for job in plan.jobs for item in job.trunk]
    assert sorted(names) == sorted(tensor.name for tensor in plan.architecture.trunk)
    for job in plan.jobs:
        assert {item.tensor.layer for item in job.trunk} == {job.layer}
    assert [job.id for job in plan.jobs] == [OUTSIDE, *(f"L{n}" for n in range(plan.architecture.model.n_layers))]


def places(plan, n_shards):
    """A shard for each source tensor, a few at random and some tensors in two."""
    rng = random.Random(n_shards)
    names = [tensor.source for tensor in plan.architecture.trunk]
    return {name: frozenset(rng.choices(range(n_shards), k=rng.choice((1, 1, 1, 2)))) for name in names}


@pytest.mark.parametrize("n_shards", [1, 2, 5, 100])
def test_what_is_outside_the_layers_is_split_by_shards(plan, n_shards):
    """The files are those of the plan that is not split, and so is every job of a layer."""
    shards = places(plan, n_shards)
    split = split_outside(plan, shards.__getitem__)
    outside = [job for job in split.jobs if job.layer is None]
    assert split.jobs == (*outside, *plan.jobs[1:])
    assert split == replace(plan, jobs=split.jobs)
    assert (split.trunk, split.banks, split.file_bytes) == (plan.trunk, plan.banks, plan.file_bytes)
    assert [job.id for job in outside] == [f"{OUTSIDE}-{n}" for n in range(1, len(outside) + 1)]
    groups = [{shards[item.tensor.source] for item in job.trunk} for job in outside]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == len(outside)
    parts = [item for job in outside for item in job.trunk]
    assert sorted(parts, key=lambda item: item.entry.offset) == list(plan.jobs[0].trunk)
    for job in outside:
        assert job.trunk == tuple(item for item in plan.jobs[0].trunk if item in job.trunk)  # in their order
    firsts = [job.trunk[0].entry.offset for job in outside]
    assert firsts == sorted(firsts)


def test_labels():
    plan = plan_conversion(detect(small_k3()), VQ3R, 4)
    first = plan.jobs[0].trunk[0]
    alone = split_outside(plan, lambda tensor: frozenset({str(tensor == first.tensor.source)}))
    more = len(plan.jobs[0].trunk) - 2
    assert [job.label for job in alone.jobs] == [
        f"{first.entry.name}, outside the layers",
        f"{plan.jobs[0].trunk[1].entry.name} and {more} more outside the layers",
        *(f"layer {n}" for n in range(3)),
    ]


def test_codebook_bases_are_nine_apart(plan):
    model = plan.architecture.model
    assert {layer: bank.codebook_base for layer, bank in plan.banks.items()} == {
        layer: 9 * n for n, layer in enumerate(model.moe_layers)
    }


def test_selected_layers(plan):
    assert plan.selected(None) == plan.jobs
    assert [job.id for job in plan.selected(frozenset({2, 0}))] == ["L0", "L2"]


def by_suffix(plan, suffix):
    return {entry.fmt for entry in plan.trunk if entry.name.endswith(suffix)}


@pytest.mark.parametrize("bits", [4, 8])
def test_formats(bits):
    """Embedding, head, router and vision never below 8 bits; vectors and small tensors F32 (docs/FORMAT.md)."""
    plan = plan_conversion(detect(k3_config(hidden_size=512, num_experts=128)), VQ3R, bits)
    normal = TrunkFormat.Q4G if bits == 4 else TrunkFormat.Q8G
    for suffix in ("embed_tokens.weight", "lm_head.weight", "block_sparse_moe.gate.weight", "wqkv.weight"):
        assert by_suffix(plan, suffix) == {TrunkFormat.Q8G}, suffix
    for suffix in ("q_proj.weight", "layers.0.mlp.gate_proj.weight", "shared_experts.down_proj.weight"):
        assert by_suffix(plan, suffix) == {normal}, suffix
    for suffix in (
        "layernorm.weight",
        "A_log",
        "dt_bias",
        "conv1d.weight",
        "e_score_correction_bias",
        "res_proj.weight",
    ):
        assert by_suffix(plan, suffix) == {TrunkFormat.F32}, suffix
    assert all(prod(e.shape) >= 65536 and len(e.shape) > 1 for e in plan.trunk if e.fmt is not TrunkFormat.F32)


def test_the_patch_convolution_is_flattened():
    plan = plan_conversion(detect(k3_config()), VQ3R, 4)
    (entry,) = (entry for entry in plan.trunk if entry.name == "vision_tower.patch_embed.proj.weight")
    assert (entry.shape, entry.fmt) == ((128, 3 * 14 * 14), TrunkFormat.Q8G)


@pytest.mark.parametrize("quant", [VQ3R, VQ2R, VQ4P], ids=lambda quant: quant.fmt.name)
def test_sizes_follow_the_expert_format(quant):
    plan = plan_conversion(detect(k3_config()), quant, 4)
    rows_padded, vectors = 128, 128 // 8  # gate and up: 96 rows → 128; down: 128 rows × 96 / 8
    indices = (2 * rows_padded * vectors + 128 * (96 // 8)) * quant.vector_bytes
    stride = -(-(48 + indices + 2 * (96 + 96 + 128)) // 4096) * 4096
    assert {bank.n_bytes for bank in plan.banks.values()} == {8 * stride}
    assert plan.codebooks_bytes == 5 * 3 * quant.n_stages * (16 + 16 * quant.n_entries)


def test_weights_are_counted(family):
    plan = plan_conversion(detect(family.config), VQ3R, 4)
    with ContainerReader.open(family.output) as reader:
        trunk = sum(prod(entry.shape) for entry in reader.manifest.trunk)
        shapes = reader.model.expert_shapes.values()
        experts = len(reader.model.moe_layers) * reader.model.moe.n_experts * sum(map(prod, shapes))
    assert sum(job.n_weights for job in plan.jobs) == trunk + experts == family.summary.n_weights


def test_planned_sizes_are_the_written_ones(family):
    plan = plan_conversion(detect(family.config), VQ3R, 4)
    assert plan.file_bytes == {name: len(family.files[name]) for name in plan.file_bytes}
    assert (
        plan.total_bytes == sum(len(family.files[name]) for name in plan.file_bytes) == family.summary.container_bytes
    )
    rest = set(family.files) - set(plan.file_bytes)
    assert {"manifest.json", "report.json", "specials.json"} <= rest
    assert sum(len(family.files[name]) for name in rest) < 64 << 20


def test_the_manifest_lists_what_the_plan_says(family):
    plan = plan_conversion(detect(family.config), VQ3R, 4)
    manifest = Manifest.read(family.output)
    assert manifest.layers == plan.banks
    assert [(e.name, e.offset, e.n_bytes) for e in manifest.trunk] == [
        (e.name, e.offset, e.n_bytes) for e in plan.trunk
    ]


def test_a_model_without_experts_is_planned():
    config = small_kimi_linear(first_k_dense_replace=3)
    plan = plan_conversion(detect(config), VQ3R, 4)
    assert (plan.banks, plan.codebooks_bytes) == ({}, 0)
    assert json.dumps(plan.file_bytes)
