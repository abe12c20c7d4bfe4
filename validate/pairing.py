"""Whether a container and a checkpoint belong together: config, shards, and which tensors stand on both sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from container.checkpoint import Checkpoint
from container.errors import ConfigError, ShardError, shown
from container.layout import TOKENIZER_NAME, TOKENIZER_SOURCES
from container.model import KINDS, canonical_config
from container.reader import ContainerReader
from validate.reference.sources import KIND_OF, CheckpointTensors
from validate.report import Findings

MATRICES = {kind: matrix for matrix, kind in KIND_OF.items()}  # gate, up, down -> w1, w3, w2


def pair_tensors(reader: ContainerReader, checkpoint: Checkpoint, findings: Findings) -> frozenset[str]:
    """Names, without prefix, of the tensors that can be compared; what differs otherwise goes into `findings`."""
    _check_config(reader, checkpoint, findings)
    _check_tokenizer(reader, checkpoint, findings)
    return _check_names(reader, checkpoint, _check_shards(reader, checkpoint, findings), findings)


def plain_name(reader: ContainerReader, name: str) -> str:
    """A trunk tensor's name without the container's prefix."""
    return name.removeprefix(reader.manifest.tensor_prefix)


def expert_name(layer: int, expert: int, kind: str) -> str:
    """A routed expert's matrix as the release calls it, without prefix."""
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{MATRICES[kind]}.weight"


def source_shape(tensors: CheckpointTensors, name: str) -> tuple[int, ...]:
    """Logical shape of tensor `name` (without prefix) in the checkpoint. Raises SourceError when it is nowhere."""
    checkpoint = tensors.checkpoint
    stored = tensors.prefix + name if _stands(checkpoint, tensors.prefix + name) else name
    if stored in checkpoint:
        return checkpoint.entry(stored).shape
    packed = checkpoint.entry(f"{stored}_packed").shape
    if not packed:
        raise ShardError(f"{checkpoint.folder}: tensor `{stored}_packed` has shape [], expected two dimensions")
    return (*packed[:-1], 2 * packed[-1])


def _stands(checkpoint: Checkpoint, stored: str) -> bool:
    return stored in checkpoint or f"{stored}_packed" in checkpoint


def _check_config(reader: ContainerReader, checkpoint: Checkpoint, findings: Findings) -> None:
    try:
        expected = canonical_config(checkpoint.config)
    except ConfigError as error:
        findings.problem(f"{checkpoint.folder}: {error}")
        return
    for key, ours, theirs in _differences(reader.manifest.config, expected, ""):
        findings.problem(f"config: `{key}` is {shown(ours)} in the container, {shown(theirs)} in {checkpoint.folder}")


def _check_tokenizer(reader: ContainerReader, checkpoint: Checkpoint, findings: Findings) -> None:
    """The rank file is the release's, byte for byte; a checkpoint without one has nothing to compare."""
    ours = reader.folder / TOKENIZER_NAME
    theirs = next((path for name in TOKENIZER_SOURCES if (path := checkpoint.folder / name).is_file()), None)
    if theirs is None:
        findings.note(f"{checkpoint.folder} has no tokenizer to compare with")
    elif not ours.is_file():
        findings.problem(f"{ours}: missing, though the checkpoint has {theirs.name}")
    elif ours.read_bytes() != theirs.read_bytes():
        findings.problem(f"{ours}: differs from the checkpoint's {theirs.name}")


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key, "absent"), theirs.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{at}{key}.")
        elif a != b:
            yield at + key, a, b


def _check_shards(reader: ContainerReader, checkpoint: Checkpoint, findings: Findings) -> set[str]:
    """Shards that are not there, each named once; sizes against the container's provenance."""
    absent = {name for name in checkpoint.shard_names if not (checkpoint.folder / name).is_file()}
    for name in sorted(absent):
        findings.problem(f"{checkpoint.folder / name}: missing; its tensors were not compared")
    source = reader.manifest.provenance.get("source")
    recorded = source.get("shards") if isinstance(source, Mapping) else None
    if not isinstance(recorded, Mapping):
        findings.note("the container does not record which shards it was made of")
        return absent
    for name in sorted({*recorded, *checkpoint.shard_names} - absent):
        expected = recorded[name].get("bytes") if isinstance(recorded.get(name), Mapping) else None
        path = checkpoint.folder / name if name in checkpoint.shard_names else None
        found = None if path is None else path.stat().st_size
        if found != expected:
            findings.problem(
                f"{checkpoint.folder}: shard {shown(name)} is {_bytes(found)}; when the container was made it was "
                f"{_bytes(expected)}. Is this another release?"
            )
    return absent


def _bytes(n_bytes: Any) -> str:
    return "absent" if n_bytes is None else f"{shown(n_bytes)} bytes"


def _check_names(
    reader: ContainerReader, checkpoint: Checkpoint, absent: set[str], findings: Findings
) -> frozenset[str]:
    """Missing and extra tensors on either side. Returns the names, without prefix, that can be compared."""
    theirs = _source_names(checkpoint)
    ours = {plain_name(reader, entry.name) for entry in reader.manifest.trunk}
    for layer, bank in reader.manifest.layers.items():
        ours |= {expert_name(layer, expert, kind) for expert in range(bank.n_experts) for kind in KINDS}
    for name, partner in _half_pairs(checkpoint):
        findings.problem(f"tensor {name}: in {checkpoint.folder} without {partner}, the other half of its MXFP4 pair")
    for name in sorted(ours - set(theirs)):
        findings.problem(f"tensor {name}: in the container, but not in {checkpoint.folder}")
    for name in sorted(set(theirs) - ours):
        findings.problem(f"tensor {name}: in {checkpoint.folder}, but not in the container")
    return frozenset(name for name in ours & set(theirs) if theirs[name].isdisjoint(absent))


def _half_pairs(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Halves of MXFP4 pairs that stand alone, each with the name of what is missing."""
    for name in sorted(checkpoint.weight_map):
        for ending, other in (("_packed", "_scale"), ("_scale", "_packed")):
            partner = name.removesuffix(ending) + other
            if name.endswith(f".weight{ending}") and partner not in checkpoint.weight_map:
                yield name, partner


def _source_names(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Logical tensor → its shards; the two parts of an MXFP4 pair are one tensor. Without the wrapper's prefix."""
    prefix = CheckpointTensors(checkpoint).prefix
    found: dict[str, set[str]] = defaultdict(set)
    for name, shard in checkpoint.weight_map.items():
        logical = name.removeprefix(prefix)
        for ending in ("_packed", "_scale"):
            if logical.endswith(f".weight{ending}"):
                logical = logical.removesuffix(ending)
        found[logical].add(shard)
    return found
