"""The relative error ‖w - w'‖ / ‖w‖ of what was written, summed up strip by strip in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RelativeError:
    """Squared error and squared norm so far."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def add(self, squared_error: float, squared_norm: float) -> None:
        """Take one more strip, or another sum, in."""
        self.squared_error += squared_error
        self.squared_norm += squared_norm

    @property
    def value(self) -> float:
        """The relative error; 0 where all weights are zero."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0
