"""The loop that generates: why it ends, what it keeps, and that it goes on as if it had never ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError, MoedockError, UsageError
from runtime.text.end_tokens import end_ids
from runtime.text.generate import Conversation, Generation
from runtime.text.interrupt import Interruptible
from runtime.text.replies import TextReader
from runtime.text.sampling import Sampler, Sampling
from tests.checkpoints.tokenizer import N_RANKS, N_TOKENS
from tests.runtime.small_talk import Parrot, Seen, all_steps, says, tokenizer

K3 = tokenizer("kimi_k3")
HOT = Sampling(temperature=1.0, top_p=0.9, seed=11)
EOS = N_RANKS + 1


def reader(*stops: str) -> TextReader:
    return TextReader(K3, stops)


def conversation_of(model: Parrot, prompt: list[int], sampling: Sampling = HOT) -> Conversation[Seen]:
    conversation = Conversation(model)
    conversation.sampler = Sampler(sampling)
    conversation.extend(prompt)
    return conversation


def test_an_answer_is_the_draws_of_one_token_after_the_other() -> None:
    """Against the loop as one would write it down."""
    ids, sampler, model = list(range(40, 53)), Sampler(HOT), Parrot(chunk=4)
    for _ in range(20):
        ids.append(sampler.draw(model.feed(Seen(ids[:-1]), ids[-1:])))
    model = Parrot(chunk=4)
    conversation = conversation_of(model, ids[:13])
    generation = Generation(conversation, reader(), limit=20)
    answer, text = all_steps(generation)
    assert conversation.ids == ids
    assert answer == ids[13:]
    assert text == K3.decode(answer)
    assert [len(fed) for fed in model.fed] == [4, 4, 4, 1] + [1] * 19
    assert [token for fed in model.fed for token in fed] == ids[:-1]
    outcome = generation.outcome
    assert (outcome.reason, outcome.n_prompt, outcome.n_generated, outcome.n_decoded) == ("length", 13, 20, 19)
    assert outcome.tokens_per_second == pytest.approx(19 / outcome.seconds)
    assert outcome.prompt_tokens_per_second == pytest.approx(13 / outcome.prompt_seconds)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60), st.sampled_from(["stop", "press", "fail"])
)
def test_an_answer_may_end_anywhere_and_go_on(limits: list[int], when: int, how: str) -> None:
    """Cut by limits, by the callback and by an interruption in the middle of a token: the same tokens come."""
    model = Parrot(chunk=4)
    whole = conversation_of(model, list(range(9)))
    all_steps(Generation(whole, reader(), limit=sum(limits)))
    model = Parrot(chunk=4)
    cut = conversation_of(model, list(range(9)))
    countdown = [when]

    def due() -> bool:
        countdown[0] -= 1
        return countdown[0] == -1

    def interrupted() -> None:
        if due():
            raise KeyboardInterrupt if how == "press" else FormatError("a bad record")

    if how != "stop":
        model.disturb = interrupted
    for limit in limits:
        wanted = len(cut.ids) + limit
        while len(cut.ids) < wanted:
            generation = Generation(cut, reader(), limit=wanted - len(cut.ids), stop=due if how == "stop" else None)
            try:
                all_steps(generation)
            except (KeyboardInterrupt, FormatError):
                assert generation.outcome.reason == ("interrupted" if how == "press" else "error")
                assert cut.pending == cut.ids, "a state from the middle of a token is of no use"
    assert cut.ids == whole.ids
    assert cut.sampler.state() == whole.sampler.state()
    assert cut.state.ids == cut.ids[: cut.state.position]
    assert len(cut.pending) == 1


def test_a_restored_conversation_goes_on() -> None:
    """All that decides how it goes on is ids, state and random state."""
    model = Parrot()
    whole = conversation_of(model, [1, 2, 3])
    all_steps(Generation(whole, reader(), limit=5))
    other = conversation_of(model, whole.ids, Sampling(temperature=1.0, top_p=0.9, seed=12))
    other.state.ids += whole.state.ids
    other.sampler.restore(whole.sampler.state())
    assert all_steps(Generation(other, reader(), limit=5)) == all_steps(Generation(whole, reader(), limit=5))


def test_an_end_token_ends_the_answer_and_is_not_kept() -> None:
    model = Parrot()
    conversation = conversation_of(model, K3.encode("Hello"), Sampling())
    said = K3.encode(" you. é")
    says(model, conversation, [*said, EOS])
    generation = Generation(conversation, reader(), end_ids=frozenset({EOS, EOS + 1}))
    assert all_steps(generation) == (said, " you. é")
    assert (generation.outcome.reason, generation.outcome.end_id) == ("end", EOS)
    assert generation.outcome.n_generated == len(said)
    assert conversation.ids == [*K3.encode("Hello"), *said]
    assert not conversation.pending
    with pytest.raises(UsageError, match="nothing to go on from"):
        Generation(conversation, reader())


def test_a_stop_string_ends_the_text_before_it_and_keeps_the_tokens() -> None:
    model = Parrot()
    conversation = conversation_of(model, [1], Sampling())
    said = K3.encode("one two") + K3.encode(" STOP") + K3.encode("!!")
    says(model, conversation, said)
    generation = Generation(conversation, reader("two S", "never"), limit=50)
    answer, text = all_steps(generation)
    assert text == "one "
    assert answer == said[: len(answer)]
    assert K3.decode(answer).endswith("two S")
    assert (generation.outcome.reason, generation.outcome.stop_string) == ("stop", "two S")
    assert conversation.ids == [1, *answer]


def test_held_text_comes_at_the_end() -> None:
    model = Parrot()
    conversation = conversation_of(model, [1], Sampling())
    says(model, conversation, [*K3.encode("one tw"), *K3.encode("é")[:1]])
    steps = list(Generation(conversation, reader("two"), limit=len(K3.encode("one tw")) + 1))
    assert "".join(step.text for step in steps[:-1]) == "one "
    assert (steps[-1].token_id, steps[-1].text) == (None, "tw�")


def test_the_context_ends_an_answer() -> None:
    model = Parrot(context=10)
    conversation = conversation_of(model, [1] * 7)
    generation = Generation(conversation, reader(), limit=50)
    assert len(all_steps(generation)[0]) == 3
    assert generation.outcome.reason == "context"
    with pytest.raises(
        MoedockError, match=r"the prompt has 4 tokens after 10 that are there already, .* 10 in all; give --ctx 14"
    ):
        conversation.extend([1] * 4)
    assert len(conversation.ids) == 10
    generation = Generation(conversation_of(model, [1] * 10), reader())
    assert all_steps(generation) == ([], "")
    assert generation.outcome.reason == "context"


@pytest.mark.parametrize("bad", [-1, N_TOKENS])
def test_bad_prompts_change_nothing(bad: int) -> None:
    conversation = conversation_of(Parrot(), [1])
    with pytest.raises(MoedockError, match=f"token id {bad} is outside"):
        conversation.extend([2, bad])
    assert conversation.ids == [1]
    with pytest.raises(UsageError, match="at least 1, found 0"):
        Generation(conversation, reader(), limit=0)


def test_the_callback_is_asked_after_each_token() -> None:
    conversation = conversation_of(Parrot(), [1])
    generation = Generation(conversation, reader(), stop=lambda: len(conversation.ids) == 4)
    assert len(all_steps(generation)[0]) == generation.outcome.n_generated == 3
    assert generation.outcome.reason == "stopped"


def test_a_loop_that_is_left_early() -> None:
    conversation = conversation_of(Parrot(), [1])
    generation = Generation(conversation, reader())
    steps: Iterator[object] = iter(generation)
    next(steps)
    del steps
    assert (generation.outcome.reason, generation.outcome.n_generated) == ("abandoned", 1)
    assert len(conversation.pending) == 1


def test_ctrl_c_waits_for_the_token_and_a_second_one_does_not() -> None:
    handler = signal.getsignal(signal.SIGINT)
    model = Parrot(chunk=4)
    conversation = conversation_of(model, [1] * 12)
    model.disturb = lambda: signal.raise_signal(signal.SIGINT)
    with Interruptible() as interrupted:
        generation = Generation(conversation, reader(), stop=interrupted)
        assert all_steps(generation) == ([], "")
    assert (generation.outcome.reason, conversation.state.position, len(conversation.pending)) == ("stopped", 4, 8)
    model.disturb = lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    with Interruptible() as interrupted, pytest.raises(KeyboardInterrupt):
        all_steps(Generation(conversation, reader(), stop=interrupted))
    assert signal.getsignal(signal.SIGINT) is handler


def test_end_tokens_are_the_configs_and_the_named_ones() -> None:
    linear = tokenizer("kimi_linear")
    named = {N_RANKS + 1, N_RANKS + 2, N_RANKS + 9}  # [EOS], <|end_of_msg|> or <|im_end|>, [EOT]
    assert end_ids({}, N_TOKENS) == set()
    assert end_ids({"eos_token_id": None}, N_TOKENS, K3) == end_ids({}, N_TOKENS, linear) == named
    assert end_ids({"eos_token_id": [5, 6]}, N_TOKENS, K3) == {5, 6} | named
    assert end_ids({"eos_token_id": 5, "_outer": {"eos_token_id": 7}}, N_TOKENS) == {5, 7}


@pytest.mark.parametrize("bad", [-1, N_TOKENS, True, "5", 1.0, [1, "2"], {}])
def test_end_tokens_that_are_none(bad: object) -> None:
    with pytest.raises(FormatError, match=r"config\._outer: `eos_token_id` must be an id from 0 to 639"):
        end_ids({"_outer": {"eos_token_id": bad}}, N_TOKENS)
