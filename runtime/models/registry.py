"""Which module runs which container."""

from __future__ import annotations

from container.reader import ContainerReader
from runtime.models.base import Model
from runtime.models.kimi import KimiModel
from runtime.store import ExpertStore
from runtime.trunk import Trunk


def load_model(reader: ContainerReader, trunk: Trunk, store: ExpertStore) -> Model:
    """Load the model of an opened container. Raises FormatError when its tensors do not fit its config."""
    # container.model describes the Kimi family alone and refuses every other config on opening
    return KimiModel.load(reader, trunk, store)
