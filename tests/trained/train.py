"""`python -m tests.trained.train OUT` trains the small K3: OUT/checkpoint, OUT/held_out.txt, OUT/figures.json.

About an hour on two cores. The result depends on the seed, the text (Python's own documentation, so the Python
version), and on the arithmetic of the machine and the libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from container.model import ModelConfig, canonical_config
from tests.trained.measuring import measure
from tests.trained.parameters import EXPERTS, initial_parameters
from tests.trained.rounding import rounded
from tests.trained.setting import TOY, Setting, config_json
from tests.trained.topics import Texts, split_topics
from tests.trained.training import Report, Trainer, mean_loss
from tests.trained.vocabulary import Vocabulary, learn_tokens
from tests.trained.writing import write_trained

REPORTED = 10  # steps between two printed lines
MEASURED = 50  # steps between two measurements on the held-out text


def main(arguments: list[str]) -> int:
    """Command line. Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.trained.train", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the checkpoint, the held-out text and the figures")
    parser.add_argument("--toy", action="store_true", help="a few steps of a much smaller model")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="save the parameters here now and then (torch.save)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the two parts of a batch are worked on by threads of our own
    figures = train(options.out, split_topics(), TOY if options.toy else Setting(), keep=options.keep)
    print(json.dumps(figures, indent=2))
    return 0


def train(out: Path, texts: Texts, setting: Setting, *, keep: Path | None = None) -> dict[str, Any]:
    """Train on `texts` by `setting`, write everything into `out` and return the figures."""
    vocabulary = Vocabulary(learn_tokens(texts.training, setting.n_ranks), setting.n_specials)
    config = config_json(setting, vocabulary)
    model = ModelConfig.from_config(canonical_config(config))
    parameters = initial_parameters(config, setting.seed)
    ids = torch.tensor(vocabulary.encode(texts.training))
    held_out = "\n".join(texts.held_out)
    held_out_ids = torch.tensor(vocabulary.tokenizer.encode(held_out))
    trainer = Trainer(setting, model, parameters, ids)

    def loss(values: Mapping[str, Tensor] = parameters) -> float:
        return mean_loss(model, values, held_out_ids, setting.sequence)

    report = _reporter(loss, parameters, keep)
    started = time.monotonic()
    losses = trainer.train(setting.n_steps, setting.learning_rate, setting.warm_up, as_stored=False, report=report)
    held_out_loss = {"in_f32": loss(), "rounded_without_training": loss(rounded(parameters))}
    losses += trainer.train(setting.n_rounded_steps, setting.rounded_learning_rate, 1, as_stored=True, report=report)
    held_out_loss["rounded_and_trained"] = loss(rounded(parameters))
    minutes = (time.monotonic() - started) / 60
    folder = out / "checkpoint"
    write_trained(folder, config, vocabulary, parameters)
    (out / "held_out.txt").write_text(held_out, encoding="utf-8")
    held_out_loss["checkpoint"] = measure(folder, held_out).loss
    figures = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "training_text_sha256": hashlib.sha256("".join(texts.training).encode()).hexdigest(),
        "n_parameters": _n_parameters(parameters),
        "n_training_tokens": len(ids),
        "n_held_out_tokens": len(held_out_ids),
        "n_steps": [setting.n_steps, setting.n_rounded_steps],
        "n_tokens_seen": len(losses) * setting.batch * setting.sequence,
        "minutes": round(minutes, 1),
        "training_loss": {"first": losses[0], "last": sum(losses[-10:]) / len(losses[-10:])},
        "held_out_loss": held_out_loss,
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def _reporter(loss: Callable[[], float], parameters: Mapping[str, Tensor], keep: Path | None) -> Report:
    """Prints the training loss every REPORTED steps and the held-out loss every MEASURED; then also saves to `keep`."""
    started = time.monotonic()

    def report(step: int, training_loss: float) -> None:
        if step % REPORTED == 0:
            print(f"{time.monotonic() - started:6.0f} s  step {step}: loss {training_loss:.4f}", flush=True)
        if step % MEASURED == 0:
            print(f"          held out: {loss():.4f}", flush=True)
            if keep is not None:
                torch.save(dict(parameters), keep)

    return report


def _n_parameters(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    n_experts = sum(tensor.numel() for name, tensor in parameters.items() if EXPERTS.fullmatch(name))
    n_all = sum(tensor.numel() for tensor in parameters.values())
    vocabulary = sum(parameters[name].numel() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return {
        "all": n_all,
        "experts": n_experts,
        "embedding_and_head": vocabulary,
        "other_trunk": n_all - n_experts - vocabulary,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
