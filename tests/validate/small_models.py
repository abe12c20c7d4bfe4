"""Small seeded models as the reference takes them, and how results are compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from container.model import ModelConfig, canonical_config
from tests.checkpoints import checkpoint_tensors, logical_tensor


def small_model(config: Mapping[str, Any], *, seed: int = 0) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The model of a config.json and its seeded tensors in f32, named without prefix."""
    stored = checkpoint_tensors(config, seed=seed)
    names = {name.removesuffix("_packed") for name in stored if not name.endswith(".weight_scale")}
    tensors = {name: torch.from_numpy(logical_tensor(stored, name)) for name in names}
    return (
        ModelConfig.from_config(canonical_config(config)),
        {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()},
    )


def prompt(n_tokens: int, vocab_size: int, *, seed: int = 1) -> list[int]:
    """Random token ids, the last of the vocabulary among them."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, n_tokens).tolist()
    return [*ids[:-1], vocab_size - 1]


def relative_errors(found: Any, expected: Any) -> tuple[float, float]:
    """max|a - b| / max|b| and ‖a - b‖ / ‖b‖, in float64."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (found, expected))
    assert a.shape == b.shape
    return (
        float(np.abs(a - b).max() / np.abs(b).max()),
        float(np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel())),
    )


def fla_module(*path: str) -> ModuleType:
    """One plain-torch file of fla, loaded by itself: importing the package needs a GPU compiler."""
    package = PathFinder.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations
    file = Path(next(iter(package.submodule_search_locations))).joinpath(*path)
    spec = importlib.util.spec_from_file_location("fla_" + "_".join(path).removesuffix(".py"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
