"""`make demo`: the whole way on a small K3 that has been trained, with a kill in the middle. About a minute.

The checkpoint (`tests/trained/checkpoint`: real names, several shards, MXFP4 experts, both attentions, latent experts,
attention residuals, tokenizer) is converted by two workers, killed, resumed, checked against its source and against
the PyTorch reference, and continues a text.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.trained.continuing import by_checkpoint, by_container

CHECKPOINT = Path("tests") / "trained" / "checkpoint"
HELD_OUT = Path("tests") / "trained" / "held_out.txt"
N_TEXT_TOKENS = 2048
FOLDER = Path("build") / "demo"
PROMPT = 'The "while" statement is used for'
N_TOKENS = 60
TEMPERATURE = 0.5
TOLERANCE = "1e-5"


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    container = FOLDER / "model.waste"
    say("1. A small K3, trained on Python's documentation (tests/trained/README.md)")
    for path in sorted(CHECKPOINT.iterdir()):
        print(f"   {path.stat().st_size:>10,}  {path.name}")

    say("2. Converting with two workers, killed on the way")
    command = ["-m", "convert", str(CHECKPOINT), str(container), "--workers", "2"]
    finished = kill_after_first_layers(command, container)
    print(f"   killed with SIGKILL; finished by then: {', '.join(finished) or 'nothing'}")

    say("3. The same command again continues")
    run(command)

    say("4. Checked against the checkpoint and the PyTorch reference")
    text = ["--text", str(HELD_OUT), "--max-tokens", str(N_TEXT_TOKENS)]
    report = run_json(["-m", "validate", str(container), "--source", str(CHECKPOINT), "--tolerance", TOLERANCE, *text])
    show_validation(report)

    say(f"5. The same text continued by both, with the same dice ({N_TOKENS} tokens, temperature {TEMPERATURE})")
    show_continuation("checkpoint", by_checkpoint(CHECKPOINT, PROMPT, N_TOKENS, temperature=TEMPERATURE))
    show_continuation("container", by_container(container, PROMPT, N_TOKENS, temperature=TEMPERATURE))
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
    text = report["text"]
    if weights is None or logits is None or text is None:
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
    kl, same = text["kl"], text["top1_agreement"]
    print(
        f"   {text['n_tokens']:,} tokens of unseen text, container against checkpoint: perplexity "
        f"{text['perplexity_container']:.2f} against {text['perplexity_source']:.2f}, KL {kl['value']:.4f} nats, "
        f"same first choice {100 * same['value']:.1f} %"
    )
    print(f"   {'all checks hold' if report['ok'] else 'CHECKS FAILED'}")


def show_continuation(who: str, text: str) -> None:
    print(f"   {who}:")
    print(textwrap.indent(f"{PROMPT}⟨{text}⟩", "      | ", lambda line: True))


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
