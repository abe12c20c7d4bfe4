"""One layer's routed experts: sample → train codebooks → encode every expert → bank. Each tensor is read once.

The experts drawn for training are kept in memory as raw bytes until their turn to be encoded comes, so that a
second read is never needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from container.layout import VEC_DIM
from container.manifest import FileEntry
from container.model import KINDS
from container.publish import publish_bytes
from container.records import CodebookRecord, ExpertRecord
from container.writer import BankWriter
from convert.bank_report import BankFigures, BankReport
from convert.codebooks import initial_codebooks, refined_codebooks
from convert.encode import STRIP_ROWS, EncodedRows, RowEncoder, make_encoder
from convert.kernels import scale_rows
from convert.plan import LayerExperts
from convert.quality import Effort
from convert.source import RawRows, SourceTensor
from convert.timing import Timing

# Experts that training draws from. Errors differ by 1.15 × between experts and by 1.01 × between layers
# (published for K3), so a few experts stand for all; this many also bound the raw bytes kept in memory.
SAMPLE_EXPERTS = 8
SAMPLE_BYTES = 512 << 20

# Rows drawn together for training, so that drawing costs few calls and still spreads over the matrix.
DRAWN_ROWS = 16

OpenMatrix = Callable[[int, str], SourceTensor]  # (expert, kind) -> its source


@dataclass(frozen=True)
class RawMatrix:
    """One expert matrix as read: its bytes, and the source that can decode them."""

    source: SourceTensor
    raw: RawRows

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows `start` to `stop` as f32."""
        return self.source.decode(self.slice(start, stop))

    def slice(self, start: int, stop: int) -> RawRows:
        """The bytes of rows `start` to `stop`."""
        return self.source.slice(self.raw, start, stop)


RawExpert = Mapping[str, RawMatrix]


@dataclass(frozen=True)
class WrittenBank:
    """A published bank with its codebooks, and the figures of its encoding."""

    bank: FileEntry
    codebooks: FileEntry
    figures: BankFigures


@dataclass
class BankJob:
    """Everything one layer's conversion needs, bound together so that its steps stay short."""

    plan: LayerExperts
    open_matrix: OpenMatrix
    threads: ThreadPoolExecutor
    timing: Timing
    seed: int
    effort: Effort
    device: str
    encoders: dict[str, RowEncoder] = field(default_factory=dict)  # by kind
    kept: dict[int, RawExpert] = field(default_factory=dict)

    def run(self, bank_path: Path, codebooks_path: Path, progress: Callable[[int], None]) -> WrittenBank:
        """Write the codebooks, then the bank; `progress` gets the number of experts done."""
        entries = self._train()
        codebooks = self._write_codebooks(codebooks_path, entries)
        report = BankReport(self.plan)
        n_experts = self.plan.bank.n_experts
        with BankWriter(bank_path, self.plan.layout, n_experts=n_experts) as writer:
            for expert, encoded in enumerate(self._encoded_experts()):
                for kind in KINDS:
                    report.add(expert, kind, encoded[kind])
                with self.timing.step("write"):
                    writer.append(self._record(expert, encoded))
                progress(expert + 1)
        return WrittenBank(writer.entry, codebooks, report.figures())

    def _train(self) -> dict[str, npt.NDArray[np.float16]]:
        """Codebooks by kind, trained on rows drawn from a seeded choice of experts."""
        random = np.random.default_rng([self.seed, self.plan.layer])
        n_experts = self.plan.bank.n_experts
        n_drawn = max(1, min(SAMPLE_EXPERTS, n_experts, SAMPLE_BYTES // self._expert_bytes(0)))
        drawn = sorted(int(expert) for expert in random.choice(n_experts, n_drawn, replace=False))
        self.kept = {expert: self._read(expert) for expert in drawn}
        samples = {kind: self._sample(kind, random) for kind in KINDS}
        seeds = {kind: int(random.integers(1 << 30)) for kind in KINDS}
        quant, effort = self.plan.layout.quant, self.effort

        def initial(kind: str) -> npt.NDArray[np.float16]:
            return initial_codebooks(samples[kind], quant, seed=seeds[kind])

        books = dict(zip(KINDS, self._timed_map(initial, KINDS), strict=True))
        for kind in KINDS:
            books[kind] = refined_codebooks(
                samples.pop(kind), books[kind], quant, effort.training_width, self._timed_map, self.device
            )
        self.encoders = {
            kind: make_encoder(books[kind].astype(np.float32), quant, effort.beam_width, self.device) for kind in KINDS
        }
        return books

    def _timed_map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        """Training's map over the threads."""

        def timed(item: Any) -> Any:
            with self.timing.step("train"):
                return function(item)

        return self.threads.map(timed, items)

    def _sample(self, kind: str, random: np.random.Generator) -> npt.NDArray[np.float32]:
        """Row-scaled vectors [n, 8] of one kind in random order, from the kept experts."""
        rows, cols = self.plan.layout.shapes[kind]
        groups = -(-rows // DRAWN_ROWS)
        wanted = -(-self.effort.sample_vectors * VEC_DIM // (cols * len(self.kept) * DRAWN_ROWS))
        parts = []
        for matrices in self.kept.values():
            for group in random.choice(groups, min(groups, wanted), replace=False):
                first = int(group) * DRAWN_ROWS
                parts.append(self._scaled_vectors(matrices[kind], first, min(rows, first + DRAWN_ROWS)))
        vectors = np.concatenate(parts)
        return vectors[random.permutation(len(vectors))[: self.effort.sample_vectors]]

    def _scaled_vectors(self, matrix: RawMatrix, start: int, stop: int) -> npt.NDArray[np.float32]:
        with self.timing.step("dequantise"):
            rows = matrix.rows(start, stop)
            bad = scale_rows(rows, np.empty(len(rows), dtype=np.float64))
        if bad >= 0:
            raise matrix.source.bad_weight(start + int(bad), rows)
        return rows.reshape(-1, VEC_DIM)

    def _write_codebooks(self, path: Path, entries: Mapping[str, npt.NDArray[np.float16]]) -> FileEntry:
        books = [book for kind in KINDS for book in entries[kind]]
        base = self.plan.bank.codebook_base
        data = b"".join(CodebookRecord(base + n, book).pack() for n, book in enumerate(books))
        publish_bytes(path, data)
        return FileEntry.of_bytes(data)

    def _encoded_experts(self) -> Iterator[dict[str, list[EncodedRows]]]:
        """Encoded experts in order; the next one is read and begun while the last one is being written."""
        waiting: dict[str, list[Future[EncodedRows]]] | None = None
        for expert in range(self.plan.bank.n_experts):
            begun = self._begin(expert)
            if waiting is not None:
                yield _results(waiting)
            waiting = begun
        if waiting is not None:
            yield _results(waiting)

    def _begin(self, expert: int) -> dict[str, list[Future[EncodedRows]]]:
        matrices = self.kept.pop(expert, None) or self._read(expert)
        return {kind: self._begin_matrix(matrices[kind], kind) for kind in KINDS}

    def _begin_matrix(self, matrix: RawMatrix, kind: str) -> list[Future[EncodedRows]]:
        rows, cols = self.plan.layout.shapes[kind]
        step = self.encoders[kind].strip_rows(cols)
        return [
            self.threads.submit(self._encode_strip, matrix, kind, start, min(rows, start + step))
            for start in range(0, rows, step)
        ]

    def _encode_strip(self, matrix: RawMatrix, kind: str, start: int, stop: int) -> EncodedRows:
        encoded = self.encoders[kind].encode(matrix.source, matrix.slice(start, stop), self.timing)
        if isinstance(encoded, int):
            first = start + encoded - encoded % STRIP_ROWS
            raise matrix.source.bad_weight(start + encoded, matrix.rows(first, min(stop, first + STRIP_ROWS)))
        return encoded

    def _record(self, expert: int, encoded: Mapping[str, list[EncodedRows]]) -> ExpertRecord:
        return ExpertRecord(
            self.plan.layer,
            expert,
            self.plan.bank.codebook_base,
            {kind: np.concatenate([strip.indices for strip in encoded[kind]]) for kind in KINDS},
            {kind: np.concatenate([strip.scales for strip in encoded[kind]]) for kind in KINDS},
        )

    def _read(self, expert: int) -> RawExpert:
        with self.timing.step("read"):
            sources = {kind: self.open_matrix(expert, kind) for kind in KINDS}
            return {kind: RawMatrix(source, source.read()) for kind, source in sources.items()}

    def _expert_bytes(self, expert: int) -> int:
        return sum(self.open_matrix(expert, kind).n_bytes for kind in KINDS)


def _results(waiting: Mapping[str, list[Future[EncodedRows]]]) -> dict[str, list[EncodedRows]]:
    return {kind: [future.result() for future in futures] for kind, futures in waiting.items()}
