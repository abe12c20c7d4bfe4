"""The Python API: what README shows, sessions, stops, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import runtime
from container.errors import MoedockError, SessionError, UsageError
from runtime.api import OpenModel

ROOT = Path(__file__).parents[2]
DRAWS = {"temperature": 1.3, "top_p": 0.98}


def text_of(model: OpenModel, *args: object, **options: object) -> str:
    return "".join(model.generate(*args, **options))  # type: ignore[arg-type]


def test_what_readme_shows(
    k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's example is run as it stands, on another model."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert len(example.splitlines()) <= 12
    (tmp_path / "model.waste").symlink_to(k3)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"model.waste", "story.session"}


def test_a_restored_conversation_goes_on_bit_by_bit(k3: Path, tmp_path: Path) -> None:
    """Drawn tokens too, after another prompt too; and the state in memory is the one of a run without a break."""
    with runtime.open(k3) as model:
        for _ in model.generate("The library", n=6, seed=2, **DRAWS):
            pass
        model.save(tmp_path / "middle")
        for _ in model.generate(" and", n=6, **DRAWS):
            pass
        ids, end = model.ids, tmp_path / "end"
        model.save(end)
    with runtime.open(k3, context=200, threads=1, lookahead=0) as model:
        list(model.generate([1, 2, 3], n=2))  # something else before
        model.load(tmp_path / "middle")
        list(model.generate(" and", n=6, **DRAWS))
        assert model.ids == ids
        model.save(tmp_path / "end again")
    assert (tmp_path / "end again").read_bytes() == end.read_bytes()


def test_a_session_that_is_refused_changes_nothing(k3: Path, tmp_path: Path) -> None:
    with runtime.open(k3) as model:
        list(model.generate([1, 2, 3], n=3))
        model.save(tmp_path / "s")
        (tmp_path / "bad").write_bytes((tmp_path / "s").read_bytes()[:-1])
        with pytest.raises(SessionError, match="damaged"):
            model.load(tmp_path / "bad")
        model.save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "s").read_bytes()


def test_a_disk_that_fails_while_loading_begins_anew(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with runtime.open(k3) as model:
        first = list(model.generate([1, 2, 3], n=3))
        model.save(tmp_path / "s")

        def fail(_array: object) -> memoryview:
            raise OSError("Input/output error")

        monkeypatch.setattr("runtime.session._bytes_of", fail)
        with pytest.raises(SessionError, match="cannot be read"):
            model.load(tmp_path / "s")
        assert model.ids == []
        assert list(model.generate([1, 2, 3], n=3)) == first


def test_stops(k3: Path) -> None:
    with runtime.open(k3) as model:
        answer = model.generate("The library", n=30, temperature=2, seed=5)
        whole = "".join(answer)
        assert (answer.outcome.reason, answer.outcome.n_generated) == ("length", 30)
    stop = whole[len(whole) // 2 :][:2]
    with runtime.open(k3) as model:
        assert text_of(model, "The library", n=30, temperature=2, seed=5, stop=stop) == whole[: whole.index(stop)]
    seen: list[str] = []
    with runtime.open(k3) as model:

        def enough(text: str) -> bool:
            seen.append(text)
            return len(text) > 8

        answer = model.generate("The library", n=30, temperature=2, seed=5, stop_when=enough)
        text = "".join(answer)
        assert answer.outcome.reason == "stopped"
    assert whole.startswith(text)
    assert len(seen[-1]) > 8 >= len(seen[-2])


def test_replies_in_the_models_chat_format(k3: Path) -> None:
    with runtime.open(k3) as model:
        assert model.chat() is not None
        answer = model.reply("Who?", system="Be brief.", thinking=False, n=4)
        assert list(answer.steps())
        text = model.tokenizer.decode(model.ids)
        assert text.index("Be brief.") < text.index("Who?")
        n_before = len(model.ids)
        list(model.reply("Why?", n=4))
        assert model.tokenizer.decode(model.ids[n_before:]).count("Why?") == 1


def test_a_container_without_a_tokenizer(kimi_linear: Path) -> None:
    with runtime.open(kimi_linear) as model:
        answer = model.generate([1, 2], n=3)
        assert [step.text for step in answer.steps()] == ["", "", ""]
        assert len(model.ids) == 5
        with pytest.raises(MoedockError, match="no tokenizer"):
            model.generate("text")
        with pytest.raises(UsageError, match="no text to stop at"):
            model.generate([1], stop="x")
        with pytest.raises(MoedockError, match="has no chat format"):
            model.reply("Who?")
        assert len(model.ids) == 5


def test_what_makes_no_sense_is_refused_and_changes_nothing(k3: Path) -> None:
    with pytest.raises(UsageError, match="the budget must be a size"):
        runtime.open(k3, budget="much")
    with pytest.raises(MoedockError, match="needs at least"):
        runtime.open(k3, budget=1 << 20)
    for size in ({"context": 0}, {"threads": 0}, {"readers": 0}, {"lookahead": -1}, {"chunk": 0}):
        with pytest.raises(UsageError, match=f"{next(iter(size))} must be a whole number of at least"):
            runtime.open(k3, **size)  # type: ignore[arg-type]
    with runtime.open(k3, context=8) as model:
        for options in ({"n": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"stop": ""}):
            with pytest.raises(UsageError):
                model.generate([1], **options)  # type: ignore[arg-type]
        with pytest.raises(MoedockError, match="room for 8 in all; give --ctx 9"):
            model.generate([1] * 9)
        with pytest.raises(UsageError, match="give a prompt"):
            model.generate()
        assert model.ids == []
    with pytest.raises(AttributeError, match="no attribute 'shut'"):
        _ = runtime.shut
