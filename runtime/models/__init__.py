"""The forward pass, one module per architecture family; `load_model` chooses by what the container says."""

from runtime.models.base import Model, StepTrace
from runtime.models.recall import Recall
from runtime.models.registry import load_model, require_tensors

__all__ = ["Model", "Recall", "StepTrace", "load_model", "require_tensors"]
