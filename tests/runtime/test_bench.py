"""`bench`: figures that add up, and the same in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.__main__ import main
from runtime.bench import bench_text

NUMBERS = {
    "load_seconds", "trunk_bytes", "load_gb_per_second", "prompt_tokens", "prefill_seconds",
    "prefill_tokens_per_second", "prefill_read_bytes", "prefill_read_gb_per_second", "tokens", "decode_seconds",
    "decode_tokens_per_second", "hit_rate", "bytes_per_token", "working_set_bytes", "read_gb_per_second",
    "while_reading_gb_per_second", "wait_share", "lookahead_reads", "lookahead_reads_used", "budget_bytes",
    "floor_bytes", "cache_bytes", "peak_memory_bytes", "threads", "readers", "context", "chunk",
    "cold_read_gb_per_second", "plain_read_gb_per_second", "cold_share_of_plain",
}  # fmt: skip


def test_figures_add_up(k3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", str(k3), "-n", "6", "--prompt", "5", "--ctx", "64", "--threads", "2", "--readers", "3", "--json"]
    assert main([*argv, "--cold", "--lookahead", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == NUMBERS | {"lookahead_recall"}
    assert all(type(report[name]) in (int, float) for name in NUMBERS)
    assert report["decode_tokens_per_second"] == pytest.approx(6 / report["decode_seconds"])
    assert report["prefill_tokens_per_second"] == pytest.approx(5 / report["prefill_seconds"])
    assert report["budget_bytes"] == report["floor_bytes"]
    assert 0 <= report["hit_rate"] < 1
    assert report["bytes_per_token"] * 6 % 20480 == pytest.approx(0, abs=1e-6)
    assert report["read_gb_per_second"] == pytest.approx(report["bytes_per_token"] * 6 / report["decode_seconds"] / 1e9)
    assert len(report["lookahead_recall"]) == 2
    assert all(0 < share <= 1 for share in report["lookahead_recall"])
    assert (report["threads"], report["readers"], report["context"]) == (2, 3, 64)
    text = bench_text(report)
    assert f"{report['decode_tokens_per_second']:.2f} tokens/s (6 tokens" in text
    assert f"{report['plain_read_gb_per_second']:.2f} GB/s of plain reads" in text

    assert main([*argv, "--lookahead", "0"]) == 0
    cached = json.loads(capsys.readouterr().out)
    assert cached["lookahead_recall"] == []
    assert cached["lookahead_reads"] == 0
    # the whole model is cached: what a token did not find is what no token before it used
    assert cached["cache_bytes"] == 40 * 20480
    assert cached["bytes_per_token"] < report["bytes_per_token"]


def test_in_words(k3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(k3), "-n", "2", "--prompt", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "load", "prefill", "decode", "experts", "disk", "reads alone", "lookahead", "memory", "with",
    ]  # fmt: skip


def test_one_budget_at_a_time(k3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(k3), "--cold", "--budget", "1GiB"]) == 2
    assert "leave out --budget" in capsys.readouterr().err
