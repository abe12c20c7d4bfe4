"""Which files of a repository a conversion needs. Pure: listings and bytes in, names out.

Everything in the root folder but weights is needed (config, index, tokenizer, templates, code, licence), and of the
weights the shards that the index names. Other copies of the weights, in sub-folders or other formats, are not.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from container.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, check_weight_map
from container.errors import HubError, SourceError, UsageError, shown
from container.strict_json import parse_object
from download.listing import Listing, RemoteFile

WEIGHT_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("safetensors", "bin", "pt", "pth", "ckpt", "pkl", "npz"),
        *("gguf", "ggml", "llamafile", "onnx", "onnx_data", "nemo", "mlmodel"),
        *("h5", "msgpack", "ot", "pb", "tflite", "pdparams", "params"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is to be fetched, in this order, and what a conversion would need beyond it."""

    files: tuple[RemoteFile, ...]
    left_out: tuple[str, ...] = ()
    given_back: tuple[str, ...] = ()  # by a conversion that needs them no more

    @property
    def n_bytes(self) -> int:
        """Bytes of all chosen files."""
        return sum(file.n_bytes for file in self.files)


def is_weights(name: str) -> bool:
    """True for a file that holds weights, in whatever format."""
    return PurePosixPath(name).suffix.lower() in WEIGHT_SUFFIXES


def small_files(listing: Listing) -> tuple[RemoteFile, ...]:
    """The files of the root folder that are no weights, smallest first. Raises HubError for no checkpoint."""
    found = [file for file in listing.files.values() if "/" not in file.name and not is_weights(file.name)]
    if CONFIG_NAME not in listing.files:
        raise HubError(
            f"{listing.repository}@{listing.commit[:12]} has no {CONFIG_NAME}: this is not a checkpoint as Hugging "
            "Face lays it out"
        )
    return tuple(sorted(found, key=lambda file: (file.n_bytes, file.name)))


def index_file(listing: Listing) -> RemoteFile | None:
    """The file that says which tensor lies in which shard; None where there is one shard only.

    Raises HubError where there are no weights at all.
    """
    if INDEX_NAME not in listing.files and SINGLE_NAME not in listing.files:
        raise HubError(
            f"{listing.repository}@{listing.commit[:12]} has neither {INDEX_NAME} nor {SINGLE_NAME}: no weights in "
            "safetensors files"
        )
    return listing.files.get(INDEX_NAME)


def parse_index(listing: Listing, raw: bytes) -> dict[str, str]:
    """Tensor → shard of an index's bytes. Raises HubError for a malformed one."""
    where = f"{listing.repository}@{listing.commit[:12]}: {INDEX_NAME}"
    try:
        return check_weight_map(parse_object(raw), where)
    except SourceError as error:
        raise HubError(str(error)) from None
    except ValueError as error:
        raise HubError(f"{where}: cannot be read as JSON ({error})") from None


def shards(listing: Listing, weight_map: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    """The shards that hold the tensors, 2 before 10. Raises HubError where the repository lacks one."""
    names = sorted(set(weight_map.values()), key=natural_order)
    absent = [name for name in names if name not in listing.files]
    if absent:
        raise HubError(
            f"{listing.repository}@{listing.commit[:12]}: {INDEX_NAME} names {shown(absent[0])}, which the repository "
            f"does not hold ({len(absent)} of {len(names)} shards are absent): the upload is not finished, or broken"
        )
    return tuple(listing.files[name] for name in names)


def choose(
    listing: Listing, needed: Sequence[RemoteFile], *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Choice:
    """The needed files or, with `include`, all of the repository's that match one of its globs; less `exclude`.

    Globs match a whole path, in which * reaches over slashes too; one that ends in a slash means all below. Raises
    UsageError for an `include` that matches nothing.
    """
    for glob in include:
        if not any(_matches(name, [glob]) for name in listing.files):
            raise UsageError(f"--include {glob} matches none of {listing.repository}'s {len(listing.files)} files")
    files = _in_order(file for file in listing.files.values() if _matches(file.name, include)) if include else needed
    files = [file for file in files if not _matches(file.name, exclude)]
    chosen = {file.name for file in files}
    return Choice(files=tuple(files), left_out=tuple(file.name for file in needed if file.name not in chosen))


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts numbers in names by their value."""
    pieces = re.findall(r"([^0-9]*)([0-9]*)", name)
    return tuple((text, int(digits) if digits else -1) for text, digits in pieces)


def _in_order(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Small files smallest first, then weights by name: the order in which needed files come too."""
    return sorted(
        files,
        key=lambda file: (
            is_weights(file.name),
            0 if is_weights(file.name) else file.n_bytes,
            natural_order(file.name),
        ),
    )


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, f"{glob}*" if glob.endswith("/") else glob) for glob in globs)
