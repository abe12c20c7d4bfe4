"""Every kind of damage is found and named; what is whole passes, whoever wrote it."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.layout import CODEBOOK_HEADER, CODEBOOKS_NAME, EXPERT_QUANTS, TRUNK_NAME, TrunkFormat
from container.manifest import Manifest, TrunkEntry
from container.model import ModelConfig, canonical_config
from container.reader import ContainerReader
from convert.arch import detect
from tests.checkpoints import tensor_table
from tests.containers import build_container, k3_config, kimi_linear_config
from tests.strategies import damaged, with_hostile_value
from tests.validate.damage import CRC32_OFFSET, edit_manifest, flip, layout_of, overwrite, seal
from validate import structure as structure_module
from validate.expected import trunk_tensors
from validate.report import MAX_LISTED, Findings, StructureReport
from validate.structure import check_structure

BANK = "experts-L1.bin"
SPECIALS = json.dumps([{"id": 3, "text": "<end>"}]).encode()
REAL_K3 = Path(__file__).parents[3] / "shared" / "data" / "k3" / "config.json"


def check(folder: Path, **options: Any) -> tuple[StructureReport, Findings]:
    options = {"n_threads": 2, **options}
    return check_structure(folder, **options, stream=io.StringIO())


def problems(folder: Path) -> list[str]:
    report, findings = check(folder)
    assert report.ok == (findings.n_problems == 0) == (not findings.problems)
    return findings.problems


def the_problem(folder: Path) -> str:
    (problem,) = problems(folder)
    return problem


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, one of them with four experts, all trunk formats, gaps in the trunk; never changed."""
    config = kimi_linear_config(num_hidden_layers=2, num_experts=4, hidden_size=128)
    folder = tmp_path_factory.mktemp("pristine") / "container"
    return build_container(folder, config, min_quantised_elements=4096, files={"specials.json": SPECIALS})


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "container"))


def entries(folder: Path, fmt: TrunkFormat | None = None) -> list[TrunkEntry]:
    trunk = sorted(Manifest.read(folder).trunk, key=lambda entry: entry.offset)
    return [entry for entry in trunk if fmt in (None, entry.fmt)]


# what is whole


@pytest.mark.parametrize("which", ["k3", "kimi_linear"])
def test_what_the_converter_writes_is_whole(request, which):
    made = request.getfixturevalue(which)
    report, findings = check(made.container)
    assert (findings.problems, findings.notes) == ([], [])
    with ContainerReader.open(made.container) as reader:
        n_records = len(reader.model.moe_layers) * reader.model.moe.n_experts
        n_trunk = len(reader.trunk)
    files = [path for path in made.container.iterdir() if path.name != "manifest.json"]
    assert report == StructureReport(
        ok=True,
        n_files=len(files) + 1,
        n_records=n_records,
        n_codebooks=9 * n_records // 8,
        n_trunk_tensors=n_trunk,
        n_checksums=n_records
        + n_trunk
        + len([path for path in files if path.name not in ("chat.json", "report.json", "report.html")]),
        bytes_read=sum(path.stat().st_size for path in files),
        seconds=report.seconds,
    )


@pytest.mark.parametrize("quant", EXPERT_QUANTS.values(), ids=lambda quant: quant.fmt.name)
@pytest.mark.parametrize("config", [k3_config, kimi_linear_config])
def test_a_container_of_another_writer_is_whole_without_checksums(tmp_path, config, quant):
    build_container(tmp_path, config(num_hidden_layers=2), quant=quant, checksums=False)
    report, findings = check(tmp_path)
    assert findings.problems == []
    assert len(findings.notes) == 1
    assert "no checksums" in findings.notes[0]
    assert report.n_checksums == report.n_records == 8


def test_a_file_without_checksum_is_noted_where_others_have_one(folder):
    edit_manifest(folder, lambda manifest: manifest["files"].pop(TRUNK_NAME))
    report, findings = check(folder)
    assert report.ok
    assert findings.notes == [f"{folder / TRUNK_NAME}: the manifest has no checksum of this file"]


# one byte, anywhere


def regions(folder: Path) -> list[tuple[str, int, int, str]]:
    """(file, first byte, end, what a message about it must name) of every region of every file but the manifest."""
    manifest, layout = Manifest.read(folder), layout_of(folder)
    found = []
    for expert in range(4):
        start = expert * layout.stride_bytes
        payload_end = layout.scales_offset + layout.scales_bytes
        fields = [0, 4, 6, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 44, 48, layout.index_offsets["up"]]
        bounds = [*fields, layout.index_offsets["down"], layout.scales_offset, payload_end, layout.stride_bytes]
        for first, end in itertools.pairwise(bounds):
            found.append((BANK, start + first, start + end, f"layer 1 expert {expert}"))
    book_bytes = CODEBOOK_HEADER.size + 16 * manifest.expert_quant.n_entries
    for book in range(9):
        for first, end in ((0, 4), (4, 6), (6, 7), (7, 8), (8, 12), (12, 16)):
            found.append((CODEBOOKS_NAME, book * book_bytes + first, book * book_bytes + end, f"codebook {book}:"))
        found.append((CODEBOOKS_NAME, book * book_bytes + 16, (book + 1) * book_bytes, "sha256"))
    position = 0
    for entry in entries(folder):
        if entry.offset > position:
            found.append((TRUNK_NAME, position, entry.offset, f"and {entry.name}, are not 0"))
        position = entry.offset + entry.n_bytes
        middle = entry.scale_offset or position
        found.append((TRUNK_NAME, entry.offset, middle, entry.name))
        if middle < position:
            found.append((TRUNK_NAME, middle, position, entry.name))
    assert position == (folder / TRUNK_NAME).stat().st_size
    return [*found, ("specials.json", 0, len(SPECIALS), "sha256")]


def test_a_changed_byte_is_found_and_named_in_every_region(folder):
    found = regions(folder)
    assert sum("are not 0" in what for *_, what in found) >= 2, "the trunk must have gaps"
    assert len(found) > 150
    rng = np.random.default_rng(1)
    for name, first, end, what in found:
        for offset in {first, end - 1, int(rng.integers(first, end))}:
            flip(folder / name, offset)
            listed = problems(folder)
            about = [problem for problem in listed if what in problem and str(folder / name) in problem]
            assert about, f"byte {offset} of {name} ({what}) changed, found {listed}"
            flip(folder / name, offset)
    assert problems(folder) == []


@settings(max_examples=40)
@given(st.data())
def test_any_damage_to_a_file_is_found(pristine, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged") / "container"
    shutil.copytree(pristine, folder, copy_function=os.link)
    name = data.draw(st.sampled_from([BANK, CODEBOOKS_NAME, TRUNK_NAME, "specials.json"]))
    content = (pristine / name).read_bytes()
    changed = data.draw(damaged(content))
    (folder / name).unlink()
    (folder / name).write_bytes(changed)
    listed = problems(folder)
    shutil.rmtree(folder)
    assert bool(listed) == (changed != content)
    assert not listed or str(folder / name) in "".join(listed)


# whole files


@pytest.mark.parametrize("name", [BANK, CODEBOOKS_NAME, TRUNK_NAME, "specials.json"])
def test_a_truncated_a_longer_and_a_missing_file(folder, name):
    path = folder / name
    n_bytes = path.stat().st_size
    for change, message in ((-1, "truncated"), (5, "longer")):
        os.truncate(path, n_bytes + change)
        assert f"{path}: {n_bytes} bytes expected, found {n_bytes + change}: {message}" in "\n".join(problems(folder))
        os.truncate(path, n_bytes)
    path.unlink()
    assert f"{path}: missing" in problems(folder)


def test_a_truncated_trunk_names_the_tensors_that_lack_bytes(folder):
    last, (path, n_bytes) = entries(folder)[-1], (folder / TRUNK_NAME, (folder / TRUNK_NAME).stat().st_size)
    os.truncate(path, n_bytes - 1)
    assert problems(folder)[0] == (
        f"{path}: {last.name}: takes bytes {last.offset} to {n_bytes}, the file has {n_bytes - 1}"
    )


@pytest.mark.parametrize("checksums", [True, False])
def test_every_record_before_the_truncation_is_still_checked(tmp_path, checksums):
    build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), checksums=checksums)
    stride = layout_of(tmp_path).stride_bytes
    os.truncate(tmp_path / BANK, 8 * stride - 1)
    flip(tmp_path / BANK, 6 * stride + 100)
    assert "layer 1 expert 6: crc32" in "".join(problems(tmp_path))
    assert check(tmp_path)[0].n_records == 7


def test_a_folder_or_pipe_in_place_of_a_file(folder):
    (folder / BANK).unlink()
    (folder / BANK).mkdir()
    (folder / TRUNK_NAME).unlink()
    os.mkfifo(folder / TRUNK_NAME)
    listed = "\n".join(problems(folder))
    assert f"{folder / BANK}: is not a regular file" in listed
    assert f"{folder / TRUNK_NAME}: is not a regular file" in listed


def test_files_that_nothing_describes_are_noted_and_leftovers_are_problems(folder):
    (folder / "README").write_text("mine")
    (folder / "usage.waste").write_bytes(b"")
    report, findings = check(folder)
    assert report.ok
    assert findings.notes == [f"{folder / 'README'}: not part of the container; nothing describes it"]
    (folder / ".build").mkdir()
    (folder / ".trunk.bin.0a1b2c3d.tmp").touch()
    listed = problems(folder)
    assert [line.split(":")[0] for line in listed] == [str(folder / ".build"), str(folder / ".trunk.bin.0a1b2c3d.tmp")]
    assert "run the same conversion command again" in listed[0]


def test_an_unfinished_conversion_has_no_manifest(folder):
    (folder / "manifest.json").unlink()
    (folder / ".build").mkdir()
    listed = problems(folder)
    assert len(listed) == 2
    assert "manifest.json: no such file" in listed[1]


def test_no_container_at_all(tmp_path):
    assert "manifest.json: no such file" in the_problem(tmp_path / "nowhere")


# records


def test_swapped_records(folder):
    stride = layout_of(folder).stride_bytes
    content = (folder / BANK).read_bytes()
    overwrite(folder / BANK, 0, content[stride : 2 * stride] + content[:stride])
    seal(folder)
    assert problems(folder) == [
        f"{folder / BANK}: layer 1 expert 0: expert is 0x1, expected 0x0",
        f"{folder / BANK}: layer 1 expert 1: expert is 0x0, expected 0x1",
    ]


def test_a_wrong_layer_in_a_header_whose_checksum_is_right(folder):
    stride = layout_of(folder).stride_bytes
    overwrite(folder / BANK, 2 * stride + 4, b"\x07\x00")
    seal(folder)
    assert the_problem(folder) == f"{folder / BANK}: layer 1 expert 2: layer is 0x7, expected 0x1"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("kind", "row"), [("gate", 0), ("up", 5), ("down", 127)])
def test_a_channel_scale_that_is_no_number(folder, value, kind, row):
    layout = layout_of(folder)
    before = {"gate": 0, "up": 96, "down": 192}[kind]
    offset = layout.stride_bytes + layout.scales_offset + 2 * (before + row)
    overwrite(folder / BANK, offset, np.float16(value).tobytes())
    seal(folder)
    assert the_problem(folder) == (
        f"{folder / BANK}: layer 1 expert 1 {kind}: 1 channel scale(s) are NaN or infinite, the first of row {row}"
    )


def test_padding_and_reserved_fields_with_right_checksums(folder):
    layout = layout_of(folder)
    flip(folder / BANK, layout.stride_bytes - 1)
    flip(folder / BANK, layout.stride_bytes + 44)
    seal(folder)
    first, second = problems(folder)
    assert f"expert 0: byte {layout.stride_bytes - 1} of the record lies in its padding" in first
    assert "expert 1: the reserved header fields are 0x0, 0x0, 0x10, expected 0" in second


# codebooks


def test_codebooks_out_of_order_and_not_finite(folder):
    path = folder / CODEBOOKS_NAME
    size = path.stat().st_size // 9
    content = path.read_bytes()
    overwrite(path, 3 * size, content[4 * size : 5 * size] + content[3 * size : 4 * size])
    overwrite(path, 8 * size + 16, np.float16(np.nan).tobytes())
    seal(folder)
    assert problems(folder) == [
        f"{path}: codebook 3: id is 0x4, expected 0x3",
        f"{path}: codebook 4: id is 0x3, expected 0x4",
        f"{path}: codebook 8: an entry is NaN or infinite",
    ]


def test_codebooks_that_two_layers_share_or_nobody_has(tmp_path):
    build_container(tmp_path, kimi_linear_config(num_hidden_layers=3), checksums=False)
    path = tmp_path / CODEBOOKS_NAME
    path.write_bytes(path.read_bytes() + b"\0")
    assert f"{path}: 1 bytes follow the last whole codebook" in the_problem(tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest["layers"]["2"].update(codebook_base=13))
    listed = "\n".join(problems(tmp_path))
    assert f"{path}: layer 2 needs codebooks 13 to 21, the file holds 18" in listed
    edit_manifest(tmp_path, lambda manifest: manifest["layers"]["2"].update(codebook_base=5))
    listed = "\n".join(problems(tmp_path))
    assert "layer 2 takes codebooks 5 to 13, of which another layer has some" in listed


def test_more_codebooks_than_the_layers_use_are_noted(folder):
    path = folder / CODEBOOKS_NAME
    content = path.read_bytes()
    extra = bytearray(content[: len(content) // 9])
    extra[4:6] = (9).to_bytes(2, "little")
    path.write_bytes(content + extra)
    seal(folder)
    report, findings = check(folder)
    assert report.ok
    assert findings.notes == [f"{path}: 1 codebook(s) belong to no layer"]


# trunk


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_a_number_in_the_trunk_that_is_none(folder, fmt):
    entry = entries(folder, fmt)[-1]
    bad = np.float32(np.nan) if entry.scale_offset is None else np.float16(np.inf)
    overwrite(folder / TRUNK_NAME, entry.scale_offset or entry.offset, bad.tobytes())
    seal(folder)
    what = "values" if fmt is TrunkFormat.F32 else "group scales"
    assert the_problem(folder) == f"{folder / TRUNK_NAME}: {entry.name}: {what} are NaN or infinite"


def test_trunk_tensors_that_are_missing_unknown_or_misshapen(tmp_path):
    missing = ("model.norm.weight", "model.layers.1.block_sparse_moe.gate.weight")
    build_container(tmp_path, k3_config(num_hidden_layers=2), drop=missing)

    def edit(manifest: dict[str, Any]) -> None:
        trunk = {entry["name"]: entry for entry in manifest["trunk"]}
        trunk["language_model.model.layers.0.self_attn.b_proj.weight"]["shape"] = [256, 4]
        trunk["vision_tower.encoder.blocks.1.wo.weight"]["name"] = "vision_tower.encoder.blocks.2.wo.weight"

    edit_manifest(tmp_path, edit)
    where = f"{tmp_path / 'manifest.json'}: trunk tensor"
    assert sorted(problems(tmp_path)) == sorted(
        [
            f"{where} language_model.model.layers.0.self_attn.b_proj.weight has shape [256, 4], expected [4, 256]",
            f"{where} vision_tower.encoder.blocks.2.wo.weight is not part of this model",
            *(
                f"{where} {name}.weight is missing, expected with shape {shape}"
                for name, shape in (
                    ("language_model.model.layers.1.block_sparse_moe.gate", [8, 256]),
                    ("language_model.model.norm", [256]),
                    ("vision_tower.encoder.blocks.1.wo", [128, 192]),
                )
            ),
        ]
    )


def test_a_tensor_with_and_without_its_prefix(tmp_path):
    build_container(tmp_path, k3_config(num_hidden_layers=2))
    name = "model.norm.weight"

    def double(manifest: dict[str, Any]) -> None:
        entry = next(each for each in manifest["trunk"] if each["name"] == f"language_model.{name}")
        manifest["trunk"].append(entry | {"name": name})

    edit_manifest(tmp_path, double)
    listed = "\n".join(problems(tmp_path))
    assert f"trunk tensor language_model.{name} is there twice, with and without its prefix" in listed


def test_tensors_that_overlap_or_leave_a_hole(folder):
    trunk = entries(folder)
    moved = next(n for n, entry in enumerate(trunk) if n and entry.fmt is TrunkFormat.F32)

    def shift(by: int) -> None:
        def edit(manifest: dict[str, Any]) -> None:
            next(each for each in manifest["trunk"] if each["name"] == trunk[moved].name)["off"] += by

        edit_manifest(folder, edit)

    shift(-4)
    before, own = trunk[moved - 1].name, trunk[moved].name
    assert f"{folder / TRUNK_NAME}: {own}: starts at byte {trunk[moved].offset - 4}, inside {before}" in problems(
        folder
    )
    shift(4)
    dropped = trunk[2].name
    edit_manifest(
        folder, lambda manifest: manifest.update(trunk=[each for each in manifest["trunk"] if each["name"] != dropped])
    )
    listed = "\n".join(problems(folder))
    assert f"between {trunk[1].name} and {trunk[3].name}, belong to no tensor; a gap has at most 63" in listed
    assert f"trunk tensor {dropped} is missing" in listed


def test_bytes_behind_the_last_tensor(folder):
    path = folder / TRUNK_NAME
    path.write_bytes(path.read_bytes() + bytes(63))
    seal(folder)
    assert problems(folder) == []
    path.write_bytes(path.read_bytes() + bytes(1))
    seal(folder)
    assert f"after {entries(folder)[-1].name}, belong to no tensor" in the_problem(folder)


def test_bytes_of_a_tensor_that_are_neither_values_nor_scales(folder):
    entry = entries(folder, TrunkFormat.Q4G)[-1]

    def edit(manifest: dict[str, Any]) -> None:
        each = next(each for each in manifest["trunk"] if each["name"] == entry.name)
        each["scale_off"] += 2
        each["bytes"] += 2

    edit_manifest(folder, edit)
    listed = "\n".join(problems(folder))
    assert f"{entry.name}: 2 of its bytes are neither values nor scales, 2 of them not 0" in listed


@pytest.mark.parametrize(
    "config",
    [
        k3_config(),
        kimi_linear_config(),
        k3_config(attn_res_block_size=None, latent_moe_use_norm=False, num_shared_experts=0, q_lora_rank=None),
        kimi_linear_config(num_shared_experts=0, first_k_dense_replace=0, q_lora_rank=32),
    ],
    ids=["k3", "kimi_linear", "k3 reduced", "kimi_linear extended"],
)
def test_the_expected_tensors_are_those_of_the_converter(config):
    architecture = detect(config)
    expected = trunk_tensors(architecture.model, architecture.config, architecture.tensor_prefix)
    planned = {tensor.name: tensor.stored_shape for tensor in architecture.trunk}
    assert set(expected) == set(planned)
    assert all(planned[name] in expected[name] for name in planned)


@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi_linear"])
def test_the_expected_tensors_are_those_of_the_release(config):
    canonical = canonical_config(config)
    prefix = "language_model." if "_outer" in canonical else ""
    expected = trunk_tensors(ModelConfig.from_config(canonical), canonical, prefix)
    assert set(expected) == {spec.name for spec in tensor_table(config) if ".experts." not in spec.name}


@pytest.mark.skipif(not REAL_K3.is_file(), reason="the release's config.json is not here")
def test_the_expected_tensors_of_the_real_k3():
    canonical = canonical_config(json.loads(REAL_K3.read_bytes()))
    expected = trunk_tensors(ModelConfig.from_config(canonical), canonical, "language_model.")
    assert len(expected) == 497_220 - 494_592
    assert expected["vision_tower.encoder.blocks.26.wqkv.weight"] == ((4608, 1024),)
    assert (128,) in expected["language_model.model.layers.0.self_attn.A_log"]


# sidecars


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("specials.json", b"[", "not valid JSON"),
        ("specials.json", b'{"id": 1}', "must list objects"),
        ("specials.json", b'[{"id": "1", "text": "a"}]', "must list objects"),
        ("specials.json", b"[" * 100_000, "not valid JSON"),
        ("chat.json", b"\xff", "not valid JSON"),
        ("chat.json", b"[]", "must hold an object"),
        ("vision.json", b"", "not valid JSON"),
        ("report.json", b"7", "must hold an object"),
    ],
)
def test_sidecars_that_are_no_json(folder, name, content, message):
    (folder / name).write_bytes(content)
    seal(folder)
    problem = the_problem(folder)
    assert problem.startswith(f"{folder / name}: ")
    assert message in problem


# hostile manifests, limits


@settings(max_examples=60)
@given(st.data())
def test_a_hostile_manifest_never_raises(pristine, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("hostile") / "container"
    shutil.copytree(pristine, folder, copy_function=os.link)
    manifest = json.loads((pristine / "manifest.json").read_bytes())
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(data.draw(with_hostile_value(manifest))))
    report, findings = check(folder)
    shutil.rmtree(folder)
    assert report.ok == (not findings.problems)


@pytest.mark.parametrize("layers", [10**9, "2", [2], 0, None])
def test_a_hostile_vision_config(tmp_path, layers):
    build_container(tmp_path, k3_config(num_hidden_layers=2))
    edit_manifest(
        tmp_path, lambda manifest: manifest["config"]["_outer"]["vision_config"].update(vt_num_hidden_layers=layers)
    )
    assert "vision_config.vt_num_hidden_layers` must be a whole number" in the_problem(tmp_path)


def test_a_config_that_does_not_fit_leaves_the_checksums_checked(folder):
    flip(folder / BANK, 200)
    edit_manifest(folder, lambda manifest: manifest["config"].pop("hidden_size"))
    listed = problems(folder)
    assert "`hidden_size` is missing" in listed[0]
    assert f"{folder / BANK}: sha256 is" in listed[1]


def test_banks_that_the_config_contradicts(folder):
    edit_manifest(folder, lambda manifest: manifest["config"].update(first_k_dense_replace=0))
    assert "layer 0 of the model has experts, but `layers` gives it no bank" in "\n".join(problems(folder))
    edit_manifest(folder, lambda manifest: manifest["config"].update(first_k_dense_replace=2))
    assert "gives layer 1 a bank, but the model has no experts there" in "\n".join(problems(folder))
    edit_manifest(folder, lambda manifest: manifest["config"].update(first_k_dense_replace=1, num_experts=8))
    assert "layer 1 has 4 experts of 20480 bytes, its config needs 8 of 20480" in "\n".join(problems(folder))


def test_the_list_is_cut_and_the_count_is_exact(tmp_path):
    build_container(tmp_path, kimi_linear_config(num_hidden_layers=2, num_experts=130, hidden_size=128))
    path = tmp_path / BANK
    path.write_bytes(bytes(path.stat().st_size))
    report, findings = check(tmp_path)
    assert not report.ok
    assert findings.n_problems == 131  # each record, and the file's sha256
    assert len(findings.problems) == MAX_LISTED
    assert "expert 99: magic" in findings.problems[-1]


def test_the_findings_do_not_depend_on_the_number_of_threads(k3, tmp_path):
    folder = tmp_path / "container"
    shutil.copytree(k3.container, folder)
    for name in ("experts-L1.bin", "experts-L2.bin", "experts-L3.bin", TRUNK_NAME, CODEBOOKS_NAME):
        flip(folder / name, 5000)
    one, many = (check(folder, n_threads=n)[1] for n in (1, 6))
    assert one == many
    assert one.n_problems >= 9


def test_memory_follows_a_record_and_not_the_file(folder):
    check(folder)
    for name in (TRUNK_NAME, CODEBOOKS_NAME, BANK, "specials.json"):
        os.truncate(folder / name, 64 << 20)  # sparse: nothing lies on the disk
    tracemalloc.start()
    listed = problems(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(listed) > 4
    assert peak < 16 << 20


def test_progress_reaches_the_end(folder, monkeypatch):
    updates: dict[int, float] = {}
    totals: list[int] = []

    class Recorder:
        def __init__(self, stream, title, sizes, *, unit):
            totals.extend(sizes)

        def update(self, task: int, fraction: float) -> None:
            updates[task] = fraction

        def close(self) -> None:
            totals.append(-1)

    monkeypatch.setattr(structure_module, "ProgressReport", Recorder)
    assert problems(folder) == []
    assert updates == dict.fromkeys(range(4), 1.0)
    assert totals == [*((folder / n).stat().st_size for n in (TRUNK_NAME, CODEBOOKS_NAME, BANK, "specials.json")), -1]


def test_the_crc32_field_is_where_the_tests_think(folder):
    layout = layout_of(folder)
    flip(folder / BANK, layout.stride_bytes + CRC32_OFFSET)
    assert "layer 1 expert 1: crc32" in problems(folder)[0]
