"""The forward pass, one module per architecture family; `load_model` chooses by what the container says."""

from runtime.models.base import Model, StepTrace
from runtime.models.registry import load_model

__all__ = ["Model", "StepTrace", "load_model"]
