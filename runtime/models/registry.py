"""Which module runs which container."""

from __future__ import annotations

from container.reader import ContainerReader
from runtime.compute.team import Team
from runtime.disk.store import ExpertStore
from runtime.models.base import Model
from runtime.models.kimi import KimiModel, tensor_needs
from runtime.trunk import Trunk


def require_tensors(reader: ContainerReader, trunk: Trunk) -> None:
    """Raises FormatError, before anything is read, when the trunk lacks tensors that the container's model needs."""
    trunk.require(tensor_needs(reader.model))


def load_model(reader: ContainerReader, trunk: Trunk, store: ExpertStore, team: Team, *, lookahead: int) -> Model:
    """Make the model of an opened container, whose trunk has all tensors. Raises FormatError, IntegrityError.

    `lookahead` is how many experts of the next layer are asked for early while one token is taken.
    """
    # container.model describes the Kimi family alone and refuses every other config on opening
    return KimiModel.load(reader, trunk, store, team, lookahead=lookahead)
