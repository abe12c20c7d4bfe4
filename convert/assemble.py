"""The last step: join what the jobs left behind and publish the container, its manifest last."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from container.layout import (
    CHAT_NAME,
    CODEBOOKS_NAME,
    MANIFEST_NAME,
    REPORT_NAME,
    REPORT_PAGE_NAME,
    TRUNK_NAME,
    UNCHECKED_NAMES,
)
from container.manifest import FileEntry, Manifest
from container.publish import publish_bytes, publishing, sync_folder
from container.strict_json import json_bytes
from convert.build import BuildFolder, FinishedJob
from convert.plan import ConversionPlan
from convert.report import make_report
from convert.report_html import report_html
from convert.sidecars import Sidecars
from download.ledger import Origin


def assemble(
    build: BuildFolder,
    plan: ConversionPlan,
    records: Mapping[str, FinishedJob],
    sidecars: Sidecars,
    provenance: Mapping[str, Any],
    origin: Origin,
) -> Manifest:
    """Publish codebooks, trunk, sidecars and report, then the manifest; then the build folder goes.

    Killed anywhere in here, a second call finds all it needs again.
    """
    output = build.output
    banks = {job.experts.bank.file: records[job.id].bank for job in plan.jobs if job.experts is not None}
    files = {name: entry for name, entry in banks.items() if entry is not None}
    files[CODEBOOKS_NAME] = _publish_codebooks(build, plan)
    _clear_gaps(build.trunk, plan)
    files[TRUNK_NAME] = FileEntry.of_file(build.trunk)
    for name, data in sidecars.files.items():
        if name != CHAT_NAME or not (output / name).exists():
            publish_bytes(output / name, data)
        if name not in UNCHECKED_NAMES:
            files[name] = FileEntry.of_bytes(data)
    _publish_report(output, make_report(plan, records, provenance, origin))
    build.trunk.replace(output / TRUNK_NAME)
    sync_folder(output)
    crc32 = {name: crc for record in records.values() for name, crc in record.trunk_crc32.items()}
    manifest = Manifest(
        arch=plan.architecture.arch,
        tensor_prefix=plan.architecture.tensor_prefix,
        config=plan.architecture.config,
        expert_quant=plan.quant,
        layers=plan.banks,
        trunk=tuple(replace(entry, crc32=crc32[entry.name]) for entry in plan.trunk),
        files=files,
        provenance=provenance,
    )
    publish_bytes(output / MANIFEST_NAME, manifest.to_bytes())
    build.remove()
    return manifest


def _publish_report(output: Path, report: Mapping[str, Any]) -> None:
    publish_bytes(output / REPORT_NAME, json_bytes(report))
    publish_bytes(output / REPORT_PAGE_NAME, report_html(report).encode())


def _publish_codebooks(build: BuildFolder, plan: ConversionPlan) -> FileEntry:
    path: Path = build.output / CODEBOOKS_NAME
    with publishing(path) as file:
        for job in plan.jobs:
            if job.experts is not None:
                file.write(build.codebooks(job.id).read_bytes())
    return FileEntry.of_file(path)


def _clear_gaps(path: Path, plan: ConversionPlan) -> None:
    """Zeros between the tensors of trunk.bin: no job writes there and no job's checksum covers it."""
    with path.open("r+b") as file:
        position = 0
        for entry in plan.trunk:
            file.seek(position)
            file.write(bytes(entry.offset - position))
            position = entry.offset + entry.n_bytes
        file.flush()
        os.fsync(file.fileno())
