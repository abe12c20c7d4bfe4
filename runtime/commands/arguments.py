"""Arguments that several commands share, and what is made of them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from container.byte_size import parse_bytes
from container.command import token_ids
from container.errors import MoedockError, UsageError, shown
from runtime.commands.streams import Streams
from runtime.options import RunOptions
from runtime.text.sampling import Sampling
from runtime.text.text_stream import TextStream

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # no generic class when it runs
Work = Callable[[argparse.Namespace, Streams], int]

STDIN = "-"
MOST_DIGITS = 18


def add_command(
    commands: Commands, name: str, summary: str, work: Work, *, examples: str | None = None
) -> argparse.ArgumentParser:
    """A command on a container; `work` does it and returns the exit code."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=None if examples is None else f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(work=work)
    parser.add_argument("container", type=Path, metavar="CONTAINER", help="folder with manifest.json")
    return parser


def add_json(parser: argparse.ArgumentParser, what: str = "print one JSON object") -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help=what)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """A prompt: TEXT, --file or --ids."""
    add_text(parser, "prompt")
    parser.add_argument("--ids", type=token_ids, metavar="ID,ID,…", help="the prompt as token ids")


def add_text(parser: argparse.ArgumentParser, what: str) -> None:
    """TEXT or --file."""
    parser.add_argument("text", nargs="?", metavar="TEXT", help=f"the {what}; - reads it from stdin")
    parser.add_argument("--file", metavar="FILE", help=f"read the {what} from a UTF-8 file; - is stdin")


def add_opening(parser: argparse.ArgumentParser) -> None:
    """How the container is opened."""
    add_memory(parser)
    parser.add_argument("--verify", action="store_true", help="check the checksum of everything that is read")
    parser.add_argument("--learn", action="store_true", help="note in usage.waste what to cache first next time")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """What decides how much memory is needed."""
    group = parser.add_argument_group("memory and speed", "only --chunk changes a result, and that by rounding alone")
    add = group.add_argument
    default = "(default: %(default)s)"
    add("--ctx", type=count, default=RunOptions.context, metavar="N", help=f"tokens there is room for {default}")
    add("--budget", type=byte_size, metavar="SIZE", help="of all memory, like 24GiB (default: what can be spared)")
    add("--threads", type=count, metavar="N", help="threads that compute (default: one per available core)")
    add("--readers", type=count, default=RunOptions.readers, metavar="N", help=f"threads that read {default}")
    add(
        "--lookahead",
        type=natural,
        default=RunOptions.lookahead,
        metavar="N",
        help=f"experts of the next layer to read early {default}",
    )
    add(
        "--chunk",
        type=count,
        default=RunOptions.chunk,
        metavar="N",
        help=f"tokens of a prompt to take at once {default}",
    )


def add_session(parser: argparse.ArgumentParser) -> None:
    """--session."""
    parser.add_argument(
        "--session", type=Path, metavar="FILE", help="go on where FILE ends, if it is there, and save to it"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and when an answer ends."""
    group = parser.add_argument_group("answer")
    group.add_argument(
        "-n", type=count, metavar="N", help="tokens at most (default: until the model ends, or the context)"
    )
    group.add_argument(
        "--temp",
        type=number,
        default=Sampling.temperature,
        metavar="T",
        help="0 takes the likeliest token (default), 1 draws by the model's own probabilities",
    )
    add = group.add_argument
    add("--top-p", type=number, default=Sampling.top_p, metavar="P", help="draw from the likeliest share P only")
    add("--top-k", type=natural, default=Sampling.top_k, metavar="K", help="draw from the K likeliest only")
    group.add_argument(
        "--seed", type=natural, metavar="N", help="of the draws (default: another each time, or the session's)"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )


def opening(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `runtime.open`."""
    names = ("budget", "threads", "readers", "lookahead", "chunk", "verify", "learn")
    return {"context": arguments.ctx} | {name: getattr(arguments, name) for name in names}


def memory_options(arguments: argparse.Namespace) -> RunOptions:
    """What decides how much memory is needed, for a plan."""
    names = ("threads", "readers", "lookahead", "chunk")
    return RunOptions(context=arguments.ctx, **{name: getattr(arguments, name) for name in names})


def choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `generate` and `reply`. Raises UsageError, before a trunk is read, for what these would refuse."""
    sampling = {"temperature": arguments.temp} | {name: getattr(arguments, name) for name in ("top_p", "top_k", "seed")}
    Sampling(**sampling)
    TextStream(arguments.stop)
    return sampling | {"n": arguments.n, "stop": arguments.stop}


def prompt(arguments: argparse.Namespace, streams: Streams, *, needed: bool = True) -> str | list[int]:
    """The prompt as text or ids, no ids when there is none and none is `needed`. Raises UsageError."""
    given = [value for value in (arguments.text, arguments.file, arguments.ids) if value is not None]
    if not given and not needed:
        return []
    if len(given) != 1:
        raise UsageError("give the prompt in one way: TEXT, --file FILE or --ids")
    if arguments.ids is not None:
        ids: list[int] = arguments.ids
        return ids
    if STDIN in (arguments.text, arguments.file):
        return _decoded(streams.stdin.buffer.read(), "stdin")
    if arguments.file is not None:
        return _decoded(_bytes_of_file(Path(arguments.file)), arguments.file)
    return _decoded(arguments.text.encode("utf-8", "surrogateescape"), "TEXT")


def _bytes_of_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MoedockError(f"{path}: the prompt cannot be read ({os.strerror(error.errno or 0)})") from None


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is no UTF-8 text (byte {error.start})") from None


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def byte_size(text: str) -> int:
    """A size like 24GiB."""
    try:
        return parse_bytes(text, "a size")
    except UsageError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no size like 24GiB") from None


def positive(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number above 0")
    return value


def number(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number of at least 0")
    return value


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS or int(text) < least:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number of at least {least}")
    return int(text)
