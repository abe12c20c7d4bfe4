"""An answer as `run` and `chat` show it: text or ids while they are made, then a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.progress import size
from runtime.commands.streams import Streams

if TYPE_CHECKING:
    from runtime.api import Answer, OpenModel
    from runtime.disk.tally import Statistics
    from runtime.text.generate import Outcome, Step

_ENDS = {
    "stop": "stop string",
    "length": "-n reached",
    "context": "the context is full, --ctx gives it more room",
    "stopped": "interrupted",
}


def show_answer(model: OpenModel, answer: Answer, streams: Streams, *, as_json: bool) -> None:
    """Show the answer to its end and summarise it: in words on stderr, or as the last JSON object."""
    before = model.engine.store.statistics
    if as_json:
        for step in answer.steps():
            streams.show_object(_step_object(step))
    elif model.optional_tokenizer is None:
        _show_ids(answer, streams)
    else:
        _show_text(answer, streams)
    used = model.engine.store.statistics - before
    if as_json:
        streams.show_object({"summary": summary(answer.outcome, used)})
    else:
        streams.say(summary_text(answer.outcome, used))


def summary(outcome: Outcome, used: Statistics) -> dict[str, Any]:
    """What an answer took."""
    return {
        "reason": outcome.reason,
        "prompt_tokens": outcome.n_prompt,
        "prompt_seconds": outcome.prompt_seconds,
        "prompt_tokens_per_second": outcome.prompt_tokens_per_second,
        "tokens": outcome.n_generated,
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "hits": used.n_hits,
        "misses": used.n_misses,
        "read_bytes": used.read_bytes,
    }


def summary_text(outcome: Outcome, used: Statistics) -> str:
    """The same as one line."""
    end = _ENDS.get(outcome.reason)
    return (
        f"[{outcome.n_generated} tokens in {outcome.seconds:.1f} s ({outcome.tokens_per_second:.2f} tokens/s) after "
        f"{outcome.n_prompt} in {outcome.prompt_seconds:.1f} s ({outcome.prompt_tokens_per_second:.2f} tokens/s); "
        f"experts: {used.n_hits} hits, {used.n_misses} misses, {size(used.read_bytes)} read"
        f"{'' if end is None else f'; {end}'}]"
    )


def _step_object(step: Step) -> dict[str, Any]:
    shown: dict[str, Any] = {} if step.token_id is None else {"id": step.token_id}
    for piece in step.pieces:
        key = "text" if piece.channel == "answer" else piece.channel
        shown[key] = shown.get(key, "") + piece.text
    return shown


def _show_ids(answer: Answer, streams: Streams) -> None:
    separator = ""
    for step in answer.steps():
        streams.show(f"{separator}{step.token_id}")
        separator = " "
    streams.show("\n")


def _show_text(answer: Answer, streams: Streams) -> None:
    from runtime.text.replies import Display

    display = Display(dim=streams.out.isatty())
    last = ""
    try:
        for step in answer.steps():
            text = display.text(step.pieces)
            if text:
                streams.show(text)
                last = text[-1]
    finally:
        streams.show(display.finish() + ("" if last == "\n" else "\n"))
