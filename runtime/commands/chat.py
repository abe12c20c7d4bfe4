"""`chat`: one answer after another, to lines from a terminal or a pipe."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from container.errors import MoedockError, UsageError
from runtime.commands import arguments as shared
from runtime.commands.answering import show_answer
from runtime.commands.opening import check_session, opened, resume
from runtime.commands.streams import Streams
from runtime.text.chat_xtml import Effort
from runtime.text.interrupt import Interruptible

if TYPE_CHECKING:
    from runtime.api import OpenModel
    from runtime.text.chat import Chat

_PROMPT = "> "
_EXAMPLES = """\
  python -m runtime chat model.waste --system "You answer in one sentence."
  echo "What is a library?" | python -m runtime chat model.waste -n 100

Ctrl-C ends an answer; Ctrl-C at the prompt, or the end of the input, leaves."""


def add_parser(commands: shared.Commands) -> None:
    """Its command line."""
    parser = shared.add_command(commands, "chat", "answer one line after another", work, examples=_EXAMPLES)
    parser.add_argument("--system", metavar="TEXT", help="said to the model before the first line")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument("--no-think", action="store_true", help="answer at once, where the model could think first")
    thinking.add_argument("--effort", choices=get_args(Effort), help="how much to think, told before the first line")
    shared.add_sampling(parser)
    shared.add_session(parser)
    shared.add_json(parser, "print a JSON object per token, and one with a summary after each answer")
    shared.add_opening(parser)


def work(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run it; the exit code. A session is saved after every answer."""
    choices = shared.choices(arguments)
    check_session(arguments)
    with opened(arguments, streams) as model:
        if model.optional_tokenizer is None:
            raise MoedockError(f"{model.folder}: has no tokenizer to chat with; `run --ids` does without")
        resume(model, arguments.session)
        chat = model.chat()
        _say_what_is_missing(chat, arguments, streams)
        if arguments.system is not None and (model.ids or chat is None):
            raise UsageError("--system goes with a chat format, and only before the first line")
        while (line := _next_line(streams)) is not None:
            if line.strip():
                _answer(model, line, choices, arguments, streams, in_turns=chat is not None)
                choices["seed"] = None  # it begins the draws of the conversation, not of every answer
    return 0


def _say_what_is_missing(chat: Chat | None, arguments: argparse.Namespace, streams: Streams) -> None:
    if chat is None:
        streams.say("this container has no chat format: each line is continued as plain text")
    elif (arguments.no_think or arguments.effort) and not chat.has_thinking:
        streams.say(f"its chat format ({chat.name}) has no thinking: --no-think and --effort change nothing")


def _next_line(streams: Streams) -> str | None:
    try:
        return streams.ask(_PROMPT)
    except EOFError:
        return None


def _answer(
    model: OpenModel,
    line: str,
    choices: dict[str, Any],
    arguments: argparse.Namespace,
    streams: Streams,
    *,
    in_turns: bool,
) -> None:
    """Answer a line: `in_turns` of the container's chat format, else by going on from it as plain text."""
    with Interruptible() as interrupted:
        choices["stop_when"] = lambda _: interrupted()
        try:
            if in_turns:
                system = None if model.ids else arguments.system
                thinking = {"thinking": not arguments.no_think, "effort": arguments.effort}
                answer = model.reply(line, system=system, **thinking, **choices)
            else:
                answer = model.generate(line, **choices)
            show_answer(model, answer, streams, as_json=arguments.json)
            if arguments.session is not None:
                model.save(arguments.session)
        except KeyboardInterrupt:
            if not interrupted():  # not a second Ctrl-C, but the end of the process
                raise
            streams.say("interrupted")
