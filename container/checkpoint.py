"""A checkpoint folder as Hugging Face lays it out: config, weight map, shards; tensors as named byte ranges.

Names and config are known without any shard; headers are read when a shard is first asked for. What bytes
mean is decided elsewhere (`convert.encodings`, `validate.reference.decode`), each for itself.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from container.errors import ConfigError, ShardError, SourceError, shown
from container.layout import is_plain_file_name
from container.shards import ShardHeader, ShardTensor, read_shard_header
from container.strict_json import parse_object

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# K3's index has 60 MB; the limit stops a small .gz that unpacks without end.
MAX_JSON_BYTES = 1 << 30


class Checkpoint:
    """An opened checkpoint folder. Not to be shared between processes; cheap to open again."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        weight_map: dict[str, str],
        headers: Mapping[str, ShardHeader] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config  # config.json as released
        self.weight_map = weight_map  # tensor -> shard file name
        self._headers = dict(headers or {})
        self._files: dict[str, int] = {}

    @classmethod
    def open(cls, folder: Path, headers: Mapping[str, ShardHeader] | None = None) -> Checkpoint:
        """Read config and weight map; no shard is touched, unless it is the only one and there is no index.

        `headers` are those of shards that are known without being here. Raises SourceError (ConfigError, ShardError)
        when the folder is no checkpoint.
        """
        if not folder.is_dir():
            raise SourceError(f"{folder}: no such folder; give the folder that holds {CONFIG_NAME} and the shards")
        config = _json_object(folder / CONFIG_NAME, ConfigError)
        for name in (INDEX_NAME, f"{INDEX_NAME}.gz"):
            if (folder / name).is_file():
                return cls(folder, config, _weight_map(folder / name), headers)
        header = (headers or {}).get(SINGLE_NAME)
        if header is None:
            if not (folder / SINGLE_NAME).is_file():
                raise SourceError(f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} found: no weights here")
            header = read_shard_header(folder / SINGLE_NAME)
        return cls(folder, config, dict.fromkeys(header.tensors, SINGLE_NAME), {SINGLE_NAME: header})

    def __contains__(self, name: object) -> bool:
        return name in self.weight_map

    @property
    def shard_names(self) -> list[str]:
        """Every shard the weight map names, sorted."""
        return sorted(set(self.weight_map.values()))

    def has_shard(self, shard_name: str) -> bool:
        """True when the shard is in the folder, whatever it may hold."""
        return (self.folder / shard_name).exists()

    def knows_shard(self, shard_name: str) -> bool:
        """True when `shard` has a header to give or to refuse: the shard is here, or its header came from elsewhere."""
        return shard_name in self._headers or self.has_shard(shard_name)

    def shard(self, shard_name: str) -> ShardHeader:
        """Header of one shard, read and checked once. Raises ShardError."""
        if shard_name not in self._headers:
            self._headers[shard_name] = read_shard_header(self.folder / shard_name)
        return self._headers[shard_name]

    def entry(self, name: str) -> ShardTensor:
        """Dtype, shape and byte range of a tensor. Raises SourceError when it is nowhere."""
        if name not in self.weight_map:
            raise SourceError(f"{self.folder}: tensor {name} is not in the weight map")
        header = self.shard(self.weight_map[name])
        if name not in header.tensors:
            raise ShardError(f"{header.path}: tensor {name} is missing, though the index says it is here")
        return header.tensors[name]

    def read(self, name: str, start_byte: int = 0, n_bytes: int | None = None) -> npt.NDArray[np.uint8]:
        """`n_bytes` raw bytes of a tensor from `start_byte` on (default: all of it), as a new uint8 array.

        Raises ShardError when the file ends early or cannot be read, ValueError when the range is outside the tensor.
        """
        tensor = self.entry(name)
        if n_bytes is None:
            n_bytes = tensor.n_bytes - start_byte
        if start_byte < 0 or n_bytes < 0 or start_byte + n_bytes > tensor.n_bytes:
            raise ValueError(f"bytes {start_byte}+{n_bytes} are outside {name} ({tensor.n_bytes} bytes)")
        buffer = np.empty(n_bytes, dtype=np.uint8)
        shard_name = self.weight_map[name]
        what = f"{self.folder / shard_name}: tensor {name}"
        read_exactly(self._file(shard_name), buffer.data, tensor.offset + start_byte, what)
        return buffer

    def close(self) -> None:
        """Close the shards' files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _file(self, shard_name: str) -> int:
        if shard_name not in self._files:
            path = self.folder / shard_name
            try:
                self._files[shard_name] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ShardError(f"{path}: cannot be opened ({os.strerror(error.errno or 0)})") from None
        return self._files[shard_name]


def read_exactly(descriptor: int, buffer: memoryview, offset: int, what: str) -> None:
    """Fill `buffer` from `offset` of an open file. Raises ShardError, beginning with `what`, where it cannot."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ShardError(f"{what}: byte {offset + done} of the file cannot be read ({reason})") from None
        if count == 0:
            raise ShardError(f"{what}: the file ended at byte {offset + done}; it was changed or truncated while open")
        done += count


def _weight_map(path: Path) -> dict[str, str]:
    return check_weight_map(_json_object(path, SourceError), str(path))


def check_weight_map(index: Mapping[str, Any], where: str) -> dict[str, str]:
    """Tensor → shard, of an index's JSON object. Raises SourceError, beginning with `where`, for a malformed one."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{where}: `weight_map` is missing or empty")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_file_name(shard):
            raise SourceError(
                f"{where}: `weight_map` must give a plain file name for tensor {tensor}, found {shown(shard)}"
            )
    return weight_map


def _json_object(path: Path, error_type: type[SourceError]) -> dict[str, Any]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return parse_object(_read_limited(file))
    except FileNotFoundError:
        raise error_type(f"{path}: no such file; is {path.parent} a Hugging Face checkpoint?") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise error_type(f"{path}: cannot be read as JSON ({error})") from None


def _read_limited(file: io.BufferedIOBase) -> bytes:
    data = bytearray()
    while piece := file.read(1 << 20):
        data += piece
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    return bytes(data)
