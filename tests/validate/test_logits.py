"""Runtime against reference: they agree on right code and data, and every injected error is found."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from container.checkpoint import Checkpoint
from container.errors import UsageError
from container.reader import ContainerReader
from container.records import ExpertRecord
from runtime.disk.loading import SlotLoader
from runtime.engine import Engine, Evaluation
from runtime.models import mla
from runtime.options import RunOptions
from tests.validate.conftest import Converted
from tests.validate.small_models import small_model
from validate.logits import PROMPT_LENGTHS, check_logits, default_prompts, divergence, relative_errors
from validate.reference.model import forward
from validate.reference.sources import ContainerTensors
from validate.report import Findings, LogitsReport
from validate.run import Options, validate

TOLERANCE = 1e-5
IDS = (5, 17, 42, 3, 99, 100, 7)


def check(made: Converted, *, source: bool = False, **options: Any) -> tuple[LogitsReport, Findings]:
    options = {"tolerance": TOLERANCE, "ids": None, **options}
    checkpoint = Checkpoint.open(made.checkpoint) if source else None
    with ContainerReader.open(made.container) as reader:
        return check_logits(reader, checkpoint, **options, stream=io.StringIO())


@pytest.mark.parametrize("which", ["k3", "kimi_linear"])
def test_runtime_and_reference_agree(request, which):
    made = request.getfixturevalue(which)
    report, findings = check(made, source=True)
    assert (findings.problems, findings.notes) == ([], [])
    assert report.ok
    assert 0 < report.relative_error <= TOLERANCE
    assert len(report.per_layer) == 4
    assert all(0 < error <= TOLERANCE for error in report.per_layer)
    assert report.argmax_equal
    assert report.routing_equal
    assert report.top10_equal == 1
    assert [len(prompt.ids) for prompt in report.prompts] == list(PROMPT_LENGTHS)
    assert max(prompt.relative_error for prompt in report.prompts) == report.relative_error
    # quantisation at 3 to 4 bits is visible, yet far from a model that knows nothing of the original
    assert report.kl is not None
    assert 0.01 < report.kl < 1
    assert report.top1_agreement is not None
    assert 0 < report.top1_agreement < 1
    assert report.router is not None
    assert (report.router.n_tokens, report.router.n_choices) == (41, 41 * 3 * 2)


def test_the_figures_are_those_of_a_plain_calculation(kimi_linear):
    report, _ = check(kimi_linear, source=True, ids=IDS)
    config, tensors = small_model(kimi_linear.config)
    original = forward(tensors, config, IDS).logits.numpy().astype(np.float64)
    with Engine.open(kimi_linear.container) as engine:
        converted = engine.evaluate(IDS).logits.astype(np.float64)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (original, converted))
    assert report.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert report.top1_agreement == (original.argmax(-1) == converted.argmax(-1)).mean()
    assert report.prompts[0].ids == list(IDS)


def test_a_router_that_was_stored_wrong_is_counted(kimi_linear, monkeypatch):
    get = ContainerTensors.__getitem__

    def turned(tensors: ContainerTensors, name: str) -> torch.Tensor:
        found = get(tensors, name)
        return -found if name == "model.layers.2.block_sparse_moe.gate.weight" else found

    monkeypatch.setattr(ContainerTensors, "__getitem__", turned)
    report, _ = check(kimi_linear, source=True, ids=IDS)
    assert report.router is not None
    assert [layer.n_changed > 7 for layer in report.router.layers] == [False, True, False]
    assert report.router.n_tokens_changed == report.router.n_tokens == 7


def test_without_the_checkpoint_there_is_no_divergence(kimi_linear):
    report, findings = check(kimi_linear, ids=IDS)
    assert findings.ok
    assert report.kl is None
    assert report.top1_agreement is None
    assert report.router is None


def test_relative_errors_by_hand():
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [float("nan"), 0.0]])
    b = torch.tensor([[0.0, 5.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    found = relative_errors(a, b).tolist()
    assert found[:3] == [pytest.approx(10**0.5 / 5), 0.0, float("inf")]
    assert np.isnan(found[3])


def test_divergence_by_hand():
    half, skewed = torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[0.8, 0.2]]))
    assert divergence(half, half).item() == 0
    assert divergence(half, skewed).item() == pytest.approx(0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2))
    assert divergence(skewed, half).item() == pytest.approx(0.8 * np.log(1.6) + 0.2 * np.log(0.4))
    assert divergence(skewed + 7, half).item() == pytest.approx(divergence(skewed, half).item())


def test_the_default_prompts_are_always_the_same():
    prompts = default_prompts(163_840)
    assert prompts == default_prompts(163_840)
    assert [len(prompt) for prompt in prompts] == [1, 7, 33]
    assert all(0 <= token < 50 for prompt in default_prompts(50) for token in prompt)


def test_ids_outside_the_vocabulary_are_a_usage_error(kimi_linear):
    with ContainerReader.open(kimi_linear.container) as reader:
        vocab_size = reader.model.vocab_size
    for token in (-1, vocab_size):
        with pytest.raises(
            UsageError, match=rf"--ids: token {token} is outside the vocabulary \(0 to {vocab_size - 1}\)"
        ):
            validate(Options(container=kimi_linear.container, ids=(1, token)), io.StringIO())
    assert check(kimi_linear, ids=(vocab_size - 1,))[1].ok


def test_too_little_memory_is_said_before_anything_is_loaded(kimi_linear, monkeypatch):
    monkeypatch.setattr("validate.run.available_memory", lambda: 100_000)
    report = validate(Options(container=kimi_linear.container, logits=True), io.StringIO())
    assert (report.ok, report.logits) == (False, None)
    assert "comparing logits needs the trunk in memory" in report.findings.problems[0]


# injected errors


def test_another_norm_constant_in_the_runtime(kimi_linear, monkeypatch):
    monkeypatch.setattr(mla, "LATENT_NORM_EPS", 1e-2)
    report, findings = check(kimi_linear, ids=IDS)
    assert not report.ok
    assert report.relative_error > TOLERANCE
    assert report.per_layer[2] <= TOLERANCE < report.per_layer[3]  # layer 3 is the one with latent attention
    assert "tolerance 1e-05; the residual stream is above it first after layer 3" in findings.problems[0]


def swapped(record_in: Any) -> Any:
    def swap(loader: SlotLoader, slot: int) -> ExpertRecord:
        record = record_in(loader, slot)
        if record.layer != 2:
            return record
        indices = {"gate": record.indices["up"], "up": record.indices["gate"], "down": record.indices["down"]}
        return replace(record, indices=indices)

    return swap


@pytest.mark.parametrize("which", ["k3", "kimi_linear"])
def test_gate_and_up_swapped_in_one_layer(request, which, monkeypatch):
    monkeypatch.setattr(SlotLoader, "record", swapped(SlotLoader.record))
    report, findings = check(request.getfixturevalue(which), ids=IDS)
    assert report.per_layer[1] <= TOLERANCE < report.per_layer[2]
    listed = "\n".join(findings.problems)
    assert "above it first after layer 2" in listed
    for form in ("in chunks", "token by token"):
        assert f"logits, prompt of {len(IDS)} tokens {form}: relative error" in listed


def test_a_small_error_is_judged_by_the_tolerance(kimi_linear, monkeypatch):
    change(monkeypatch, lambda found: found.logits.__imul__(np.float32(1.0001)))
    report, findings = check(kimi_linear, ids=IDS)
    assert report.relative_error == pytest.approx(1e-4, rel=0.05)
    assert findings.n_problems == 2  # one for each form
    assert "within it after every layer" in findings.problems[0]
    assert report.argmax_equal
    assert check(kimi_linear, ids=IDS, tolerance=1e-3)[1].ok


@pytest.mark.parametrize("one_by_one", [False, True])
def test_either_form_of_the_runtime_alone_may_be_wrong(kimi_linear, monkeypatch, one_by_one):
    change(monkeypatch, lambda found: found.logits.__imul__(np.float32(1.01)), one_by_one=one_by_one)
    report, findings = check(kimi_linear, ids=IDS)
    assert findings.n_problems == 1
    assert f"tokens {'token by token' if one_by_one else 'in chunks'}: relative error" in findings.problems[0]
    wrong, right = report.chunks_error, report.token_by_token_error
    wrong, right = (right, wrong) if one_by_one else (wrong, right)
    assert right <= TOLERANCE < wrong == report.relative_error == report.prompts[0].relative_error


def test_a_prompt_longer_than_the_default_context(kimi_linear, monkeypatch):
    monkeypatch.setitem(RunOptions.__init__.__kwdefaults__, "context", 4)
    report, findings = check(kimi_linear, ids=IDS)
    assert findings.ok
    assert len(report.prompts[0].ids) > RunOptions().context
    assert check(kimi_linear, ids=IDS[:1])[0].chunks_error is None


def test_the_worst_position_counts(kimi_linear, monkeypatch):
    def spoil(found: Evaluation) -> None:
        found.layers[1][4] *= np.float32(1.01)
        found.logits[6] *= np.float32(1.1)

    change(monkeypatch, spoil)
    report, findings = check(kimi_linear, ids=IDS)
    assert report.per_layer[1] == pytest.approx(0.01, rel=1e-3)
    assert report.relative_error == pytest.approx(0.1, rel=1e-3)
    assert "1.000e-01 at position 6" in findings.problems[0]
    assert "above it first after layer 1" in findings.problems[0]


def test_another_choice_of_experts_is_named(k3, monkeypatch):
    def reroute(found: Evaluation) -> None:
        for layer, position in ((3, 2), (2, 4)):
            taken = set(found.routing[layer][position].tolist())
            found.routing[layer][position][0] = min(set(range(8)) - taken)

    change(monkeypatch, reroute)
    report, findings = check(k3, ids=IDS)
    assert not report.routing_equal
    assert findings.n_problems == 2
    assert "other experts than the reference in 2 case(s), first in layer 2 at position 4" in findings.problems[0]


def test_the_order_of_the_chosen_experts_does_not_matter(k3, monkeypatch):
    change(monkeypatch, lambda found: found.routing.update({n: ids[:, ::-1] for n, ids in found.routing.items()}))
    assert check(k3, ids=IDS)[0].routing_equal


def test_another_favourite_token(kimi_linear, monkeypatch):
    def promote(found: Evaluation) -> None:
        best, second = found.logits[3].argsort()[-2:][::-1]
        found.logits[3, [best, second]] = found.logits[3, [second, best]]

    change(monkeypatch, promote)
    report, findings = check(kimi_linear, ids=IDS, tolerance=10)
    assert not report.argmax_equal
    assert report.top10_equal == 1
    assert "prefer different tokens at 1 position(s), first at 3" in findings.problems[0]


def test_another_set_of_likely_tokens(kimi_linear, monkeypatch):
    def drop(found: Evaluation) -> None:
        found.logits[1, found.logits[1].argsort()[-10]] = -100

    change(monkeypatch, drop)
    report, _ = check(kimi_linear, ids=IDS, tolerance=1e3)
    assert report.argmax_equal
    assert report.top10_equal == pytest.approx(6 / 7)


def test_logits_that_are_no_numbers(kimi_linear, monkeypatch):
    change(monkeypatch, lambda found: found.logits[2:3].fill(np.nan))
    report, findings = check(kimi_linear, ids=IDS)
    assert not report.ok
    assert "relative error nan at position 2" in findings.problems[0]
    report, _ = check(kimi_linear, ids=None)  # not in the first prompt, which has one token
    assert math.isnan(report.relative_error)


def test_a_checkpoint_that_cannot_run_leaves_the_comparison_of_the_container(kimi_linear, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((kimi_linear.checkpoint / name).read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    del checkpoint.weight_map["model.norm.weight"]
    with ContainerReader.open(kimi_linear.container) as reader:
        report, findings = check_logits(reader, checkpoint, tolerance=TOLERANCE, ids=IDS, stream=io.StringIO())
    assert findings.n_problems == 1
    assert "logits of the original model: reference: tensor `model.norm.weight` is missing" in findings.problems[0]
    assert report.relative_error <= TOLERANCE
    assert report.kl is None


def change(monkeypatch: pytest.MonkeyPatch, spoil: Any, *, one_by_one: bool | None = None) -> None:
    """Let `spoil` change what the runtime returns, in both of its forms or in one."""
    evaluate = Engine.evaluate

    def spoiled(engine: Engine, ids: Sequence[int], **options: Any) -> Evaluation:
        found = evaluate(engine, ids, **options)
        if one_by_one in (None, options.get("one_by_one", False)):
            spoil(found)
        return found

    monkeypatch.setattr(Engine, "evaluate", spoiled)
