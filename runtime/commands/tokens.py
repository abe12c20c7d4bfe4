"""`tokenize` and `detokenize`: text into token ids and back, without the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from container.command import token_ids
from container.errors import UsageError
from container.manifest import Manifest
from container.reader import model_of
from runtime.commands import arguments as shared
from runtime.commands.streams import Streams
from runtime.text.tokenizer import Token, Tokenizer, detokenize, tokenize

_EXAMPLES = """\
  python -m runtime tokenize model.waste "The library"
  python -m runtime tokenize model.waste "The library" --ids | python -m runtime detokenize model.waste -"""


def add_parsers(commands: shared.Commands) -> None:
    """Their command lines."""
    parser = shared.add_command(commands, "tokenize", "show the tokens of a text", tokenizing, examples=_EXAMPLES)
    shared.add_text(parser, "text")
    parser.add_argument("--ids", dest="ids_only", action="store_true", help="print the ids alone")
    parser.add_argument("--markup", action="store_true", help="names of special tokens in the text mean these tokens")
    shared.add_json(parser)

    parser = shared.add_command(commands, "detokenize", "show the text of token ids", detokenizing, examples=_EXAMPLES)
    parser.add_argument("ids", nargs="+", metavar="ID", help="token ids; - reads them from stdin")
    shared.add_json(parser)


def tokenizing(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run `tokenize`; the exit code."""
    arguments.ids = None
    text = shared.prompt(arguments, streams)
    assert isinstance(text, str)
    tokens = tokenize(_tokenizer(arguments.container), text, markup=arguments.markup)
    if arguments.ids_only:
        words = " ".join(str(token.id) for token in tokens)
    else:
        words = "\n".join([*map(_line, tokens), f"{len(tokens)} tokens"])
    report = {"ids": [token.id for token in tokens], "tokens": [vars(token) for token in tokens]}
    return streams.show_result(report, words, as_json=arguments.json)


def detokenizing(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run `detokenize`; the exit code."""
    words = streams.stdin.read() if arguments.ids == [shared.STDIN] else " ".join(arguments.ids)
    ids = _ids(words)
    tokenizer = _tokenizer(arguments.container)
    text = tokenizer.decode(ids)
    report = {"text": text, "tokens": [vars(token) for token in detokenize(tokenizer, ids)]}
    return streams.show_result(report, text, as_json=arguments.json)


def _ids(words: str) -> list[int]:
    try:
        return token_ids(words)
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from None


def _line(token: Token) -> str:
    return f"{token.id:>8}  {token.text!r}{'  special' if token.special else ''}"


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, model_of(folder, Manifest.read(folder)).vocab_size)
