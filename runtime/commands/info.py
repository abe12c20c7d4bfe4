"""`info`: what a container holds, from its manifest and file sizes alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from container.layout import TrunkFormat
from container.progress import size
from container.reader import ContainerReader
from runtime.commands import arguments as shared
from runtime.commands.streams import Streams


def add_parser(commands: shared.Commands) -> None:
    """Its command line."""
    parser = shared.add_command(commands, "info", "show what a container holds", work)
    shared.add_json(parser)


def work(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run it; the exit code."""
    report = info(arguments.container)
    return streams.show_result(report, info_text(report), as_json=arguments.json)


def info(folder: Path) -> dict[str, Any]:
    """What a container holds. Raises FormatError."""
    with ContainerReader.open(folder) as reader:
        manifest, model = reader.manifest, reader.model
        stride, trunk_formats = reader.layout.stride_bytes, _trunk_formats(reader)
        codebooks_bytes = reader.codebook_bytes
    return {
        "arch": manifest.arch,
        "layers": model.n_layers,
        "kda_layers": len(model.kda.layers),
        "mla_layers": model.n_layers - len(model.kda.layers),
        "moe_layers": len(model.moe_layers),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "experts_per_layer": model.moe.n_experts,
        "experts_per_token": model.moe.top_k,
        "expert_shapes": {kind: list(shape) for kind, shape in model.expert_shapes.items()},
        "expert_format": manifest.expert_quant.fmt.name,
        "expert_record_bytes": stride,
        "trunk_formats": trunk_formats,
        "trunk_bytes": sum(entry.n_bytes for entry in manifest.trunk),
        "banks_bytes": sum(bank.n_bytes for bank in manifest.layers.values()),
        "codebooks_bytes": codebooks_bytes,
        "working_set_bytes": len(model.moe_layers) * model.moe.top_k * stride,
        "provenance": dict(manifest.provenance),
    }


def info_text(report: Mapping[str, Any]) -> str:
    """The same for people."""
    shapes = ", ".join(f"{kind} {rows} × {cols}" for kind, (rows, cols) in report["expert_shapes"].items())
    formats = ", ".join(
        f"{fmt} {each['tensors']} ({size(each['bytes'])})" for fmt, each in report["trunk_formats"].items()
    )
    rows = {
        "architecture": report["arch"],
        "layers": f"{report['layers']} ({report['kda_layers']} delta attention, {report['mla_layers']} latent "
        f"attention; {report['moe_layers']} with experts)",
        "hidden, vocabulary": f"{report['hidden_size']}, {report['vocab_size']}",
        "experts": f"{report['experts_per_layer']} per layer, {report['experts_per_token']} per token; {shapes}",
        "expert record": f"{report['expert_format']}, {size(report['expert_record_bytes'])}",
        "trunk": f"{size(report['trunk_bytes'])}: {formats}",
        "banks": size(report["banks_bytes"]),
        "codebooks": size(report["codebooks_bytes"]),
        "read per token": f"{size(report['working_set_bytes'])} of experts when nothing is cached",
    }
    rows |= {f"from: {key}": _summary(value) for key, value in report["provenance"].items()}
    return "\n".join(f"{name + ':':<20} {value}" for name, value in rows.items())


def _trunk_formats(reader: ContainerReader) -> dict[str, dict[str, int]]:
    """Format name → number of tensors, elements and bytes."""
    formats: dict[str, dict[str, int]] = {}
    for fmt in TrunkFormat:
        entries = [entry for entry in reader.manifest.trunk if entry.fmt is fmt]
        if entries:
            formats[fmt.name] = {
                "tensors": len(entries),
                "elements": sum(math.prod(entry.shape) for entry in entries),
                "bytes": sum(entry.n_bytes for entry in entries),
            }
    return formats


def _summary(value: Any) -> str:
    """A provenance value on one line: of a list, and of an object inside an object, only how long it is."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inner_summary(each)}" for key, each in value.items())
    return _inner_summary(value)


def _inner_summary(value: Any) -> str:
    return f"({len(value)} entries)" if isinstance(value, Mapping | list) else str(value)
