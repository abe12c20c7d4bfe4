"""`make demo`: the whole way on a small checkpoint, with a kill in the middle. About a minute.

A K3-shaped checkpoint (real names, several shards, MXFP4 experts, both attentions, latent experts, attention
residuals, tokenizer) is written, converted by two workers, killed, resumed, and checked against its source and
against the PyTorch reference.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.checkpoints import k3_config, write_checkpoint

FOLDER = Path("build") / "demo"
PROMPT = "the weights of a mixture of experts"
TOLERANCE = "1e-5"


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    checkpoint, container = FOLDER / "checkpoint", FOLDER / "model.waste"
    say("1. A small K3-shaped checkpoint")
    write_checkpoint(checkpoint, k3_config())
    for path in sorted(checkpoint.iterdir()):
        print(f"   {path.stat().st_size:>10,}  {path.name}")

    say("2. Converting with two workers, killed on the way")
    command = ["-m", "convert", str(checkpoint), str(container), "--workers", "2"]
    finished = kill_after_first_layers(command, container)
    print(f"   killed with SIGKILL; finished by then: {', '.join(finished) or 'nothing'}")

    say("3. The same command again continues")
    run(command)

    say("4. Checked against the checkpoint and the PyTorch reference")
    report = run_json(["-m", "validate", str(container), "--source", str(checkpoint), "--tolerance", TOLERANCE])
    show_validation(report)

    say(f"5. The runtime on {PROMPT!r}")
    run(["-m", "runtime", "eval", str(container), PROMPT, "--top", "3"])
    print("\n(the weights are random, so the answer means nothing; that both programs agree on it does)")
    return 0 if report["ok"] else 1


def kill_after_first_layers(command: list[str], container: Path) -> list[str]:
    """Start a conversion and SIGKILL it once two jobs have finished; the names of the finished jobs.

    Raises RuntimeError when it ended before the kill.
    """
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    records: list[Path] = []
    while process.poll() is None and len(records) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        records = sorted((container / ".build").glob("done-*.json"))
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"the conversion ended by itself, with exit code {process.returncode}, before it was killed")
    return [path.stem.removeprefix("done-") for path in sorted((container / ".build").glob("done-*.json"))]


def show_validation(report: dict[str, Any]) -> None:
    for problem in report["problems"]:
        print(f"   problem: {problem}")
    structure, weights, logits = report["structure"], report["weights"], report["logits"]
    if weights is None or logits is None or logits["kl"] is None:
        print("   CHECKS FAILED, some were not reached")
        return
    print(
        f"   structure: {structure['n_files']} files, {structure['n_records']} expert records, "
        f"{structure['n_codebooks']} codebooks, {structure['n_trunk_tensors']} trunk tensors, "
        f"{structure['n_checksums']} checksums"
    )
    errors = (f"{kind} {100 * error:.2f} %" for kind, error in weights["relative_error"].items())
    print(f"   weights, relative error against the checkpoint: {', '.join(errors)}")
    print(f"   logits, runtime against the PyTorch reference: relative error {logits['relative_error']:.1e}")
    print(f"   logits, converted against original model: KL {logits['kl']:.2f} nats (random weights)")
    print(f"   {'all checks hold' if report['ok'] else 'CHECKS FAILED'}")


def run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True)


def run_json(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *arguments, "--json"], stdout=subprocess.PIPE, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def say(title: str) -> None:
    print(f"\n{title}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
