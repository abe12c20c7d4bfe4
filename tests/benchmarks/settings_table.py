"""What each setting of the converter does to a model: `python -m tests.benchmarks.settings_table CKPT TEXT`.

Converts the checkpoint with every setting and prints one Markdown table. Containers run in the runtime, as users run
them. Rows with a part "as the source", and those with experts rounded to the nearest, are no containers: they join the
parts in the PyTorch reference.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from container.checkpoint import Checkpoint
from container.model import KINDS, ModelConfig
from container.reader import ContainerReader
from validate.pairing import expert_name
from validate.reference.model import forward
from validate.reference.sources import EXPERT_NAME, CheckpointTensors, ContainerTensors
from validate.reference.tensors import KeptTensors, TensorSource
from validate.report import Estimate, RouterReport, TextFigures
from validate.run import DEFAULT_WINDOW
from validate.text import SOURCE_DTYPE, check_text, figures, score
from validate.tokens import Window, cut, read_ids
from validate.weights import Sums, difference

ROUNDED = "4-bit round-to-nearest"
ROUNDED_BITS = 4.0
ROUNDED_STEPS = 7  # from 0 to a row's amax; the code -8 stays unused
AS_SOURCE = "as the source"
HEADINGS = (
    "experts", "trunk", "bits per expert weight", "relative error of experts", "perplexity", "Δ log-perplexity",
    "KL, nats", "same first choice",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One conversion."""

    experts: str
    trunk: str
    arguments: tuple[str, ...]  # of `python -m convert`


BALANCED = Setting("balanced vq3r", "4 bits", ("--quality", "balanced", "--format", "vq3r", "--trunk-bits", "4"))
SETTINGS = (
    Setting("fast vq3r", "4 bits", ("--quality", "fast", "--format", "vq3r", "--trunk-bits", "4")),
    BALANCED,
    Setting("best vq3r", "4 bits", ("--quality", "best", "--format", "vq3r", "--trunk-bits", "4")),
    Setting("balanced vq4p", "4 bits", ("--quality", "balanced", "--format", "vq4p", "--trunk-bits", "4")),
    Setting("balanced vq2r", "4 bits", ("--quality", "balanced", "--format", "vq2r", "--trunk-bits", "4")),
    Setting("balanced vq3r", "8 bits", ("--quality", "balanced", "--format", "vq3r", "--trunk-bits", "8")),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    experts: str
    trunk: str
    bits: float | None  # indices or rounded numbers alone; None: as the source
    error: float
    figures: TextFigures


class JoinedTensors:
    """A `TensorSource` that takes the routed experts from one model and all else from another."""

    def __init__(self, *, experts: TensorSource, trunk: TensorSource) -> None:
        self.experts = experts
        self.trunk = trunk

    def __getitem__(self, name: str) -> Tensor:
        return self._side(name)[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of matrix `name`."""
        return self._side(name).rows(name, start, stop)

    def _side(self, name: str) -> TensorSource:
        return self.experts if EXPERT_NAME.fullmatch(name) else self.trunk


class RoundedTensors:
    """A `TensorSource` that rounds another's matrices row by row to the nearest of 4 bits."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    def __getitem__(self, name: str) -> Tensor:
        return rounded_to_nearest(self.source[name])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of matrix `name`."""
        return rounded_to_nearest(self.source.rows(name, start, stop))


def rounded_to_nearest(matrix: Tensor) -> Tensor:
    """Each row in whole steps of its amax / 7."""
    step = matrix.abs().amax(dim=1, keepdim=True) / ROUNDED_STEPS
    return torch.where(step > 0, torch.round(matrix / step), 0.0) * step


class Bench:
    """One checkpoint and one text, on which everything is measured."""

    def __init__(
        self, checkpoint: Checkpoint, reader: ContainerReader, text: Path, window: int, max_tokens: int | None
    ):
        """Any container of the checkpoint gives tokenizer and model."""
        self.checkpoint = checkpoint
        self.text = text
        self.window = window
        self.model = reader.model
        self.ids = read_ids(text, reader.folder, self.model.vocab_size, max_tokens=max_tokens)
        self.source = KeptTensors(CheckpointTensors(checkpoint))
        self.windows = cut(self.ids, window)
        self.expected = [self._logits(self.source, each) for each in self.windows]

    def container(self, setting: Setting, reader: ContainerReader) -> tuple[Row, RouterReport]:
        """A container as it is, in the runtime."""
        report, _ = check_text(
            reader, self.checkpoint, self.ids, file=self.text, window=self.window, keep=True, stream=io.StringIO()
        )
        error = expert_error(ContainerTensors(reader), self.source, self.model)
        return Row(setting.experts, setting.trunk, bits_of(reader), error, report.figures), report.router

    def joined(
        self,
        experts: str = AS_SOURCE,
        trunk: str = AS_SOURCE,
        *,
        bits: float | None = None,
        expert_tensors: TensorSource | None = None,
        trunk_tensors: TensorSource | None = None,
    ) -> Row:
        """Experts and trunk of different origin (None: the source), in the reference."""
        tensors = JoinedTensors(experts=expert_tensors or self.source, trunk=trunk_tensors or self.source)
        scores = [
            score(expected, self._logits(tensors, each), each.targets)
            for each, expected in zip(self.windows, self.expected, strict=True)
        ]
        return Row(experts, trunk, bits, expert_error(tensors, self.source, self.model), figures(scores))

    def _logits(self, tensors: TensorSource, window: Window) -> Tensor:
        return forward(tensors, self.model, window.ids, dtype=SOURCE_DTYPE).logits


def rows(bench: Bench, readers: dict[Setting, ContainerReader]) -> Iterator[Row]:
    """The source; every container; every container's experts alone; each kind of trunk alone; rounding."""
    yield bench.joined()
    routers = []
    for setting, reader in readers.items():
        row, router = bench.container(setting, reader)
        routers.append(router)
        yield row
    stored = {setting: KeptTensors(ContainerTensors(reader)) for setting, reader in readers.items()}
    for setting, tensors in stored.items():
        if setting.trunk == BALANCED.trunk:
            yield bench.joined(setting.experts, bits=bits_of(readers[setting]), expert_tensors=tensors)
    trunks = {setting.trunk: tensors for setting, tensors in stored.items()}
    for name, tensors in trunks.items():
        yield bench.joined(trunk=name, trunk_tensors=tensors)
    nearest = KeptTensors(RoundedTensors(bench.source))
    for name, trunk in ((BALANCED.trunk, trunks[BALANCED.trunk]), (AS_SOURCE, None)):
        yield bench.joined(ROUNDED, name, bits=ROUNDED_BITS, expert_tensors=nearest, trunk_tensors=trunk)
    changed, choices = routers[0].n_changed, routers[0].n_choices
    print(f"\nrouter as stored, on the source's states: {changed:,} of {choices:,} choices of an expert change")


def bits_of(reader: ContainerReader) -> float:
    """Bits per expert weight, those of the indices alone."""
    return reader.manifest.expert_quant.bits_per_weight


def expert_error(ours: TensorSource, theirs: TensorSource, model: ModelConfig) -> float:
    """‖w - w'‖ / ‖w‖ over all routed experts."""
    sums = Sums()
    for layer in model.moe_layers:
        for expert in range(model.moe.n_experts):
            for kind in KINDS:
                name = expert_name(layer, expert, kind)
                sums.add(difference(ours[name], theirs[name]))
    return sums.relative_error


def convert(checkpoint: Path, output: Path, arguments: Sequence[str]) -> None:
    """One conversion in a process of its own; its progress and errors go to stderr."""
    command = [sys.executable, "-m", "convert", str(checkpoint), str(output), *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def line(row: Row) -> str:
    """One Markdown line."""
    found = row.figures
    cells = (
        row.experts,
        row.trunk,
        "" if row.bits is None else f"{row.bits:.2f}",
        f"{row.error:.2%}",
        f"{found.perplexity_container:.3f}",
        interval(found.log_perplexity_difference, "+.4f"),
        interval(found.kl, ".4f"),
        interval(found.top1_agreement, ".1%"),
    )
    return f"| {' | '.join(cells)} |"


def interval(estimate: Estimate, form: str) -> str:
    """Value and ends."""
    ends = (estimate.value, estimate.low, estimate.high)
    value, low, high = ("–" if end is None else format(end, form) for end in ends)
    return f"{value} [{low}, {high}]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.settings_table", description=__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path)
    parser.add_argument("text", metavar="TEXT", type=Path)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, metavar="N")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    arguments = parser.parse_args(argv)
    checkpoint = Checkpoint.open(arguments.checkpoint)
    with tempfile.TemporaryDirectory(prefix="moedock-settings-") as folder, contextlib.ExitStack() as opened:
        readers = {}
        for number, setting in enumerate(SETTINGS):
            output = Path(folder) / str(number)
            convert(checkpoint.folder, output, setting.arguments)
            readers[setting] = opened.enter_context(ContainerReader.open(output))
        bench = Bench(checkpoint, readers[SETTINGS[0]], arguments.text, arguments.window, arguments.max_tokens)
        print(f"{len(bench.ids):,} tokens, {len(bench.windows)} windows of {bench.window}, each from an empty state\n")
        print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
        for row in rows(bench, readers):
            print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
