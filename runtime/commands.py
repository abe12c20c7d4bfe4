"""What `python -m runtime` does: each command returns its result as one JSON-able object and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from container.errors import MoedockError, UsageError
from container.layout import TrunkFormat
from container.publish import publishing
from container.reader import ContainerReader
from runtime.engine import Engine
from runtime.options import RunOptions
from runtime.tokenizer import Tokenizer

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Result:
    """Outcome of a command."""

    json: dict[str, Any]
    text: str


def evaluate(
    folder: Path,
    *,
    ids: Sequence[int] | None,
    text: str | None,
    top: int,
    dump_logits: Path | None,
    verify: bool,
) -> Result:
    """Feed a prompt, given as ids or as text, and report the `top` likeliest next tokens.

    `dump_logits` receives the logits of all positions, [T, vocabulary] f32, as one .npy file that appears whole
    or not at all. Raises MoedockError.
    """
    if dump_logits is not None and not dump_logits.parent.is_dir():  # known before hours of work, not after
        raise MoedockError(f"{dump_logits}: logits cannot be written (there is no folder {dump_logits.parent})")
    with Engine.open(folder, RunOptions(verify=verify)) as engine:
        tokenizer = _tokenizer(folder, engine.vocab_size, needed=ids is None)
        if ids is None:
            assert tokenizer is not None, "a needed tokenizer is loaded or refused"
            ids = tokenizer.encode(text or "")
        if not ids:
            raise UsageError("the prompt has no token")
        start = perf_counter()
        logits = engine.evaluate(ids, last_only=dump_logits is None).logits
        seconds = perf_counter() - start
        counters = engine.store.counters
    if not np.isfinite(logits).all():
        raise MoedockError(f"{folder}: the logits are NaN or infinite, so weights are damaged; --verify says which")
    if dump_logits is not None:
        _dump(dump_logits, logits)
    report = {
        "ids": list(ids),
        "top": _likeliest(logits[-1], top, tokenizer),
        "seconds": seconds,
        "tokens_per_second": len(ids) / seconds,
        "expert_reads": counters.n_reads,
        "expert_read_bytes": counters.read_bytes,
    }
    return Result(report, _evaluation_text(report))


def info(folder: Path) -> Result:
    """What a container holds, from its manifest and file sizes alone. Raises FormatError."""
    with ContainerReader.open(folder) as reader:
        manifest, model = reader.manifest, reader.model
        stride, trunk_formats = reader.layout.stride_bytes, _trunk_formats(reader)
        codebooks_bytes = reader.codebook_bytes
    bank_bytes = [bank.n_bytes for bank in manifest.layers.values()]
    report: dict[str, Any] = {
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
        "banks_bytes": sum(bank_bytes),
        "codebooks_bytes": codebooks_bytes,
        "working_set_bytes": len(model.moe_layers) * model.moe.top_k * stride,
        "provenance": dict(manifest.provenance),
    }
    return Result(report, _info_text(report))


def _tokenizer(folder: Path, vocab_size: int, *, needed: bool) -> Tokenizer | None:
    """The container's tokenizer; one that is only good for showing tokens may be missing or broken."""
    try:
        return Tokenizer.load(folder, vocab_size)
    except MoedockError:
        if needed:
            raise
        return None


def _likeliest(logits: F32, top: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    order = np.argsort(-logits, kind="stable")[:top]
    exponentials = np.exp(logits.astype(np.float64) - float(logits.max()))
    probabilities = exponentials / exponentials.sum()
    return [
        {
            "id": int(token_id),
            "text": None if tokenizer is None else tokenizer.decode([int(token_id)]),
            "logit": float(logits[token_id]),
            "probability": float(probabilities[token_id]),
        }
        for token_id in order
    ]


def _dump(path: Path, logits: F32) -> None:
    try:
        with publishing(path) as file:
            np.save(file, logits)
    except OSError as error:
        raise MoedockError(f"{path}: logits cannot be written ({error.strerror})") from None


def _evaluation_text(report: dict[str, Any]) -> str:
    lines = [
        f"{len(report['ids'])} tokens in {report['seconds']:.3f} s ({report['tokens_per_second']:.2f} tokens/s), "
        f"{report['expert_reads']} experts read ({_size(report['expert_read_bytes'])})",
        f"{'id':>8}  {'logit':>9}  {'share':>7}  token",
    ]
    for token in report["top"]:
        shown = "" if token["text"] is None else repr(token["text"])
        lines.append(f"{token['id']:>8}  {token['logit']:>9.4f}  {token['probability']:>7.2%}  {shown}".rstrip())
    return "\n".join(lines)


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


def _info_text(report: dict[str, Any]) -> str:
    shapes = ", ".join(f"{kind} {rows} × {cols}" for kind, (rows, cols) in report["expert_shapes"].items())
    formats = ", ".join(
        f"{fmt} {each['tensors']} ({_size(each['bytes'])})" for fmt, each in report["trunk_formats"].items()
    )
    rows = {
        "architecture": report["arch"],
        "layers": f"{report['layers']} ({report['kda_layers']} delta attention, {report['mla_layers']} latent "
        f"attention; {report['moe_layers']} with experts)",
        "hidden, vocabulary": f"{report['hidden_size']}, {report['vocab_size']}",
        "experts": f"{report['experts_per_layer']} per layer, {report['experts_per_token']} per token; {shapes}",
        "expert record": f"{report['expert_format']}, {_size(report['expert_record_bytes'])}",
        "trunk": f"{_size(report['trunk_bytes'])}: {formats}",
        "banks": _size(report["banks_bytes"]),
        "codebooks": _size(report["codebooks_bytes"]),
        "read per token": f"{_size(report['working_set_bytes'])} of experts when nothing is cached",
    }
    rows |= {f"from: {key}": _summary(value) for key, value in report["provenance"].items()}
    return "\n".join(f"{name + ':':<20} {value}" for name, value in rows.items())


def _summary(value: Any) -> str:
    """A provenance value on one line: of a list, and of an object inside an object, only how long it is."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inner_summary(each)}" for key, each in value.items())
    return _inner_summary(value)


def _inner_summary(value: Any) -> str:
    return f"({len(value)} entries)" if isinstance(value, Mapping | list) else str(value)


def _size(n_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} bytes"
