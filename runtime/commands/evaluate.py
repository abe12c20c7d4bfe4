"""`eval`: feed a prompt and show the likeliest next tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from container.errors import MoedockError, UsageError
from container.progress import size
from container.publish import obstacle, publishing
from runtime.commands import arguments as shared
from runtime.commands.opening import opened
from runtime.commands.streams import Streams
from runtime.text.sampling import DAMAGED

if TYPE_CHECKING:
    from runtime.api import OpenModel

F32 = npt.NDArray[np.float32]

_EXAMPLES = """\
  python -m runtime eval model.waste "The capital of France is"
  python -m runtime eval model.waste --ids 18805,308,799 --dump-logits logits.npy"""


def add_parser(commands: shared.Commands) -> None:
    """Its command line."""
    parser = shared.add_command(
        commands, "eval", "feed a prompt and show the likeliest next tokens", work, examples=_EXAMPLES
    )
    shared.add_prompt(parser)
    parser.add_argument("--top", type=shared.count, default=10, metavar="N", help="next tokens to show (default 10)")
    parser.add_argument(
        "--dump-logits", type=Path, metavar="FILE.npy", help="write the logits of every position, [T, vocabulary] f32"
    )
    shared.add_json(parser)
    shared.add_opening(parser)


def work(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run it; the exit code."""
    dump: Path | None = arguments.dump_logits
    reason = None if dump is None else obstacle(dump)
    if reason is not None:  # known before hours of work, not after
        raise MoedockError(f"{dump}: logits cannot be written ({reason})")
    prompt = shared.prompt(arguments, streams)
    with opened(arguments, streams) as model:
        ids = model.encoded(prompt)
        report = evaluate(model, ids, top=arguments.top, dump=dump)
    return streams.show_result(report, evaluation_text(report), as_json=arguments.json)


def evaluate(model: OpenModel, ids: Sequence[int], *, top: int, dump: Path | None) -> dict[str, Any]:
    """The `top` likeliest tokens after `ids`; `dump` receives the logits of all positions, whole or not at all."""
    if not ids:
        raise UsageError("the prompt has no token")
    before = model.engine.store.statistics
    start = perf_counter()
    logits = model.engine.evaluate(ids, last_only=dump is None).logits
    seconds = perf_counter() - start
    used = model.engine.store.statistics - before
    if not np.isfinite(logits).all():
        raise MoedockError(f"{model.folder}: {DAMAGED}")
    if dump is not None:
        _dump(dump, logits)
    return {
        "ids": list(ids),
        "top": _likeliest(model, logits[-1], top),
        "seconds": seconds,
        "tokens_per_second": len(ids) / seconds,
        "expert_reads": used.n_reads,
        "expert_read_bytes": used.read_bytes,
    }


def evaluation_text(report: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{len(report['ids'])} tokens in {report['seconds']:.3f} s ({report['tokens_per_second']:.2f} tokens/s), "
        f"{report['expert_reads']} experts read ({size(report['expert_read_bytes'])})",
        f"{'id':>8}  {'logit':>9}  {'share':>7}  token",
    ]
    for token in report["top"]:
        shown = "" if token["text"] is None else repr(token["text"])
        lines.append(f"{token['id']:>8}  {token['logit']:>9.4f}  {token['probability']:>7.2%}  {shown}".rstrip())
    return "\n".join(lines)


def _likeliest(model: OpenModel, logits: F32, top: int) -> list[dict[str, Any]]:
    order = np.argsort(-logits, kind="stable")[:top]
    exponentials = np.exp(logits.astype(np.float64) - float(logits.max()))
    probabilities = exponentials / exponentials.sum()
    tokenizer = model.optional_tokenizer
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
        # NumPy's own, of a write that came up short, has no strerror
        raise MoedockError(f"{path}: logits cannot be written ({error.strerror or error})") from None
