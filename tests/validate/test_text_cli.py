"""`--text`: the JSON section, the lines for people, and everything that can be wrong with the request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from container.layout import TOKENIZER_NAME
from tests.validate.conftest import Converted
from tests.validate.damage import flip, seal
from validate import text as text_module
from validate.__main__ import main
from validate.render import report_text
from validate.report import Findings, Report, RouterLayer, RouterReport, StructureReport, TextReport
from validate.text import Scores, figures

TEXT = {
    "ok": bool, "file": str, "n_tokens": int, "window": int, "router": dict, "seconds": float, "n_windows": int,
    "n_positions": int, "perplexity_source": float, "perplexity_container": float, "perplexity_ratio": float,
    "log_perplexity_difference": dict, "kl": dict, "top1_agreement": dict, "confidence": float, "n_resamples": int,
    "bins": list, "kl_by_position": list, "top1_agreement_by_position": list,
}  # fmt: skip
BIN = {"first": int, "last": int, "n_positions": int, "kl": float, "top1_agreement": float}
ROUTER = {"n_choices": int, "n_changed": int, "n_tokens": int, "n_tokens_changed": int, "layers": list}


@pytest.fixture(scope="module")
def passage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "passage.txt"
    path.write_text("The library may be larger than the house; the next book [EOS] is fetched.\n" * 3, encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], made: Converted, *arguments: object) -> tuple[int, str, str]:
    code = main([str(made.container), "--source", str(made.checkpoint), "--no-logits", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], made: Converted, *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, made, *arguments, "--json")
    return code, json.loads(out, parse_constant=pytest.fail)


def types(value: dict[str, Any]) -> dict[str, type]:
    return {key: type(each) for key, each in value.items()}


def test_the_json_section(k3, passage, capsys):
    code, report = run_json(capsys, k3, "--text", passage, "--window", 8, "--max-tokens", 60)
    assert code == 0
    text = report["text"]
    assert types(text) == TEXT
    assert (text["file"], text["n_tokens"], text["window"], text["n_windows"]) == (str(passage), 60, 8, 8)
    assert text["n_positions"] == 59 == sum(each["n_positions"] for each in text["bins"])
    for name in ("kl", "top1_agreement", "log_perplexity_difference"):
        assert types(text[name]) == {"value": float, "low": float, "high": float}
        assert text[name]["low"] <= text[name]["value"] <= text[name]["high"]
    assert [types(each) for each in text["bins"]] == [BIN] * 4
    assert types(text["router"]) == ROUTER
    assert [layer["layer"] for layer in text["router"]["layers"]] == [1, 2, 3]
    assert len(text["kl_by_position"]) == len(text["top1_agreement_by_position"]) == 8
    again = run_json(capsys, k3, "--text", passage, "--window", 8, "--max-tokens", 60)[1]["text"]
    assert again | {"seconds": 0} == text | {"seconds": 0}


def test_the_lines_for_people(k3, passage, capsys):
    code, out, _ = run(capsys, k3, "--text", passage, "--window", 8, "--max-tokens", 60)
    assert code == 0
    assert f"text: ok; container against source on 60 tokens of {passage}, 8 window(s) of 8, each from an" in out
    for part in ("  perplexity ", "logarithm of the ratio ", "  KL 0.", "same first choice at ", "95% of 10,000",
                 "\n  0     ", "\n  2 to 3  ", "\n  4 to 7  ", "  router as stored", "all checks hold"):  # fmt: skip
        assert part in out


@pytest.mark.parametrize(
    ("n_changed", "expected"),
    [
        ((), "router as stored: the model chooses no experts"),
        ((0, 0), "0 of 80 choices of an expert change (0.000%), at 0 of 10 tokens"),
        ((1, 3), "4 of 80 choices of an expert change (5.000%), at 3 of 10 tokens; most in layer 2, 7.500%"),
    ],
)
def test_the_line_about_the_router(n_changed, expected):
    layers = [
        RouterLayer(layer=1 + number, n_choices=40, n_changed=each, n_tokens_changed=each)
        for number, each in enumerate(n_changed)
    ]
    router = RouterReport(
        n_choices=40 * len(layers),
        n_changed=sum(n_changed),
        n_tokens=10,
        n_tokens_changed=max(n_changed, default=0),
        layers=layers,
    )
    found = figures([Scores(np.ones(2), np.ones(2), np.ones(2), np.ones(2, dtype=bool))])
    text = TextReport(ok=True, file="t", n_tokens=3, window=2, figures=found, router=router, seconds=0)
    report = Report(
        container="c", structure=StructureReport(ok=True), weights=None, logits=None, text=text, findings=Findings()
    )
    assert report_text(report).splitlines()[-2].endswith(expected)


def test_a_single_window_has_no_interval(k3, passage, capsys):
    code, report = run_json(capsys, k3, "--text", passage, "--max-tokens", 12)
    assert code == 0
    assert (report["text"]["window"], report["text"]["n_windows"]) == (256, 1)
    assert report["text"]["kl"]["low"] is report["text"]["kl"]["high"] is None
    assert any("there are no intervals" in note for note in report["notes"])
    out = run(capsys, k3, "--text", passage, "--max-tokens", 12)[1]
    assert "resamplings" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{passage}", "--window", "0"], "--window must be at least 1, found 0"),
        (["--text", "{passage}", "--max-tokens", "1"], "--max-tokens must be at least 2, found 1"),
        (["--window", "8"], "they need --text"),
        (["--max-tokens", "8"], "they need --text"),
        (["--text", "{passage}.not"], "cannot be read (No such file or directory)"),
        (["--text", "{folder}"], "cannot be read (Is a directory)"),
        (["--text", "{folder}/empty"], "is empty"),
        (["--text", "{folder}/latin1"], "is no UTF-8 text (byte 1)"),
        (["--text", "{folder}/short"], "has 1 token, at least 2 are needed"),
    ],
)
def test_usage_errors(k3, passage, tmp_path, capsys, arguments, message):
    for name, raw in (("empty", b""), ("latin1", "dämon".encode("latin-1")), ("short", b"x")):
        (tmp_path / name).write_bytes(raw)
    code, out, err = run(capsys, k3, *(each.format(passage=passage, folder=tmp_path) for each in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_text_needs_a_source(k3, passage, capsys):
    assert main([str(k3.container), "--text", str(passage)]) == 2
    assert "it needs --source" in capsys.readouterr().err


@pytest.fixture
def copy(k3, tmp_path: Path) -> Converted:
    return Converted(k3.config, k3.checkpoint, Path(shutil.copytree(k3.container, tmp_path / "container")))


def test_a_container_without_tokenizer(copy, passage, capsys):
    (copy.container / TOKENIZER_NAME).unlink()
    code, out, err = run(capsys, copy, "--text", passage)
    assert (code, out) == (2, "")
    assert f"{copy.container} has no {TOKENIZER_NAME}" in err


def test_a_malformed_tokenizer_is_a_problem(copy, passage, capsys):
    (copy.container / TOKENIZER_NAME).write_bytes(b"nonsense\n")
    seal(copy.container)
    code, report = run_json(capsys, copy, "--text", passage)
    assert code == 1
    assert report["text"] is None
    assert any(f"{TOKENIZER_NAME}: line 1 is not base64" in problem for problem in report["problems"])


def test_a_broken_container_is_reported_as_ever(copy, passage, capsys):
    flip(copy.container / "experts-L1.bin", 100)
    code, report = run_json(capsys, copy, "--text", passage)
    assert (code, report["text"]) == (1, None)
    assert report["notes"] == ["nothing was compared, because the structure does not hold"]
    (copy.container / "manifest.json").write_bytes(b"{}")
    code, report = run_json(capsys, copy, "--text", passage)
    assert (code, report["text"], report["n_problems"]) == (1, None, 1)


def test_a_source_that_is_none(k3, passage, tmp_path, capsys):
    nowhere = Converted(k3.config, tmp_path / "nowhere", k3.container)
    code, report = run_json(capsys, nowhere, "--text", passage)
    assert (code, report["text"], report["n_problems"]) == (1, None, 1)


def test_too_little_memory_is_said_and_keeping_needs_more(k3, passage, capsys, monkeypatch):
    kept: list[bool] = []
    check = text_module.check_text

    def watched(*arguments: Any, keep: bool, **options: Any) -> Any:
        kept.append(keep)
        return check(*arguments, keep=keep, **options)

    monkeypatch.setattr(text_module, "check_text", watched)
    for available, keep in ((None, False), (1 << 40, True), (20_000_000, False)):
        monkeypatch.setattr("validate.run.available_memory", lambda available=available: available)
        code, report = run_json(capsys, k3, "--text", passage, "--max-tokens", 6)
        assert (code, kept.pop()) == (0, keep)
    monkeypatch.setattr("validate.run.available_memory", lambda: 100_000)
    code, report = run_json(capsys, k3, "--text", passage)
    assert (code, report["text"]) == (1, None)
    assert "comparing on a text needs the trunk in memory" in report["problems"][0]
    assert "leave out --text" in report["problems"][0]
