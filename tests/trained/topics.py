"""The text: `pydoc_data.topics`, the documentation that every Python brings along, with some topics held out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pydoc_data.topics import topics as python_topics

HELD_OUT_SHARE = 0.08
LARGEST_HELD_OUT = 10_000  # characters: several topics rather than a single long one
SHORT_PARAGRAPH = 80  # characters; shorter ones ("Example:") may come twice

_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Texts:
    """One text per topic, in the order of the topics' names."""

    training: list[str]
    held_out: list[str]


def split_topics(topics: dict[str, str] | None = None) -> Texts:
    """Training and held-out text, without the paragraphs that other topics repeat.

    Long topics contain others word for word. A paragraph that the held-out text has is therefore taken out of the
    training text, and a paragraph that came before is left out of both. Held out are topics in the order of their
    names' sha256, as many as stay below HELD_OUT_SHARE of all characters.
    """
    topics = dict(python_topics) if topics is None else topics
    held_out_names = _held_out_names(topics)
    seen: set[str] = set()
    held_out = _without_repeats((topics[name] for name in sorted(held_out_names)), seen)
    training = _without_repeats((topics[name] for name in sorted(topics.keys() - held_out_names)), seen)
    return Texts(training=training, held_out=held_out)


def _held_out_names(topics: dict[str, str]) -> set[str]:
    room = HELD_OUT_SHARE * sum(map(len, _without_repeats(topics.values(), set())))
    names: set[str] = set()
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(topics[name]) <= LARGEST_HELD_OUT:
            room -= len(topics[name])
            if room < 0:
                break
            names.add(name)
    return names


def _without_repeats(texts: Iterable[str], seen: set[str]) -> list[str]:
    """`texts` without the longer paragraphs in `seen`, which grows by theirs; a text with nothing left is dropped."""
    kept = []
    for text in texts:
        paragraphs = []
        for paragraph in _BLANK_LINES.split(text):
            words = " ".join(paragraph.split())
            if len(words) >= SHORT_PARAGRAPH:
                if words in seen:
                    continue
                seen.add(words)
            paragraphs.append(paragraph)
        if any(len(paragraph) >= SHORT_PARAGRAPH for paragraph in paragraphs):
            kept.append("\n\n".join(paragraphs).rstrip() + "\n")
    return kept
