"""Every magic, alignment, format number and header of container format v0 (docs/FORMAT.md).

One definition per on-disk fact; nothing else in the project spells a magic number or a struct string.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique
from struct import Struct

FORMAT_VERSION = 0

MANIFEST_NAME = "manifest.json"
TRUNK_NAME = "trunk.bin"
CODEBOOKS_NAME = "codebooks.bin"
TOKENIZER_NAME = "tokenizer.model"
TOKENIZER_SOURCES = ("tiktoken.model", "tokenizer.model")  # what releases call it, in order of preference
SPECIALS_NAME = "specials.json"
CHAT_NAME = "chat.json"
VISION_NAME = "vision.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
REPORT_NAME = "report.json"
REPORT_PAGE_NAME = "report.html"
USAGE_NAME = "usage.waste"
# A user may edit the first, the others are no part of the container proper: the manifest holds no checksum of them.
UNCHECKED_NAMES = (CHAT_NAME, REPORT_NAME, REPORT_PAGE_NAME, USAGE_NAME)
BUILD_FOLDER = ".build"  # holds what is not yet part of the container

EXPERT_MAGIC = 0x50584557  # "WEXP"
CODEBOOK_MAGIC = 0x4B424357  # "WCBK"
USAGE_MAGIC = 0x47535557  # "WUSG"

# A record starts and ends on a page, so that one aligned read without the page cache fetches it whole.
ALIGNMENT = 4096
# magic, layer, expert, fmt, flags, codebook base, lowrank id, reserved, stride / ALIGNMENT,
# gate offset, up offset, down offset, scales offset, crc32, reserved, reserved
EXPERT_HEADER = Struct("<IHHBBHHHIIIIIIII")
# magic, id, fmt, vec_dim, entries, reserved
CODEBOOK_HEADER = Struct("<IHBBII")
CODEBOOK_FMT = 4
# magic, version, tokens counted
USAGE_HEADER = Struct("<IIQ")
# layer, expert, hits, last seen, next-layer top
USAGE_ENTRY = Struct("<HHIII")
USAGE_VERSION = 1

VEC_DIM = 8  # weights per vector
TILE_ROWS = 64  # rows per index tile
MAX_U16 = 0xFFFF  # layer, expert and codebook id are u16 in the headers
GROUP_SIZE = 128  # trunk weights that share one group scale
TRUNK_ALIGNMENT = 64  # ours: v0 asks for none; a cache line keeps every tensor's start aligned in memory

# Tensors with fewer elements stay F32 in the trunk (docs/FORMAT.md, trunk.bin).
MIN_QUANTISED_ELEMENTS = 65_536


@unique
class ExpertFormat(IntEnum):
    """Format number in an expert record's header."""

    VQ3R = 4
    VQ2R = 5
    VQ4P = 8


@unique
class TrunkFormat(IntEnum):
    """Format number of a trunk tensor in the manifest."""

    F32 = 0
    Q8G = 2
    Q4G = 3


@dataclass(frozen=True)
class ExpertQuant:
    """How expert weights are stored; the manifest's `expert_quant`."""

    fmt: ExpertFormat
    n_stages: int
    n_entries: int
    index_bits: int

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector's indices, all stages together."""
        return self.n_stages * self.index_bits // 8

    @property
    def bits_per_weight(self) -> float:
        """Index bits per weight; channel scales and codebooks not counted."""
        return self.n_stages * self.index_bits / VEC_DIM

    @property
    def n_codebooks(self) -> int:
        """Codebooks of one layer: three kinds times the stages."""
        return 3 * self.n_stages


VQ3R = ExpertQuant(ExpertFormat.VQ3R, n_stages=3, n_entries=256, index_bits=8)
VQ2R = ExpertQuant(ExpertFormat.VQ2R, n_stages=2, n_entries=256, index_bits=8)
VQ4P = ExpertQuant(ExpertFormat.VQ4P, n_stages=4, n_entries=64, index_bits=6)
EXPERT_QUANTS: dict[ExpertFormat, ExpertQuant] = {quant.fmt: quant for quant in (VQ3R, VQ2R, VQ4P)}


def bank_name(layer: int) -> str:
    """File name of a layer's expert bank."""
    return f"experts-L{layer}.bin"


def is_plain_file_name(name: str) -> bool:
    """True for a name that stays inside its folder on every system: no separator, no `..`, no NUL."""
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


def align_up(n_bytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `n_bytes`."""
    return -(-n_bytes // alignment) * alignment
