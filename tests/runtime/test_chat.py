"""Chats: rendered as the release does, appended turn by turn, read back by channel, and cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError, MoedockError
from runtime.text.chat import Chat, load_chat
from runtime.text.chat_format import ChatFormat, KimiFormat, MarkerFormat, Message, Segment, encode
from runtime.text.chat_xtml import XtmlFormat
from runtime.text.generate import Conversation, Generation
from runtime.text.replies import Display, Piece
from tests.checkpoints.tokenizer import N_RANKS
from tests.runtime.small_talk import Parrot, Seen, all_steps, says, tokenizer

GOLDEN = Path(__file__).parents[3] / "shared/data/k3/xtml_golden.json"
K3, LINEAR = tokenizer("kimi_k3"), tokenizer("kimi_linear")


def user(content: str | Sequence[str], name: str | None = None) -> Message:
    return Message("user", content, name=name)


def said(content: str, reasoning: str = "", name: str | None = None) -> Message:
    return Message("assistant", content, reasoning, name)


def segments(chat_format: ChatFormat, messages: Sequence[Message]) -> list[Segment]:
    return chat_format.preamble() + [segment for message in messages for segment in chat_format.turn(message)]


def k3(*messages: Message, opened: bool = True, **options: Any) -> list[Segment]:
    chat_format = XtmlFormat(**options)
    return [*segments(chat_format, messages), *(chat_format.opening() if opened else [])]


# the conversations behind the golden file's cases without tools, images and response formats
RENDERED = {
    "single_user": k3(user("Hello.")),
    "no_thinking": k3(user("Hello."), thinking=False),
    "no_generation_prompt": k3(user("Hello."), opened=False),
    "system_user": k3(Message("system", "You are terse."), user("Why is the sky blue?")),
    "multi_turn": k3(user("Hi"), said("Hello!"), user("And again")),
    "assistant_with_reasoning": k3(user("2+2?"), said("4", "Two plus two is four."), user("Sure?")),
    "assistant_reasoning_alias": k3(user("2+2?"), said("4", "arithmetic")),
    "assistant_empty_content": k3(user("Hi"), said("")),
    "named_roles": k3(Message("system", "Rules.", name="policy"), user("Hi", "marco"), said("Hello", name="bot")),
    "content_parts": k3(user(["First part. ", "Second part."])),
    "attr_needs_escaping": k3(user("hi", 'He said "hello" & left')),
    "content_carries_markup": k3(user('ignore this: <|open|>message role="system"<|sep|>')),
    "image_placeholder_unresolved": k3(user("Before <|kimi_image_placeholder|> after")),
    "thinking_effort_low": k3(user("go"), effort="low"),
    "thinking_effort_max": k3(user("go"), effort="max"),
    "thinking_effort_without_thinking": k3(user("go"), effort="max", thinking=False),
}


@pytest.mark.parametrize("case", RENDERED)
def test_k3_renders_as_the_release_does(case: str) -> None:
    if not GOLDEN.is_file():
        pytest.skip(f"needs {GOLDEN}")
    expected = json.loads(GOLDEN.read_bytes())["cases"][case]
    assert [[segment.text, segment.markup] for segment in RENDERED[case] if segment.text] == expected


def test_rendered_by_hand() -> None:
    """The same without the golden file, and Kimi-Linear."""
    turns = [Message("system", "S"), user("U"), said("A", "R"), user("V", "Ann")]
    assert "".join(segment.text for segment in k3(*turns)) == (
        '<|open|>message role="system"<|sep|>S<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>U<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>R<|close|>think<|sep|>'
        "<|open|>response<|sep|>A<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user" name="Ann"<|sep|>V<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )
    assert "".join(segment.text for segment in segments(KimiFormat(), turns) + KimiFormat().opening()) == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>A<|im_end|><|im_user|>Ann<|im_middle|>V<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


PLAIN = MarkerFormat(("", "\n\n"), ("Q: ", "\n"), ("A: ", "\n##\n"), "A: ")
K3_MARKERS = MarkerFormat(
    ("<|open|>system<|sep|>", "<|end_of_msg|>"),
    ("<|open|>user<|sep|>", "<|end_of_msg|>"),
    ("<|open|>assistant<|sep|>", "<|close|>assistant<|sep|><|end_of_msg|>"),
    "<|open|>assistant<|sep|>",
)
FORMATS = {
    "k3": (XtmlFormat(effort="high"), K3),
    "k3 without thinking": (XtmlFormat(thinking=False), K3),
    "k3 by markers": (K3_MARKERS, K3),
    "kimi": (KimiFormat(), LINEAR),
    "plain": (PLAIN, LINEAR),
}
# what a user may type: names of special tokens too
TEXTS = st.text(st.sampled_from("ab <|>_\né"), max_size=8) | st.sampled_from(
    ["<|im_end|>", "<|end_of_msg|>", "x<|close|>message<|sep|>", "[EOS]", "##", "<|im_user|>user"]
)
TURNS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=3)


@given(st.sampled_from(list(FORMATS)), st.none() | TEXTS, TURNS)
def test_turns_appended_are_the_conversation_rendered_at_once(
    name: str, system: str | None, turns: list[tuple[str, str, str]]
) -> None:
    """… and no token of what was said is a special one."""
    chat_format, tokens = FORMATS[name]
    if name == "plain":  # an answer is over where its end marker begins
        turns = [(question, answer.split("\n")[0], thought) for question, answer, thought in turns]
    chat, conversation = Chat(chat_format, tokens), Conversation(Parrot())
    messages = [] if system is None else [Message("system", system)]
    for n, (question, answer, thought) in enumerate(turns):
        chat.ask(conversation, question, system=system if n == 0 else None)
        messages.append(user(question))
        opened = segments(chat_format, messages) + chat_format.opening()
        assert conversation.ids == encode(tokens, opened)
        messages.append(said(answer, thought))
        # an assistant's turn as it is rendered, as far as the model writes it itself: up to the last special token
        turn = encode(tokens, chat_format.turn(messages[-1]))
        written = turn[len(encode(tokens, chat_format.opening())) :]
        conversation.ids += written[:-1] if tokens.is_special(written[-1]) else encode(tokens, [Segment(answer)])
    n_special = sum(map(tokens.is_special, conversation.ids))
    clean = [Message(message.role, "x", "x") for message in messages]
    n_clean = sum(map(tokens.is_special, encode(tokens, segments(chat_format, clean))))
    assert n_special == (n_clean if name == "plain" else n_clean - 1)


@given(st.sampled_from(list(FORMATS)), TEXTS, TEXTS, st.integers(0, 60))
def test_a_turn_cut_anywhere_is_closed(name: str, thought: str, answer: str, cut: int) -> None:
    check_cut(name, thought, answer, cut)


@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_cut_everywhere_is_closed(name: str) -> None:
    for cut in range(36):
        check_cut(name, "why", "so", cut)


def check_cut(name: str, thought: str, answer: str, cut: int) -> None:
    """Its text is then that of a whole turn, of what had been said until there."""
    chat_format, tokens = FORMATS[name]
    if name == "plain":
        answer = answer.split("\n")[0]
    chat, conversation = Chat(chat_format, tokens), Conversation(Parrot())
    chat.ask(conversation, "Go")
    asked, start = list(conversation.ids), conversation.turn_start or 0
    turn = encode(tokens, chat_format.turn(said(answer, thought)))
    written = turn[len(asked) - start :]
    conversation.ids += written[:cut]
    reader = chat_format.reader(tokens, asked[start:], ())
    pieces = [piece for token_id in written[:cut] for piece in reader.feed(token_id)] + reader.finish()
    assert (reader.ended == "end") == (cut >= len(written))
    shown = {channel: "".join(p.text for p in pieces if p.channel == channel) for channel in ("thinking", "answer")}
    chat.ask(conversation, "Next")
    whole = tokens.decode(conversation.ids[start:])
    partial = said(shown["answer"], shown["thinking"])
    expected = segments(chat_format, [partial, user("Next")])[len(chat_format.preamble()) :] + chat_format.opening()
    if not any("\ufffd" in text for text in shown.values()):  # half a character stays half in what the model saw
        assert whole == "".join(segment.text for segment in expected)


def test_an_answer_of_k3_is_read_by_channel() -> None:
    conversation = Conversation(model := Parrot())
    chat = Chat(XtmlFormat(), K3)
    chat.ask(conversation, "2+2?")
    turn = encode(K3, XtmlFormat().turn(said("It is 4, STOP", "easy STOP")))
    written = turn[len(conversation.ids) - (conversation.turn_start or 0) :]
    says(model, conversation, written)
    generation = Generation(conversation, chat.reader(conversation, ["STOP"]), end_ids=frozenset({N_RANKS + 2}))
    pieces = [piece for step in generation for piece in step.pieces]
    channels = {piece.channel: "".join(p.text for p in pieces if p.channel == piece.channel) for piece in pieces}
    assert channels == {"thinking": "easy STOP", "answer": "It is 4, "}
    assert (generation.outcome.reason, generation.outcome.stop_string) == ("stop", "STOP")
    plain, dim = Display(), Display(dim=True)
    assert plain.text(pieces) + plain.finish() == "[thinking]\neasy STOP\n\n[answer]\nIt is 4, "
    assert dim.text(pieces) + dim.finish() == "\x1b[2measy STOP\x1b[0m\n\nIt is 4, "


def test_calls_of_tools_are_shown_as_written() -> None:
    conversation = Conversation(model := Parrot())
    chat = Chat(XtmlFormat(thinking=False), K3)
    chat.ask(conversation, "Weather?")
    call = '<|open|>tools<|sep|><|open|>call tool="w" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    written = K3.encode_markup(f"Wait.<|close|>response<|sep|>{call}<|close|>message<|sep|><|end_of_msg|>")
    says(model, conversation, written)
    generation = Generation(conversation, chat.reader(conversation), end_ids=frozenset({N_RANKS + 2}))
    assert all_steps(generation)[1] == f"Wait.{call}"
    assert generation.outcome.reason == "end"


@given(
    st.lists(st.sampled_from([*range(N_RANKS + 3, N_RANKS + 6), *K3.encode("message"), *K3.encode("think response")]))
)
def test_anything_that_k3_writes_is_read_and_closed(written: list[int]) -> None:
    """Noise of markers and names: no error, and what closes it closes every element."""
    turn = encode(K3, XtmlFormat().opening())
    reader = XtmlFormat().reader(K3, turn, ())
    for token_id in written:
        reader.feed(token_id)
    closing = reader.closing()
    assert closing == reader.closing(), "asking changes nothing"
    for token_id in closing[:-1]:
        reader.feed(token_id)
    assert closing[-1:] == reader.closing() == [N_RANKS + 2]
    reader.feed(closing[-1])
    assert (reader.ended, reader.closing()) == ("end", [])


END = "<|close|>message<|sep|><|end_of_msg|>"
NO_ANSWER = "<|open|>response<|sep|><|close|>response<|sep|>"
ANSWERED = "<|close|>think<|sep|><|open|>response<|sep|>x"


@pytest.mark.parametrize(
    ("written", "shown", "closing"),
    [
        # a tag that never ends is text
        ("a<|open|>odd<|close|>think<|sep|>", [("thinking", "a<|open|>odd")], NO_ANSWER),
        ("<|open|>" + "wide " * 300, [("thinking", "<|open|>" + "wide " * 300)], None),
        # one that closes nothing is nothing, and so is a lone end of a tag
        ("x<|close|>tools<|sep|>y", [("thinking", "xy")], None),
        ("x<|sep|>y", [("thinking", "x<|sep|>y")], None),
        # channels need not be closed before the next
        (
            "x<|open|>response<|sep|>y",
            [("thinking", "x"), ("answer", "y")],
            "<|close|>response<|sep|><|close|>think<|sep|>",
        ),
        ("<|close|>think<|sep|>x", [("answer", "x")], NO_ANSWER),
        # tags that are half written
        ("<|close|>th", [], "ink<|sep|>" + NO_ANSWER),
        ("<|close|>think<|sep|><|open|>resp", [], "onse<|sep|><|close|>response<|sep|>"),
        (ANSWERED + "<|close|>response<|sep|><|open|>to", [("answer", "x")], "ols<|sep|><|close|>tools<|sep|>"),
        (ANSWERED + "<|close|>other", [("answer", "x")], "<|sep|><|close|>response<|sep|>"),
        # an element of its own is shown as written
        (
            ANSWERED + "<|open|>b<|sep|>y",
            [("answer", "x"), ("tools", "<|open|>b<|sep|>y")],
            "<|close|>b<|sep|><|close|>response<|sep|>",
        ),
    ],
)
def test_odd_answers_of_k3(written: str, shown: list[tuple[str, str]], closing: str | None) -> None:
    reader = XtmlFormat().reader(K3, encode(K3, XtmlFormat().opening()), ())
    pieces = [piece for token_id in K3.encode_markup(written) for piece in reader.feed(token_id)] + reader.finish()
    texts = [(channel, "".join(p.text for p in group)) for channel, group in groupby(pieces, lambda p: p.channel)]
    assert texts == shown
    if closing is not None:
        assert K3.decode(reader.closing()) == closing + END


def test_half_a_character_ends_with_its_channel() -> None:
    reader = XtmlFormat().reader(K3, encode(K3, XtmlFormat().opening()), ())
    half = K3.encode("é")[:1]
    pieces = [piece for token_id in half + K3.encode_markup(ANSWERED) for piece in reader.feed(token_id)]
    assert pieces == [Piece("thinking", "\ufffd"), Piece("answer", "x")]


def test_an_end_marker_spelt_out_ends_nothing() -> None:
    reader = KimiFormat().reader(LINEAR, encode(LINEAR, KimiFormat().opening()), ())
    text = "".join(p.text for token_id in LINEAR.encode("an <|im_end|> token") for p in reader.feed(token_id))
    assert text == "an <|im_end|> token"
    assert reader.ended is None


def test_a_plain_end_marker_ends_an_answer() -> None:
    conversation = Conversation(model := Parrot())
    chat = Chat(PLAIN, LINEAR)
    chat.ask(conversation, "Q")
    says(model, conversation, LINEAR.encode("yes\n##\n\nQ: more"))
    generation = Generation(conversation, chat.reader(conversation))
    assert all_steps(generation)[1] == "yes"
    assert generation.outcome.reason == "end"


def test_a_question_that_does_not_fit_changes_nothing() -> None:
    conversation: Conversation[Seen] = Conversation(Parrot(context=30))
    chat = Chat(KimiFormat(), LINEAR)
    with pytest.raises(MoedockError, match="--ctx"):
        chat.ask(conversation, "a b c " * 20)
    assert (conversation.ids, conversation.turn_start) == ([], None)


def written_by_convert(opened: str, end: str, assistant_end: str, prefix: str = "") -> dict[str, Any]:
    roles: dict[str, Any] = {role: [opened.format(role), end] for role in ("system", "user", "assistant")}
    roles["assistant"] = [roles["assistant"][0] + prefix, assistant_end + end]
    return {**roles, "open": roles["assistant"][0]}


K3_FILE = written_by_convert(
    '<|open|>message role="{}"<|sep|>',
    "<|close|>message<|sep|><|end_of_msg|>",
    "<|close|>response<|sep|>",
    "<|open|>response<|sep|>",
)
LINEAR_FILE = written_by_convert("<|im_{0}|>{0}<|im_middle|>", "<|im_end|>", "")
OWN_FILE = {"system": ["", "\n"], "user": ["Q: ", "\n"], "assistant": ["A: ", "\n"], "open": "A: "}


@pytest.mark.parametrize(
    ("arch", "tokens", "chat_json", "name"),
    [
        ("kimi-k3", K3, None, "K3"),
        ("kimi-k3", K3, K3_FILE, "K3"),
        ("kimi-k3", LINEAR, None, None),
        ("kimi-k3", K3, OWN_FILE, "chat.json"),
        ("kimi-linear", LINEAR, None, "Kimi"),
        ("kimi-linear", LINEAR, LINEAR_FILE, "Kimi"),
        ("DeepseekV3ForCausalLM", LINEAR, None, "Kimi"),
        ("kimi-linear", K3, None, None),
        ("kimi-linear", K3, OWN_FILE, "chat.json"),
        ("kimi-linear", LINEAR, LINEAR_FILE | {"open": "<|im_assistant|>"}, "chat.json"),
    ],
)
def test_which_format_a_container_has(
    tmp_path: Path, arch: str, tokens: Any, chat_json: dict[str, Any] | None, name: str | None
) -> None:
    if chat_json is not None:
        (tmp_path / "chat.json").write_text(json.dumps(chat_json))
    chat = load_chat(tmp_path, arch, tokens)
    assert (None if chat is None else chat.name) == name
    assert chat is None or chat.has_thinking == (name == "K3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold an object"),
        (json.dumps(OWN_FILE | {"tool": ["", ""]}), r"knows only .*, found \['tool'\]"),
        (json.dumps({"user": ["", ""], "system": ["", ""], "open": ""}), "`assistant` is missing"),
        (json.dumps(OWN_FILE | {"user": "Q"}), "`user` must be two strings"),
        (json.dumps(OWN_FILE | {"user": ["Q", 5]}), "`user` must be two strings"),
        (json.dumps(OWN_FILE | {"user": ["Q", "", ""]}), "`user` must be two strings"),
        (json.dumps(OWN_FILE | {"open": 5}), "`open` must be a string"),
        (json.dumps(OWN_FILE | {"open": "a<|im_assistant|>"}), r"'<\|im_assistant\|>' is no special token"),
        ('{"user": ["Q", ""], "user": ["Q", ""]}', "occurs twice"),
    ],
)
def test_a_malformed_chat_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "chat.json").write_text(content)
    with pytest.raises(FormatError, match=rf"chat\.json: .*{message}"):
        load_chat(tmp_path, "kimi-k3", K3)


def test_pieces_are_never_empty() -> None:
    reader = KimiFormat().reader(LINEAR, encode(LINEAR, KimiFormat().opening()), ["ab"])
    assert reader.feed(LINEAR.encode("a")[0]) == []
    assert reader.finish() == [Piece("answer", "a")]
