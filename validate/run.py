"""One validation from beginning to end: structure first, and only what holds is compared further."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from container.checkpoint import Checkpoint
from container.errors import CheckError, MoedockError, UsageError
from container.machine import available_memory
from container.manifest import Manifest
from container.model import ModelConfig
from container.progress import size
from container.reader import ContainerReader
from validate.report import Findings, LogitsReport, Report, StructureReport, TextReport, WeightsReport
from validate.structure import check_structure

DEFAULT_TOLERANCE = 1e-5
# The logits of a model up to this size are compared without being asked for: a few minutes of reference at most.
SMALL_MODEL_WEIGHTS = 2_000_000_000
DEFAULT_WINDOW = 256
# The decoded checkpoint is held over a text's windows when it takes no more than this share of the free memory; the
# runtime's trunk and the logits need the rest.
KEPT_SHARE = 0.5
DECODED_WEIGHT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to check."""

    container: Path
    source: Path | None = None
    logits: bool | None = None  # None: when the model is small
    tolerance: float = DEFAULT_TOLERANCE
    n_experts: int | None = None  # compared per layer; None: all
    ids: Sequence[int] | None = None  # the one prompt; None: a few of our own
    workers: int | None = None  # None: as the machine allows
    text: Path | None = None  # what source and container are compared on
    window: int | None = None  # tokens read from an empty state; None: DEFAULT_WINDOW
    max_tokens: int | None = None  # of the text; None: all

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise UsageError(f"--tolerance must be a number above 0, found {self.tolerance}")
        for name, value, least in (
            ("--experts", self.n_experts, 1),
            ("--workers", self.workers, 1),
            ("--window", self.window, 1),
            ("--max-tokens", self.max_tokens, 2),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, found {value}")
        if self.n_experts is not None and self.source is None:
            raise UsageError("--experts says how many experts to compare with the checkpoint; it needs --source")
        if self.ids is not None and not self.ids:
            raise UsageError("--ids is the prompt of the logits check; it needs at least one token")
        if self.ids is not None and self.logits is False:
            raise UsageError("--ids is the prompt of the logits check, which --no-logits leaves out")
        if self.text is not None and self.source is None:
            raise UsageError("--text compares the container with the checkpoint on a text; it needs --source")
        if self.text is None and (self.window, self.max_tokens) != (None, None):
            raise UsageError("--window and --max-tokens say how to read the text; they need --text")


def validate(options: Options, stream: TextIO) -> Report:
    """Run every check asked for. Progress goes to `stream`.

    A bad container or checkpoint is a problem in the report. Raises UsageError for ids outside the vocabulary and for a
    text that cannot be used.
    """
    findings = Findings()
    _check_ids(options)
    text_ids: list[int] | None = None
    with _problems(options.container, findings):
        text_ids = _text_ids(options)
    structure = StructureReport(ok=False)
    weights: WeightsReport | None = None
    logits: LogitsReport | None = None
    text: TextReport | None = None
    with _problems(options.container, findings):
        structure, found = check_structure(options.container, n_threads=options.workers, stream=stream)
        findings.merge(found)
    if structure.ok:
        with _problems(options.container, findings), ContainerReader.open(options.container) as reader:
            checkpoint = None
            if options.source is not None:
                with _problems(options.source, findings):
                    checkpoint = Checkpoint.open(options.source)
                    weights = _check_weights(reader, checkpoint, options, findings, stream)
            if _wants_logits(reader, options, findings):
                logits = _check_logits(reader, checkpoint, options, findings, stream)
            if checkpoint is not None and text_ids is not None:
                text = _check_text(reader, checkpoint, text_ids, options, findings, stream)
    elif options.source is not None or options.logits:
        findings.note("nothing was compared, because the structure does not hold")
    return Report(
        container=str(options.container),
        structure=structure,
        weights=weights,
        logits=logits,
        text=text,
        findings=findings,
    )


def _check_ids(options: Options) -> None:
    """Refuse a prompt outside the vocabulary now, not after hours of reading. A bad container is found later."""
    vocab_size = None if options.ids is None else _vocab_size(options.container)
    if options.ids is None or vocab_size is None:
        return
    outside = [token for token in options.ids if not 0 <= token < vocab_size]
    if outside:
        raise UsageError(f"--ids: token {outside[0]} is outside the vocabulary (0 to {vocab_size - 1})")


def _text_ids(options: Options) -> list[int] | None:
    """The text's tokens, read now for the same reason. None without a text, and for a container that is none."""
    vocab_size = None if options.text is None else _vocab_size(options.container)
    if options.text is None or vocab_size is None:
        return None
    from validate.tokens import read_ids

    return read_ids(options.text, options.container, vocab_size, max_tokens=options.max_tokens)


def _vocab_size(folder: Path) -> int | None:
    """None where the manifest cannot be read: the structure check says what is wrong."""
    try:
        return ModelConfig.from_config(Manifest.read(folder).config).vocab_size
    except MoedockError:
        return None


@contextlib.contextmanager
def _problems(folder: Path, findings: Findings) -> Iterator[None]:
    """Turn what a bad file raises into a problem; a usage error passes."""
    try:
        yield
    except UsageError:
        raise
    except MoedockError as error:
        findings.problem(str(error))
    except OSError as error:
        findings.problem(f"{error.filename or folder}: {error.strerror or error}")
    except MemoryError:
        findings.problem(f"{folder}: there is not enough memory to go on")
    except RecursionError:
        findings.problem(f"{folder}: its config is nested too deeply to be compared")
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch's allocator raises no MemoryError
            raise
        findings.problem(f"{folder}: there is not enough memory to go on")


def _wants_logits(reader: ContainerReader, options: Options, findings: Findings) -> bool:
    if options.logits is False:
        return False
    if options.logits or options.ids is not None:
        _require_memory(reader, "comparing logits", "leave it out with --no-logits")
        return True
    n_weights = count_weights(reader)
    if n_weights > SMALL_MODEL_WEIGHTS:
        findings.note(f"logits were not compared: the model has {n_weights:,} weights; --logits compares them anyway")
    return n_weights <= SMALL_MODEL_WEIGHTS


def _require_memory(reader: ContainerReader, what: str, remedy: str) -> None:
    """The runtime holds the trunk beside the reference. Raises CheckError when it cannot fit."""
    available = available_memory()
    if available is not None and reader.trunk_bytes > available:
        raise CheckError(
            f"{reader.folder}: {what} needs the trunk in memory, {size(reader.trunk_bytes)}; "
            f"{size(available)} are available: {remedy}, or use a larger machine"
        )


def _can_be_kept(reader: ContainerReader) -> bool:
    """True when the decoded checkpoint surely fits in memory."""
    available = available_memory()
    return available is not None and DECODED_WEIGHT_BYTES * count_weights(reader) <= KEPT_SHARE * available


def count_weights(reader: ContainerReader) -> int:
    """Weights of a container's model, trunk and experts together."""
    per_expert = sum(math.prod(shape) for shape in reader.layout.shapes.values())
    trunk = sum(math.prod(entry.shape) for entry in reader.manifest.trunk)
    return trunk + per_expert * sum(bank.n_experts for bank in reader.manifest.layers.values())


# torch and the runtime's kernels take seconds to load, so a structure check does without them.


def _check_weights(
    reader: ContainerReader, checkpoint: Checkpoint, options: Options, findings: Findings, stream: TextIO
) -> WeightsReport:
    from validate.weights import check_weights

    report, found = check_weights(
        reader, checkpoint, n_experts=options.n_experts, n_threads=options.workers, stream=stream
    )
    findings.merge(found)
    return report


def _check_logits(
    reader: ContainerReader, checkpoint: Checkpoint | None, options: Options, findings: Findings, stream: TextIO
) -> LogitsReport:
    from validate.logits import check_logits

    report, found = check_logits(reader, checkpoint, tolerance=options.tolerance, ids=options.ids, stream=stream)
    findings.merge(found)
    return report


def _check_text(
    reader: ContainerReader,
    checkpoint: Checkpoint,
    ids: list[int],
    options: Options,
    findings: Findings,
    stream: TextIO,
) -> TextReport:
    from validate.text import check_text

    assert options.text is not None, "ids come from a text"
    _require_memory(reader, "comparing on a text", "leave out --text")
    report, found = check_text(
        reader,
        checkpoint,
        ids,
        file=options.text,
        window=options.window or DEFAULT_WINDOW,
        keep=_can_be_kept(reader),
        stream=stream,
    )
    findings.merge(found)
    return report
