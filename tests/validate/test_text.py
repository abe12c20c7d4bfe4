"""Perplexity, divergence and first choices on a text: by hand, against plain numpy, and on whole containers."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from container.checkpoint import Checkpoint
from container.errors import CheckError
from container.layout import TrunkFormat
from container.reader import ContainerReader
from runtime.engine import Engine, Evaluation
from runtime.options import RunOptions
from tests.checkpoints import k3_config, write_checkpoint
from tests.containers import build_container
from tests.validate.conftest import Converted
from tests.validate.small_models import small_model
from validate import text as text_module
from validate.bootstrap import intervals
from validate.reference.model import forward
from validate.reference.sources import ContainerTensors
from validate.reference.tensors import KeptTensors, MappingTensors
from validate.report import Estimate, Findings, TextReport
from validate.text import Scores, check_text, figures, score

IDS = tuple(np.random.default_rng(9).integers(0, 512, 41).tolist())


def check(made: Converted, ids: Sequence[int] = IDS, **options: Any) -> tuple[TextReport, Findings]:
    options = {"window": 8, "keep": True, **options}
    with ContainerReader.open(made.container) as reader:
        checkpoint = Checkpoint.open(made.checkpoint)
        try:
            return check_text(reader, checkpoint, ids, file=Path("text"), **options, stream=io.StringIO())
        finally:
            checkpoint.close()


def plain_score(original: Any, converted: Any, targets: Sequence[int]) -> tuple[Any, Any, Any, Any]:
    """KL, both losses and agreement per position, by the definitions."""
    p, q = (np.exp(np.asarray(x, dtype=np.float64)) for x in (original, converted))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    rows = np.arange(len(targets))
    return (
        (p * np.log(p / q)).sum(-1),
        -np.log(p[rows, list(targets)]),
        -np.log(q[rows, list(targets)]),
        p.argmax(-1) == q.argmax(-1),
    )


# one window


def test_scores_by_hand():
    half, skewed = [0.0, 0.0, -torch.inf], [math.log(8), math.log(2), -torch.inf]
    uniform, sure = [1.0, 1.0, 1.0], [0.0, 0.0, 1000.0]
    found = score(torch.tensor([skewed[:2], half[:2]]), torch.tensor([half[:2], skewed[:2]]), [1, 0])
    assert found.kl == pytest.approx([0.8 * math.log(1.6) + 0.2 * math.log(0.4), -0.5 * math.log(0.8 * 0.2 * 4)])
    assert found.loss_source == pytest.approx([-math.log(0.2), math.log(2)])
    assert found.loss_container == pytest.approx([math.log(2), -math.log(0.8)])
    assert found.agree.tolist() == [True, True]
    found = score(torch.tensor([uniform, sure]), torch.tensor([sure, sure]), [2, 0])
    assert found.kl == pytest.approx([2000 / 3 - math.log(3), 0], rel=1e-12)
    assert found.loss_source == pytest.approx([math.log(3), 1000])
    assert found.loss_container == pytest.approx([0, 1000])
    assert found.agree.tolist() == [False, True]


@pytest.mark.parametrize("strip_logits", [1, 100, 1 << 22])
def test_scores_are_those_of_a_plain_calculation(monkeypatch, strip_logits):
    monkeypatch.setattr(text_module, "STRIP_LOGITS", strip_logits)
    rng = np.random.default_rng(1)
    original, converted = (rng.standard_normal((9, 50)).astype(np.float32) * 3 for _ in range(2))
    targets = rng.integers(50, size=9).tolist()
    found = score(torch.from_numpy(original), torch.from_numpy(converted), targets)
    kl, loss_source, loss_container, agree = plain_score(original, converted, targets)
    assert found.kl == pytest.approx(kl, rel=1e-9)
    assert found.loss_source == pytest.approx(loss_source, rel=1e-9)
    assert found.loss_container == pytest.approx(loss_container, rel=1e-9)
    assert (found.agree == agree).all()


# all windows


def random_scores(lengths: Sequence[int]) -> list[Scores]:
    rng = np.random.default_rng(2)
    return [
        Scores(rng.random(n), rng.random(n) + 2, rng.random(n) + 2.1, rng.random(n) < 0.7) for n in map(int, lengths)
    ]


def test_figures_are_means_over_positions_not_over_windows():
    scores = random_scores([5, 5, 5, 2])
    found = figures(scores)
    joined = {name: np.concatenate([getattr(one, name) for one in scores]) for name in vars(scores[0])}
    assert (found.n_windows, found.n_positions, found.confidence, found.n_resamples) == (4, 17, 0.95, 10_000)
    assert found.kl.value == pytest.approx(joined["kl"].mean())
    assert found.top1_agreement.value == pytest.approx(joined["agree"].mean())
    assert found.perplexity_source == pytest.approx(np.exp(joined["loss_source"].mean()))
    assert found.perplexity_container == pytest.approx(np.exp(joined["loss_container"].mean()))
    assert found.perplexity_ratio == pytest.approx(found.perplexity_container / found.perplexity_source)
    assert found.log_perplexity_difference.value == pytest.approx(math.log(found.perplexity_ratio))


def test_intervals_are_over_windows_and_paired():
    scores = random_scores([5, 5, 5, 2, 7])
    found = figures(scores)
    counts = np.array([5.0, 5, 5, 2, 7])
    for estimate, values in (
        (found.kl, [one.kl for one in scores]),
        (found.top1_agreement, [one.agree for one in scores]),
        (found.log_perplexity_difference, [one.loss_container - one.loss_source for one in scores]),
    ):
        ends = intervals(np.array([[value.sum()] for value in values]), counts)[0]
        assert (estimate.low, estimate.high) == tuple(ends)
        assert ends[0] < estimate.value < ends[1]


def test_one_window_has_no_interval():
    found = figures(random_scores([12]))
    assert found.kl == Estimate(value=found.kl.value, low=None, high=None)
    assert found.n_windows == 1


def test_equal_windows_have_an_interval_without_width():
    one = random_scores([6])[0]
    found = figures([one] * 5)
    assert found.kl.low == pytest.approx(found.kl.value, rel=1e-12)
    assert found.kl.high == pytest.approx(found.kl.value, rel=1e-12)


def test_means_by_position():
    scores = random_scores([5, 5, 2])
    found = figures(scores)
    for position in range(5):
        here = [one for one in scores if len(one.kl) > position]
        assert found.kl_by_position[position] == pytest.approx(np.mean([one.kl[position] for one in here]))
        assert found.top1_agreement_by_position[position] == pytest.approx(
            np.mean([one.agree[position] for one in here])
        )
    assert len(found.kl_by_position) == len(found.top1_agreement_by_position) == 5
    assert [(each.first, each.last, each.n_positions) for each in found.bins] == [
        (0, 0, 3), (1, 1, 3), (2, 3, 4), (4, 4, 2),
    ]  # fmt: skip
    third = np.concatenate([one.kl[2:4] for one in scores])
    assert found.bins[2].kl == pytest.approx(third.mean())
    assert found.bins[2].top1_agreement == pytest.approx(np.concatenate([one.agree[2:4] for one in scores]).mean())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 256, 300])
def test_bins_cover_every_position_once(length):
    bins = figures(random_scores([length, length])).bins
    assert [position for each in bins for position in range(each.first, each.last + 1)] == list(range(length))
    assert sum(each.n_positions for each in bins) == 2 * length
    assert all(each.first == 0 or each.first.bit_count() == 1 for each in bins)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity():
    nothing = torch.zeros(6, 37)
    found = figures([score(nothing, nothing, range(6))] * 2)
    assert found.perplexity_source == pytest.approx(37)
    assert found.perplexity_ratio == 1
    assert (found.kl.value, found.top1_agreement.value) == (0, 1)


def test_a_model_that_is_certain_and_wrong():
    sure = torch.tensor([[0.0, 5000.0]])
    found = figures([score(torch.zeros(1, 2), sure, [0])] * 2)
    assert found.perplexity_container == found.perplexity_ratio == math.inf


# containers


def test_the_report_is_that_of_a_plain_calculation(kimi_linear):
    report, findings = check(kimi_linear)
    model, tensors = small_model(kimi_linear.config)
    columns = []
    with Engine.open(kimi_linear.container) as engine:
        for start in range(0, 40, 8):
            ids, targets = IDS[start : start + 8], IDS[start + 1 : start + 9]
            original = forward(tensors, model, ids, dtype=torch.float64).logits
            columns.append(plain_score(original, engine.evaluate(ids).logits, targets))
    kl, loss_source, loss_container, agree = (np.stack(column) for column in zip(*columns, strict=True))
    found = report.figures
    assert (report.ok, report.n_tokens, report.window, report.file) == (True, 41, 8, "text")
    assert (found.n_windows, found.n_positions) == (5, 40)
    assert found.kl.value == pytest.approx(kl.mean(), rel=1e-4)
    assert found.top1_agreement.value == agree.mean()
    assert found.perplexity_source == pytest.approx(np.exp(loss_source.mean()), rel=1e-5)
    assert found.perplexity_container == pytest.approx(np.exp(loss_container.mean()), rel=1e-5)
    assert found.kl_by_position == pytest.approx(kl.mean(axis=0).tolist(), rel=1e-4)
    assert found.top1_agreement_by_position == agree.mean(axis=0).tolist()
    assert (report.router.n_tokens, report.router.n_choices) == (40, 40 * 3 * 2)
    assert findings.notes == [
        "text: the intervals rest on 5 windows and are somewhat too narrow; a longer text, or a smaller --window, "
        "gives more"
    ]


def test_windows_know_nothing_of_each_other(kimi_linear):
    both, _ = check(kimi_linear, IDS[:17])
    first, _ = check(kimi_linear, IDS[:9])
    second, _ = check(kimi_linear, IDS[8:17])
    for name in ("kl_by_position", "top1_agreement_by_position"):
        apart = np.array([getattr(one.figures, name) for one in (first, second)])
        assert getattr(both.figures, name) == apart.mean(axis=0).tolist()
    longer, _ = check(kimi_linear, IDS[:17], window=16)
    assert longer.figures.kl_by_position[:8] == pytest.approx(first.figures.kl_by_position, rel=1e-4)
    assert longer.figures.kl_by_position[8] != pytest.approx(second.figures.kl_by_position[0], rel=1e-2)


def test_reading_once_or_for_every_window_is_the_same(kimi_linear, monkeypatch):
    read = Checkpoint.read
    names: list[str] = []

    def listed(checkpoint: Checkpoint, name: str, *span: Any) -> Any:
        names.append(name)
        return read(checkpoint, name, *span)

    monkeypatch.setattr(Checkpoint, "read", listed)
    kept, _ = check(kimi_linear)
    assert len(names) == len(set(names)) > 50
    names.clear()
    again, _ = check(kimi_linear, keep=False)
    assert names.count("model.norm.weight") == 5
    assert kept.figures == again.figures
    assert kept.router == again.router


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Containers of the same weights with a trunk of 8 bits and an unquantised one."""
    folder = tmp_path_factory.mktemp("stored")
    return {bits: build_container(folder / str(bits), SAME, trunk_bits=bits) for bits in (8, 32)}


SAME = k3_config(num_hidden_layers=3, quantization_config=None)


def decoded(container: Path, checkpoint: Path) -> Converted:
    """A checkpoint in F32 that holds what `container` holds."""
    with ContainerReader.open(container) as reader:
        tensors, prefix = ContainerTensors(reader), reader.manifest.tensor_prefix
        arrays = {entry.name: tensors[entry.name.removeprefix(prefix)].numpy() for entry in reader.manifest.trunk}
        for layer, bank in reader.manifest.layers.items():
            for expert in range(bank.n_experts):
                for matrix in ("w1", "w2", "w3"):
                    name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                    arrays[prefix + name] = tensors[name].numpy()
    write_checkpoint(checkpoint, SAME, arrays)
    return Converted(SAME, checkpoint, container)


def test_the_same_weights_do_not_diverge(stored, tmp_path):
    report, findings = check(decoded(stored[32], tmp_path / "same"))
    assert findings.ok
    assert 0 <= report.figures.kl.value < 1e-9  # f32 rounding on both sides
    assert abs(report.figures.log_perplexity_difference.value) < 1e-4
    assert report.figures.top1_agreement.value == 1
    assert report.router.n_changed == 0


def test_an_8_bit_trunk_alone_is_near(stored, tmp_path):
    """Random weights: where the states' small error changes no expert it is about 2e-3 nats, elsewhere far more."""
    made = decoded(stored[32], tmp_path / "exact")
    report, _ = check(Converted(made.config, made.checkpoint, stored[8]), window=1)
    assert report.figures.n_windows == 40
    assert 1e-4 < report.figures.kl.value < 0.1
    with ContainerReader.open(stored[8]) as reader:
        assert {entry.fmt for entry in reader.manifest.trunk} == {TrunkFormat.F32, TrunkFormat.Q8G}


def test_a_window_longer_than_the_default_context(kimi_linear, monkeypatch):
    monkeypatch.setitem(RunOptions.__init__.__kwdefaults__, "context", 4)
    assert check(kimi_linear)[1].problems == []


def test_logits_that_are_no_numbers_are_a_problem(kimi_linear, monkeypatch):
    evaluate = Engine.evaluate

    def spoiled(engine: Engine, ids: Sequence[int], **options: Any) -> Evaluation:
        found = evaluate(engine, ids, **options)
        if list(ids) == list(IDS[8:16]):
            found.logits[3, 7] = np.nan
        return found

    monkeypatch.setattr(Engine, "evaluate", spoiled)
    report, findings = check(kimi_linear)
    assert not report.ok
    assert findings.problems == [
        "text: NaN or infinite logits at 1 position(s), first at position 3 of window 1, of the container"
    ]
    assert math.isnan(report.figures.kl.value)
    assert math.isfinite(report.figures.perplexity_source)
    assert report.figures.bins[1].kl > 0
    json.dumps(report.to_json())


def test_a_checkpoint_that_cannot_run_is_an_error(kimi_linear, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((kimi_linear.checkpoint / name).read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    del checkpoint.weight_map["model.norm.weight"]
    with (
        ContainerReader.open(kimi_linear.container) as reader,
        pytest.raises(CheckError, match=r"model.norm.weight` is missing"),
    ):
        check_text(reader, checkpoint, IDS, file=Path("t"), window=8, keep=True, stream=io.StringIO())


class Counting(MappingTensors):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return super().__getitem__(name)


def test_kept_tensors_are_read_once():
    source = Counting({"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2)})
    kept = KeptTensors(source)
    for _ in range(3):
        assert kept.rows("a", 1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
        assert kept["a"].shape == (4, 3)
        assert kept["b"].tolist() == [1, 1]
    assert kept.rows("a", 3, 9).shape == (1, 3)
    assert source.asked == ["a", "b"]
    with pytest.raises(KeyError):
        kept["c"]
