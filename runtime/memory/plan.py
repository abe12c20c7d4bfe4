"""How much memory running a container takes, from its manifest and config alone: no file is read, nothing compiled.

Every part is something that the runtime allocates: what this module adds up is what `runtime.disk.resident`,
`runtime.state`, `runtime.disk.store` and the models hold at once, and the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from container.layout import ALIGNMENT, VEC_DIM, TrunkFormat, align_up
from container.manifest import Manifest, TrunkEntry
from container.model import ModelConfig
from container.records import RecordLayout
from runtime.memory.scratch import F32_BYTES, scratch_bytes
from runtime.options import RunOptions

EMBEDDING_NAME = "model.embed_tokens.weight"  # stays on disk, read row by row
_RESIDENT_NAMES = ("model.", "lm_head.")  # of the text model; what else a release has, such as a vision tower, is not

# Interpreter, numpy, numba with its compiled loops, tiktoken: measured 165 MiB where the loops come from numba's
# cache, 255 MiB in the one run that compiles them.
PROCESS_BYTES = 260 << 20
TOKENIZER_BYTES_PER_TOKEN = 420  # rank tables of tiktoken and of our loading, measured with 163,584 random tokens
THREAD_BYTES = 4 << 20  # per computing thread: stack, allocator's heap, what BLAS packs into (0.5 MiB with OpenBLAS)
READER_BYTES = 5 << 20  # per reading thread: a buffer for what lies at odd places, stack, allocator's heap
EXPERT_COUNTS_BYTES = 40  # per expert of the model, cached or not: how often and when it was used
SLOT_NOTES_BYTES = 2048  # per cached expert beside its record: the objects that know it
CODEBOOK_COPIES = 2  # as f32, entries last for one token and elements last for many

# Tensors in trunk.bin that are no further apart than this are read as one range, what lies between included.
_GAP_BYTES = 64 << 10


@dataclass(frozen=True)
class Range:
    """Bytes `start` to `stop` of trunk.bin, both multiples of ALIGNMENT, and the tensors in it."""

    start: int
    stop: int
    entries: tuple[TrunkEntry, ...]

    @property
    def n_bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of one process that runs one sequence, by what it is for. All sizes in bytes."""

    context: int  # positions
    chunk: int  # tokens of a prompt taken at once
    n_threads: int
    process_bytes: int
    trunk_bytes: int  # as stored, embedding and vision left out
    derived_bytes: int  # small tensors kept in another form beside the stored one
    codebook_bytes: int
    kda_state_bytes: int
    latent_bytes_per_position: int  # of all latent-attention layers: what a position of context costs
    scratch_bytes: int  # at most at once beside all this, taking a chunk or one token
    stride_bytes: int  # of one expert's record
    minimum_slots: int  # experts that must fit at once
    experts_per_token: int  # of all layers
    n_experts: int  # of all layers

    @property
    def latent_bytes(self) -> int:
        """Latent caches of the whole context."""
        return self.context * self.latent_bytes_per_position

    @property
    def minimum_cache_bytes(self) -> int:
        """The smallest expert cache that works: a layer's experts and those read ahead."""
        return self.minimum_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """What caching one expert takes, its record and what is noted about it."""
        return self.stride_bytes + SLOT_NOTES_BYTES

    @property
    def parts(self) -> dict[str, int]:
        """What the floor is made of, by name."""
        return {
            "process": self.process_bytes,
            "trunk": self.trunk_bytes,
            "derived": self.derived_bytes,
            "codebooks": self.codebook_bytes,
            "kda_state": self.kda_state_bytes,
            "latent_cache": self.latent_bytes,
            "scratch": self.scratch_bytes,
            "minimum_cache": self.minimum_cache_bytes,
        }

    @property
    def floor_bytes(self) -> int:
        """The smallest budget."""
        return sum(self.parts.values())

    @property
    def working_set_bytes(self) -> int:
        """Experts of one token: what is read for it where nothing is cached."""
        return self.experts_per_token * self.stride_bytes

    @property
    def most_bytes(self) -> int:
        """The budget beyond which more memory changes nothing: every expert is cached."""
        return self.floor_bytes + max(0, self.n_experts - self.minimum_slots) * self.slot_bytes

    def n_slots(self, budget_bytes: int) -> int:
        """How many experts a budget has room for; at most all of them. Not for a budget below the floor."""
        more = (budget_bytes - self.floor_bytes) // self.slot_bytes
        return max(self.minimum_slots, min(self.minimum_slots + more, self.n_experts))

    def cache_bytes(self, budget_bytes: int) -> int:
        """Bytes of the records in as many slots as a budget has room for."""
        return self.n_slots(budget_bytes) * self.stride_bytes


def plan_memory(manifest: Manifest, model: ModelConfig, options: RunOptions, *, n_threads: int) -> MemoryPlan:
    """The memory that an opened container takes with these options and `n_threads` computing threads."""
    layout = RecordLayout(manifest.expert_quant, model.expert_shapes)
    quant = manifest.expert_quant
    entries = resident_entries(manifest)
    n_kda, n_moe = len(model.kda.layers), len(model.moe_layers)
    kda, mla = model.kda, model.mla
    kda_elements = kda.n_heads * kda.head_dim**2 + 3 * (kda.conv_kernel - 1) * kda.width
    return MemoryPlan(
        context=options.context,
        chunk=options.chunk,
        n_threads=n_threads,
        process_bytes=PROCESS_BYTES
        + TOKENIZER_BYTES_PER_TOKEN * model.vocab_size
        + THREAD_BYTES * n_threads
        + READER_BYTES * options.readers
        + EXPERT_COUNTS_BYTES * n_moe * model.moe.n_experts,
        trunk_bytes=sum(part.n_bytes for part in merged_ranges(entries)),
        derived_bytes=_derived_bytes(model, entries),
        codebook_bytes=CODEBOOK_COPIES * n_moe * quant.n_codebooks * quant.n_entries * VEC_DIM * F32_BYTES,
        kda_state_bytes=n_kda * kda_elements * F32_BYTES,
        latent_bytes_per_position=(model.n_layers - n_kda) * (mla.kv_lora_rank + mla.qk_rope_head_dim) * F32_BYTES,
        scratch_bytes=scratch_bytes(model, quant, chunk=min(options.chunk, options.context), n_threads=n_threads),
        stride_bytes=layout.stride_bytes,
        minimum_slots=minimum_slots(model.moe.top_k, n_moe * model.moe.n_experts),
        experts_per_token=n_moe * model.moe.top_k,
        n_experts=n_moe * model.moe.n_experts,
    )


def minimum_slots(top_k: int, n_records: int) -> int:
    """Slots a store needs: a layer's experts for one token, and as many being read ahead; no more than there are."""
    return min(2 * top_k, n_records)


def resident_entries(manifest: Manifest) -> list[TrunkEntry]:
    """The trunk tensors that running text keeps in memory, in the order in which they lie in trunk.bin."""
    resident = []
    for entry in manifest.trunk:
        name = entry.name.removeprefix(manifest.tensor_prefix)
        if name.startswith(_RESIDENT_NAMES) and name != EMBEDDING_NAME:
            resident.append(entry)
    return sorted(resident, key=lambda entry: entry.offset)


def merged_ranges(entries: Iterable[TrunkEntry]) -> list[Range]:
    """Ranges of whole pages of trunk.bin that cover `entries`, given in the order of their offsets; none overlap."""
    ranges: list[Range] = []
    for entry in entries:
        start = entry.offset // ALIGNMENT * ALIGNMENT
        stop = align_up(entry.offset + entry.n_bytes, ALIGNMENT)
        if ranges and start <= ranges[-1].stop + _GAP_BYTES:
            last = ranges.pop()
            ranges.append(Range(last.start, max(stop, last.stop), (*last.entries, entry)))
        else:
            ranges.append(Range(start, stop, (entry,)))
    return ranges


def _derived_bytes(model: ModelConfig, entries: Iterable[TrunkEntry]) -> int:
    """Convolution taps with their channels last, the products of mixers, and f32 copies of what is stored otherwise."""
    taps = len(model.kda.layers) * 3 * model.kda.width * model.kda.conv_kernel
    mixers = 0 if model.attn_res_block_size is None else 2 * model.n_layers * model.hidden_size
    misaligned = sum(entry.n_bytes for entry in entries if entry.fmt is TrunkFormat.F32 and entry.offset % F32_BYTES)
    return F32_BYTES * (taps + mixers) + misaligned
