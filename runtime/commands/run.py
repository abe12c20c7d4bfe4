"""`run`: go on from a prompt."""

from __future__ import annotations

import argparse

from container.command import INTERRUPTED
from runtime.commands import arguments as shared
from runtime.commands.answering import show_answer
from runtime.commands.opening import check_session, opened, resume
from runtime.commands.streams import Streams
from runtime.text.interrupt import Interruptible

_EXAMPLES = """\
  python -m runtime run model.waste "The capital of France is" -n 40
  python -m runtime run model.waste --file draft.txt --temp 0.7 --top-p 0.95 --session draft.session
  python -m runtime run model.waste --session draft.session        # goes on where it ended"""


def add_parser(commands: shared.Commands) -> None:
    """Its command line."""
    parser = shared.add_command(commands, "run", "go on from a prompt", work, examples=_EXAMPLES)
    shared.add_prompt(parser)
    shared.add_sampling(parser)
    shared.add_session(parser)
    shared.add_json(parser, "print a JSON object per token, then one with a summary")
    shared.add_opening(parser)


def work(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run it; the exit code. Ctrl-C ends the answer: what there is of it is summed up and saved."""
    goes_on = arguments.session is not None and arguments.session.exists()
    prompt = shared.prompt(arguments, streams, needed=not goes_on)
    choices = shared.choices(arguments)
    check_session(arguments)
    with opened(arguments, streams) as model, Interruptible() as interrupted:
        resume(model, arguments.session)
        answer = model.generate(prompt, **choices, stop_when=lambda _: interrupted())
        show_answer(model, answer, streams, as_json=arguments.json)
        if arguments.session is not None:
            model.save(arguments.session)
    return INTERRUPTED if interrupted() else 0
