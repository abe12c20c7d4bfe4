"""Whether a container is whole: manifest, sizes, tiling, every header and every checksum. Imports no torch.

Files are passed over in parallel threads (reading and hashing release the interpreter lock); problems are listed in
a fixed order, whatever the number of threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from container.errors import ConfigError, FormatError
from container.layout import (
    BUILD_FOLDER,
    CHAT_NAME,
    CHAT_TEMPLATE_NAME,
    CODEBOOKS_NAME,
    MANIFEST_NAME,
    REPORT_NAME,
    REPORT_PAGE_NAME,
    SPECIALS_NAME,
    TOKENIZER_NAME,
    TRUNK_NAME,
    UNCHECKED_NAMES,
    USAGE_NAME,
    VISION_NAME,
)
from container.machine import available_cores
from container.manifest import Manifest, TrunkEntry
from container.model import ModelConfig
from container.progress import ProgressReport
from container.publish import TEMPORARY_SUFFIX
from container.records import RecordLayout
from validate.expected import Shape, trunk_tensors
from validate.report import Findings, StructureReport
from validate.scan import (
    FileScan,
    Look,
    look_at_bank,
    look_at_codebooks,
    look_at_json,
    look_at_nothing,
    look_at_trunk,
    scan_file,
)

# Reading and hashing is bound by the disk well before eight threads.
MAX_THREADS = 8
JSON_SIDECARS = (SPECIALS_NAME, CHAT_NAME, VISION_NAME, REPORT_NAME)
OTHER_SIDECARS = (TOKENIZER_NAME, CHAT_TEMPLATE_NAME, REPORT_PAGE_NAME, USAGE_NAME)


@dataclass(frozen=True)
class _Task:
    """One file to pass over."""

    name: str
    look: Look
    listed_bytes: tuple[int, ...]  # sizes the manifest gives
    sha256: str | None


class _InterruptedError(Exception):
    """Ends the threads after Ctrl-C; nobody waits for their results any more."""


def check_structure(folder: Path, *, n_threads: int | None, stream: TextIO) -> tuple[StructureReport, Findings]:
    """Read the whole container. Progress goes to `stream`; everything wrong is in the findings, nothing is raised."""
    started = time.monotonic()
    findings = Findings()
    _check_leftovers(folder, findings)
    try:
        manifest = Manifest.read(folder)
    except FormatError as error:
        findings.problem(str(error))
        return StructureReport(ok=False, seconds=time.monotonic() - started), findings
    layout = _check_model(folder, manifest, findings)
    tasks = _tasks(folder, manifest, layout)
    _note_strangers(folder, {task.name for task in tasks}, findings)
    scans = _run(folder, tasks, n_threads or min(MAX_THREADS, available_cores()), stream)
    n_checksums = 0
    for task, scan in zip(tasks, scans, strict=True):
        findings.merge(scan.findings)
        n_checksums += scan.n_crc32 + _compare(folder / task.name, task, scan, findings)
    _check_codebook_use(folder, manifest, sum(scan.n_codebooks for scan in scans), findings)
    _note_unchecked(folder, manifest, tasks, findings)
    report = StructureReport(
        ok=findings.ok,
        n_files=len(tasks) + 1,
        n_records=sum(scan.n_records for scan in scans),
        n_codebooks=sum(scan.n_codebooks for scan in scans),
        n_trunk_tensors=sum(scan.n_tensors for scan in scans),
        n_checksums=n_checksums,
        bytes_read=sum(scan.bytes_read for scan in scans),
        seconds=time.monotonic() - started,
    )
    return report, findings


def _check_model(folder: Path, manifest: Manifest, findings: Findings) -> RecordLayout | None:
    """Manifest against its own config. Returns the records' layout, None where it cannot be known."""
    where = f"{folder / MANIFEST_NAME}"
    try:
        model = ModelConfig.from_config(manifest.config)
    except ConfigError as error:
        findings.problem(f"{where}: {error}")
        return None
    try:
        needed = trunk_tensors(model, manifest.config, manifest.tensor_prefix)
        _check_trunk(manifest.trunk, needed, manifest.tensor_prefix, where, findings)
    except ConfigError as error:
        findings.problem(f"{where}: {error}")
    layout = RecordLayout(manifest.expert_quant, model.expert_shapes)
    try:
        stride_bytes = layout.stride_bytes
    except FormatError as error:
        findings.problem(f"{where}: {error}")
        return None
    for layer in sorted(set(model.moe_layers) | set(manifest.layers)):
        bank = manifest.layers.get(layer)
        if bank is None:
            findings.problem(f"{where}: layer {layer} of the model has experts, but `layers` gives it no bank")
            continue
        if layer not in model.moe_layers:
            findings.problem(f"{where}: `layers` gives layer {layer} a bank, but the model has no experts there")
        if (bank.n_experts, bank.stride_bytes) != (model.moe.n_experts, stride_bytes):
            findings.problem(
                f"{where}: layer {layer} has {bank.n_experts} experts of {bank.stride_bytes} bytes, its config needs "
                f"{model.moe.n_experts} of {stride_bytes}"
            )
    return layout


def _check_trunk(
    trunk: tuple[TrunkEntry, ...],
    needed: Mapping[str, tuple[Shape, ...]],
    prefix: str,
    where: str,
    findings: Findings,
) -> None:
    """Names and shapes: all that the model needs, nothing else. A name may stand with or without the prefix."""
    found: dict[str, TrunkEntry] = {}
    for entry in trunk:
        name = entry.name if entry.name in needed else prefix + entry.name
        if name not in needed:
            findings.problem(f"{where}: trunk tensor {entry.name} is not part of this model")
        elif name in found:
            findings.problem(f"{where}: trunk tensor {name} is there twice, with and without its prefix")
        elif entry.shape not in needed[name]:
            shapes = " or ".join(str(list(shape)) for shape in needed[name])
            findings.problem(f"{where}: trunk tensor {name} has shape {list(entry.shape)}, expected {shapes}")
        found[name] = entry
    for name in needed:
        if name not in found:
            findings.problem(f"{where}: trunk tensor {name} is missing, expected with shape {list(needed[name][0])}")


def _check_codebook_use(folder: Path, manifest: Manifest, n_found: int, findings: Findings) -> None:
    """Each layer has codebooks of its own, all of them in the file."""
    n_each = manifest.expert_quant.n_codebooks
    path, end = folder / CODEBOOKS_NAME, 0
    n_used = n_each * len(manifest.layers)
    for layer, bank in sorted(manifest.layers.items(), key=lambda item: item[1].codebook_base):
        last = bank.codebook_base + n_each
        if bank.codebook_base < end:
            findings.problem(
                f"{folder / MANIFEST_NAME}: layer {layer} takes codebooks {bank.codebook_base} to {last - 1}, of which "
                "another layer has some"
            )
        if last > n_found:
            findings.problem(
                f"{path}: layer {layer} needs codebooks {bank.codebook_base} to {last - 1}, the file holds {n_found}"
            )
        end = max(end, last)
    if n_found > n_used:
        findings.note(f"{path}: {n_found - n_used} codebook(s) belong to no layer")


def _note_unchecked(folder: Path, manifest: Manifest, tasks: list[_Task], findings: Findings) -> None:
    if not manifest.files and all(entry.crc32 is None for entry in manifest.trunk):
        findings.note("no checksums in this container, but for those of the expert records")
        return
    for task in tasks:
        if task.sha256 is None and task.name not in UNCHECKED_NAMES:
            findings.note(f"{folder / task.name}: the manifest has no checksum of this file")


def _check_leftovers(folder: Path, findings: Findings) -> None:
    """What a conversion keeps only while it runs."""
    for name in _names(folder):
        if name == BUILD_FOLDER or (name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)):
            findings.problem(
                f"{folder / name}: left by a conversion that is running or was killed; run the same conversion "
                "command again to finish it"
            )


def _note_strangers(folder: Path, known: set[str], findings: Findings) -> None:
    for name in _names(folder):
        leftover = name == BUILD_FOLDER or name.endswith(TEMPORARY_SUFFIX)
        if name not in known and name not in (MANIFEST_NAME, *OTHER_SIDECARS) and not leftover:
            findings.note(f"{folder / name}: not part of the container; nothing describes it")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _tasks(folder: Path, manifest: Manifest, layout: RecordLayout | None) -> list[_Task]:
    """Every file of the container, in a fixed order: trunk, codebooks, banks, sidecars."""
    looks: dict[str, Look] = {
        TRUNK_NAME: look_at_trunk(manifest.trunk),
        CODEBOOKS_NAME: look_at_codebooks(manifest.expert_quant),
    }
    sizes: dict[str, tuple[int, ...]] = {}
    for layer, bank in sorted(manifest.layers.items()):
        fits = layout is not None and bank.stride_bytes == layout.stride_bytes
        looks[bank.file] = look_at_bank(layer, bank, layout) if layout is not None and fits else look_at_nothing
        sizes[bank.file] = (bank.n_bytes,)
    present = [name for name in (*JSON_SIDECARS, *OTHER_SIDECARS) if (folder / name).exists()]
    for name in sorted({*manifest.files, *present} - set(looks) - {MANIFEST_NAME}):
        looks[name] = look_at_json if name in JSON_SIDECARS else look_at_nothing
    tasks = []
    for name, look in looks.items():
        listed = manifest.files.get(name)
        listed_bytes = sizes.get(name, ()) if listed is None else tuple({*sizes.get(name, ()), listed.n_bytes})
        tasks.append(_Task(name, look, listed_bytes, None if listed is None else listed.sha256))
    return tasks


def _run(folder: Path, tasks: list[_Task], n_threads: int, stream: TextIO) -> list[FileScan]:
    """Pass over all files. KeyboardInterrupt stops the threads and passes."""
    sizes = [_file_bytes(folder / task.name) for task in tasks]
    report = ProgressReport(stream, "reading the container", sizes, unit="B")
    lock, stop = threading.Lock(), threading.Event()

    def scan(number: int) -> FileScan:
        done = 0

        def tick(n_bytes: int) -> None:
            nonlocal done
            if stop.is_set():
                raise _InterruptedError
            done += n_bytes
            with lock:
                report.update(number, min(1.0, done / max(1, sizes[number])))

        task = tasks[number]
        return scan_file(folder / task.name, task.look, tick, hashed=task.sha256 is not None)

    try:
        with ThreadPoolExecutor(n_threads) as threads:
            try:
                return list(threads.map(scan, range(len(tasks))))
            except BaseException:
                stop.set()
                raise
    finally:
        report.close()


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _compare(path: Path, task: _Task, scan: FileScan, findings: Findings) -> int:
    """Size and sha256 against the manifest. Returns the number of checksums compared."""
    if scan.n_bytes is None:
        return 0
    for expected in task.listed_bytes:
        if scan.n_bytes != expected:
            what = "truncated" if scan.n_bytes < expected else "longer than it was written"
            findings.problem(f"{path}: {expected} bytes expected, found {scan.n_bytes}: {what}")
    if scan.n_bytes not in task.listed_bytes or scan.sha256 is None or task.sha256 is None:
        return 0
    if scan.sha256 != task.sha256:
        findings.problem(f"{path}: sha256 is {scan.sha256}, the manifest says {task.sha256}: the file was changed")
    return 1
