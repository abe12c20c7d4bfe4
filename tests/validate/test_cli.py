"""The command: exit codes, the JSON object, the text, interruption, hostile input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from container.layout import TRUNK_NAME
from container.manifest import Manifest
from tests.containers import build_container, k3_config, kimi_linear_config
from tests.crash.processes import default_signals
from tests.validate.damage import flip, layout_of, overwrite, seal
from validate import __main__ as command
from validate import run as run_module
from validate.__main__ import main

ROOT = Path(__file__).parents[2]
STRUCTURE = {
    "ok": bool, "n_files": int, "n_records": int, "n_codebooks": int, "n_trunk_tensors": int, "n_checksums": int,
    "bytes_read": int, "seconds": float,
}  # fmt: skip
WEIGHTS = {"ok": bool, "tensors": list, "kinds": dict, "relative_error": dict, "seconds": float}
LOGITS = {
    "ok": bool, "tolerance": float, "relative_error": float, "chunks_error": float, "token_by_token_error": float,
    "per_layer": list, "argmax_equal": bool, "top10_equal": float, "routing_equal": bool, "kl": float,
    "top1_agreement": float, "router": dict, "prompts": list,
    "seconds": float,
}  # fmt: skip
TOP = {
    "ok": bool, "container": str, "structure": dict, "weights": dict, "logits": dict, "text": type(None),
    "n_problems": int, "problems": list, "notes": list,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_container(tmp_path / "container", kimi_linear_config(num_hidden_layers=2))


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def types(value: dict[str, Any]) -> dict[str, type]:
    return {key: type(each) for key, each in value.items()}


def test_everything_that_holds(k3, capsys):
    code, report = run_json(capsys, k3.container, "--source", k3.checkpoint, "--experts", "2")
    assert code == 0
    assert types(report) == TOP
    assert types(report["structure"]) == STRUCTURE
    assert types(report["weights"]) == WEIGHTS
    assert types(report["logits"]) == LOGITS
    assert (report["ok"], report["n_problems"], report["problems"]) == (True, 0, [])
    assert report["notes"] == ["only 2 of 8 experts of each layer were compared"]
    assert report["container"] == str(k3.container)
    assert {type(each) for tensor in report["weights"]["tensors"] for each in types(tensor)} == {str}
    for tensor in report["weights"]["tensors"]:
        assert types(tensor) == {"name": str, "kind": str, "fmt": str, "relative_error": float}
    for kind, error in report["weights"]["kinds"].items():
        assert report["weights"]["relative_error"][kind] == error["relative_error"] <= error["worst"] <= error["bound"]
    assert len(report["logits"]["per_layer"]) == 4
    assert types(report["logits"]["prompts"][0]) == {"ids": list, "relative_error": float}


def test_the_text_shows_the_same(kimi_linear, capsys):
    assert main([str(kimi_linear.container), "--source", str(kimi_linear.checkpoint), "--experts", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("structure: ok; 12 files, 24 expert records, 27 codebooks, ")
    assert any(line.startswith("weights: ok; ") for line in lines)
    assert sum(line.split()[0] in ("gate", "up", "down", "F32", "Q8G", "Q4G") for line in lines) == 6
    assert any(line.startswith("logits: ok; runtime against reference, 3 prompts, 41 positions") for line in lines)
    assert any("  relative error " in line and " (in chunks " in line and ", token by token " in line for line in lines)
    assert any("argmax equal at every position; top-10 sets equal at 100.0%; routing equal" in line for line in lines)
    assert any("original against converted model: KL 0." in line for line in lines)
    assert lines[-1] == f"{kimi_linear.container}: all checks hold"


def test_a_problem_of_structure_stops_the_comparisons(folder, capsys):
    flip(folder / "experts-L1.bin", 100)
    code, report = run_json(capsys, folder, "--logits")
    assert code == 1
    assert report["structure"]["ok"] is report["ok"] is False
    assert report["weights"] is report["logits"] is None
    assert report["n_problems"] == len(report["problems"]) == 2
    assert report["notes"] == ["nothing was compared, because the structure does not hold"]
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("structure: FAILED; ")
    assert "problem: " + report["problems"][0] in out
    assert out.endswith(f"{folder}: 2 problem(s) found\n")


def test_wrong_weights_fail_the_command(kimi_linear, tmp_path, capsys):
    container = Path(shutil.copytree(kimi_linear.container, tmp_path / "container"))
    at = layout_of(container).scales_offset
    scale = np.frombuffer((container / "experts-L1.bin").read_bytes()[at : at + 2], dtype="<f2")
    overwrite(container / "experts-L1.bin", at, (scale * np.float16(100)).tobytes())
    seal(container)
    code, report = run_json(capsys, container, "--source", kimi_linear.checkpoint, "--no-logits")
    assert code == 1
    assert report["structure"]["ok"] is True
    assert report["weights"]["ok"] is report["ok"] is False
    assert report["logits"] is None
    assert len(report["problems"]) == 1
    assert "experts.0.w1.weight: VQ3R, relative error" in report["problems"][0]


def test_a_tolerance_that_is_not_met_fails_the_command(folder, capsys):
    code, report = run_json(capsys, folder, "--tolerance", "1e-9", "--ids", "1,2,3")
    assert code == 1
    assert report["structure"]["ok"] is True
    assert report["logits"]["ok"] is False
    assert report["logits"]["tolerance"] == 1e-9
    assert [prompt["ids"] for prompt in report["logits"]["prompts"]] == [[1, 2, 3]]


def test_numbers_that_json_does_not_know_become_null(folder, capsys, monkeypatch):
    from runtime.engine import Engine

    evaluate = Engine.evaluate

    def spoiled(engine: Any, ids: Any, **options: Any) -> Any:
        found = evaluate(engine, ids, **options)
        found.logits[0] = np.nan
        return found

    monkeypatch.setattr(Engine, "evaluate", spoiled)
    code, report = run_json(capsys, folder)
    assert code == 1
    assert report["logits"]["relative_error"] is None


def test_logits_run_unasked_on_small_models_only(folder, capsys, monkeypatch):
    assert run_json(capsys, folder)[1]["logits"] is not None
    assert run_json(capsys, folder, "--no-logits")[1]["logits"] is None
    monkeypatch.setattr(run_module, "SMALL_MODEL_WEIGHTS", 1000)
    code, report = run_json(capsys, folder)
    assert (code, report["logits"]) == (0, None)
    n_weights = 8 * 3 * 96 * 256 + sum(np.prod(entry.shape) for entry in Manifest.read(folder).trunk)
    assert report["notes"] == [
        f"logits were not compared: the model has {n_weights:,} weights; --logits compares them anyway"
    ]
    assert run_json(capsys, folder, "--logits")[1]["logits"] is not None
    assert run_json(capsys, folder, "--ids", "4")[1]["logits"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "0"], "--tolerance must be a number above 0"),
        (["--tolerance", "nan"], "--tolerance must be a number above 0"),
        (["--experts", "2"], "it needs --source"),
        (["--experts", "0", "--source", "x"], "--experts must be at least 1"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--ids", "1", "--no-logits"], "--ids is the prompt of the logits check"),
        (["--ids", "999999"], "token 999999 is outside the vocabulary"),
    ],
)
def test_usage_errors(folder, capsys, arguments, message):
    assert main([str(folder), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


@pytest.mark.parametrize("arguments", [[], ["x", "--ids", "1,a"], ["x", "--nope"], ["x", "--workers", "two"]])
def test_arguments_that_cannot_be_parsed(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format_version": 1}'])
def test_a_manifest_that_is_none_gives_valid_json(tmp_path, capsys, content):
    (tmp_path / "manifest.json").write_bytes(content)
    code, report = run_json(capsys, tmp_path)
    assert code == 1
    assert types(report["structure"]) == STRUCTURE
    assert report["ok"] is report["structure"]["ok"] is False
    assert len(report["problems"]) == 1
    assert str(tmp_path / "manifest.json") in report["problems"][0]


def test_a_source_that_is_none_is_a_problem_and_the_rest_is_checked(folder, tmp_path, capsys):
    code, report = run_json(capsys, folder, "--source", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere: no such folder" in report["problems"][0]
    assert report["weights"] is None
    assert report["logits"]["ok"] is True


def test_a_container_that_the_runtime_refuses_is_a_problem(tmp_path, capsys):
    folder = build_container(tmp_path, k3_config(num_hidden_layers=2))
    entry = next(entry for entry in Manifest.read(folder).trunk if entry.name.endswith("A_log"))
    overwrite(folder / TRUNK_NAME, entry.offset + 4 * 127, np.float32(1).tobytes())  # the padding behind four heads
    seal(folder)
    code, report = run_json(capsys, folder)
    assert code == 1
    assert report["structure"]["ok"] is True
    assert report["logits"] is None
    assert "A_log: the model has 4 heads" in report["problems"][0]


def test_a_file_name_that_is_no_text_is_shown(folder, capsys):
    (folder / os.fsdecode(b"\xff.bin")).touch()
    assert main([str(folder), "--no-logits"]) == 0
    assert r"/\udcff.bin: not part of the container" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_no_traceback(folder):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "validate", str(folder), "--no-logits"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "error: [Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_memory_and_read_errors_are_problems(folder, capsys, monkeypatch):
    for error, message in (
        (MemoryError(), "not enough memory"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (RecursionError(), "nested too deeply"),
    ):

        def fail(*_: object, raised: BaseException = error, **__: object) -> None:
            raise raised

        monkeypatch.setattr(run_module, "check_structure", fail)
        code, report = run_json(capsys, folder)
        assert code == 1
        assert message in report["problems"][0]


def test_interruption_is_130(folder, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "validate", interrupt)
    assert main([str(folder)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def subprocess_of(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "validate", *map(str, arguments)]


def test_ctrl_c_while_reading(folder):
    os.truncate(folder / TRUNK_NAME, 1 << 40)  # sparse: takes no disk, and hours to read
    process = subprocess.Popen(
        subprocess_of(folder, "--workers", "2"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,  # a suite started in the background has Ctrl-C ignored
    )
    try:
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines() == ["interrupted"]


def test_the_command_in_a_process_of_its_own(folder):
    done = subprocess.run(subprocess_of(folder, "--json"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["logits"]["ok"] is True
    assert done.stderr == ""
    (folder / TRUNK_NAME).unlink()
    done = subprocess.run(subprocess_of(folder), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"problem: {folder / TRUNK_NAME}: missing" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_structure_check_loads_neither_torch_nor_the_kernels(folder):
    program = (
        "import sys; from validate.__main__ import main; "
        f"code = main([{str(folder)!r}, '--no-logits']); "
        "print(code, sorted({'torch', 'numba', 'runtime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
