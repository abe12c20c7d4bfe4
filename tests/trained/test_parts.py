"""What the training is made of, each part against a slow or independent answer, and a whole run at toy size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
from numpy.typing import NDArray

from container.model import ModelConfig, canonical_config
from runtime.text.tokenizer import PRE_TOKENISER
from tests.checkpoints import pack_mxfp4, unpack_mxfp4
from tests.trained.batches import attention_by_pieces, run_batch
from tests.trained.continuing import continued
from tests.trained.delta import PIECE, delta_by_pieces
from tests.trained.parameters import ROUTER_BIAS, initial_parameters, named_views
from tests.trained.rounding import mxfp4_values, rounded
from tests.trained.setting import TOY, config_json
from tests.trained.topics import SHORT_PARAGRAPH, Texts, split_topics
from tests.trained.train import train
from tests.trained.training import Trainer
from tests.trained.vocabulary import Vocabulary, learn_tokens
from validate.reference.kda import delta_recurrence, l2_norm
from validate.reference.model import forward, layer_attention
from validate.reference.tensors import MappingTensors

TEXT = "the cat sat on the mat, the cat that sat on the other mat\n    while the cats: 123 other mats\n" * 3


@pytest.fixture(scope="module")
def toy() -> tuple[ModelConfig, dict[str, torch.Tensor], Vocabulary, dict[str, Any]]:
    vocabulary = Vocabulary(learn_tokens([TEXT], 270), TOY.n_specials)
    config = config_json(TOY, vocabulary)
    return ModelConfig.from_config(canonical_config(config)), initial_parameters(config, 0), vocabulary, config


def delta_inputs(n_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    q, k, v, z = (torch.randn(n_tokens, 3, 8, generator=random, dtype=dtype) for _ in range(4))
    beta = torch.sigmoid(torch.randn(n_tokens, 3, generator=random, dtype=dtype))
    return [x.requires_grad_() for x in (l2_norm(q), l2_norm(k), v, -5 * torch.sigmoid(3 * z), beta)]


def test_the_delta_rule_by_pieces_is_the_reference_s() -> None:
    inputs = delta_inputs(5 * PIECE, torch.float64)
    expected, found = delta_recurrence(*inputs), delta_by_pieces(*inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(o.square().sum() + s.sum(), inputs) for o, s in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_fastest_decay_stays_inside_f32() -> None:
    q, k, v, g, beta = delta_inputs(2 * PIECE, torch.float32)
    inputs = [q, k, v, torch.full_like(g, -5.0).requires_grad_(), beta]
    expected, found = delta_recurrence(*inputs)[0], delta_by_pieces(*inputs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(found.sum(), inputs))


def test_a_batch_is_its_sequences_one_by_one(toy: tuple[Any, ...]) -> None:
    model, parameters, _, _ = toy
    ids = torch.randint(model.vocab_size, (2, 2 * PIECE), generator=torch.Generator().manual_seed(1))
    views = named_views(parameters)
    alone = torch.stack([forward(views, model, sequence.tolist()).logits for sequence in ids])
    for attention in (layer_attention, attention_by_pieces):
        together = run_batch(model, MappingTensors(views), ids, attention=attention).logits
        torch.testing.assert_close(together.reshape(alone.shape), alone, rtol=1e-4, atol=1e-5)


def test_every_parameter_learns(toy: tuple[Any, ...]) -> None:
    model, parameters, vocabulary, _ = toy
    learnt = {name: tensor.clone() for name, tensor in parameters.items()}
    trainer = Trainer(TOY, model, learnt, torch.tensor(vocabulary.encode([TEXT] * 4)))
    trainer.train(4, 1e-2, 1, as_stored=True, report=lambda step, loss: None)
    # with the first layer there is nothing to mix yet
    unused = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert {name for name in learnt if torch.equal(learnt[name], parameters[name])} == unused
    n_heads = model.kda.n_heads
    assert all(not learnt[name][n_heads:].any() for name in learnt if name.endswith("A_log"))


def test_routers_are_balanced_by_their_bias_alone(toy: tuple[Any, ...]) -> None:
    model, parameters, vocabulary, _ = toy
    learnt = {name: tensor.clone() for name, tensor in parameters.items()}
    trainer = Trainer(TOY, model, learnt, torch.tensor(vocabulary.encode([TEXT] * 4)))
    chosen = torch.tensor([[0, 1], [0, 2], [0, 3]])  # of six experts: the first too often, the last two never
    trainer._balance([dict.fromkeys(model.moe_layers, chosen)])
    bias = learnt[f"model.layers.1.block_sparse_moe.{ROUTER_BIAS}"]
    assert bias[0] < bias[1] == bias[2] == bias[3]
    assert bias[4] == bias[5] > bias[0]
    assert bias.sum().abs() < 1e-6


def test_rounding_gives_what_is_packed() -> None:
    random = np.random.default_rng(5)
    weights = (random.standard_normal((64, 96)) * np.exp(2 * random.standard_normal((64, 1)))).astype(np.float32)
    weights[0, :32] = 0
    weights[1, :8] = [1, 0.5, 0.25, 0.125, 7.9, -7.9, 5, -2.5]  # ties and saturation
    found = mxfp4_values(torch.from_numpy(weights)).numpy()
    np.testing.assert_array_equal(found, unpack_mxfp4(*pack_mxfp4(weights)))


def test_gradients_pass_through_rounding(toy: tuple[Any, ...]) -> None:
    _, parameters, _, _ = toy
    for name, parameter in parameters.items():
        leaf = parameter.detach().clone().requires_grad_()
        stored = rounded({name: leaf})[name]
        assert torch.equal(torch.autograd.grad(stored.sum(), leaf)[0], torch.ones_like(leaf)), name


def test_the_vocabulary_loads_in_tiktoken_and_joins_what_is_frequent() -> None:
    vocabulary = Vocabulary(learn_tokens([TEXT], 270), 64)
    assert vocabulary.size == 334
    assert b" cat" in vocabulary.tokens or b" the" in vocabulary.tokens
    ranks = {token: rank for rank, token in enumerate(vocabulary.tokens)}
    assert len(ranks) == 270
    encoding = tiktoken.Encoding("test", pat_str=PRE_TOKENISER, mergeable_ranks=ranks, special_tokens={})
    ids = encoding.encode_ordinary(TEXT)
    assert vocabulary.tokenizer.encode(TEXT) == ids
    assert len(ids) < 0.6 * len(TEXT)
    assert vocabulary.encode([TEXT, "mat"])[len(ids)] == vocabulary.end_id
    assert vocabulary.tokenizer.decode([vocabulary.end_id]) == "<|end_of_msg|>"


def test_continuing_stops_at_the_end_token_and_throws_the_same_dice_for_all() -> None:
    vocabulary = Vocabulary(learn_tokens([TEXT], 270), 64)
    script = [*vocabulary.tokenizer.encode("cats and mats"), vocabulary.end_id]

    def predict(ids: list[int]) -> NDArray[np.float32]:
        logits = np.zeros(vocabulary.size, dtype=np.float32)
        logits[script[len(ids) - 3]] = 1.0
        return logits

    ask = partial(continued, vocabulary.tokenizer, "123", predict=predict, end_id=vocabulary.end_id)
    assert len(vocabulary.tokenizer.encode("123")) == 3
    assert ask(n_tokens=100, temperature=0.0) == "cats and mats"
    assert ask(n_tokens=2, temperature=0.0) == vocabulary.tokenizer.decode(script[:2])
    assert ask(n_tokens=9, temperature=5.0) == ask(n_tokens=9, temperature=5.0) != ask(n_tokens=9, temperature=0.0)


def test_too_small_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have only 257 of 300 tokens"):
        learn_tokens(["ab"], 300)


def test_no_paragraph_is_in_both_texts() -> None:
    def paragraphs(texts: list[str]) -> set[str]:
        return {" ".join(part.split()) for text in texts for part in text.split("\n\n")}

    texts = split_topics()
    shared = paragraphs(texts.training) & paragraphs(texts.held_out)
    assert all(len(paragraph) < SHORT_PARAGRAPH for paragraph in shared)
    assert 0.05 < sum(map(len, texts.held_out)) / sum(map(len, texts.training)) < 0.1


def test_a_few_steps_lower_the_loss(tmp_path: Path) -> None:
    texts = split_topics()
    figures = train(tmp_path, Texts(texts.training[:6], [texts.held_out[1][:1500]]), TOY, keep=tmp_path / "kept")
    assert figures["training_loss"]["last"] < figures["training_loss"]["first"] - 0.1
    losses = figures["held_out_loss"]
    # other windows, the same weights
    assert losses["checkpoint"] == pytest.approx(losses["rounded_and_trained"], abs=0.3)
    assert len(list((tmp_path / "checkpoint").glob("model-0000?-of-000007.safetensors"))) == 7
