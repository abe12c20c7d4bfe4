"""One torch device as the encoders of a process share it: turns on its streams, copies to it, and what it lacks."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from container.progress import size
from convert.device import STREAMS, TORCH_CPU, device_memory


class Device:
    """A device with `STREAMS` streams, each used by one thread at a time. `device_named` keeps one for the process."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device("cpu" if name == TORCH_CPU else name)
        self.is_cuda = self.torch.type == "cuda"
        self._streams: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(STREAMS):
            self._streams.put(self._stream())

    def _stream(self) -> Any:
        return torch.cuda.Stream(self.torch) if self.is_cuda else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a free stream; what the block asks of the device runs in it. Raises MemoryError.

        The block must fetch its results before it ends, so that nothing of it is still running then.
        """
        stream = self._streams.get()
        try:
            with torch.cuda.stream(stream), torch.inference_mode():  # no stream: does nothing
                yield
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{self.torch}: {error}") from None
        finally:
            self._streams.put(stream)

    def put(self, values: npt.NDArray[Any]) -> Tensor:
        """The array's bytes on the device, u8 [bytes]; a GPU copies from pinned memory while its host goes on."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        staged = torch.empty(flat.size, dtype=torch.uint8, pin_memory=self.is_cuda)
        staged.numpy()[:] = flat
        return staged.to(self.torch, non_blocking=True)


@cache
def device_named(name: str) -> Device:
    """The process's device of this name."""
    return Device(name)


def device_problems(name: str, n_workers: int) -> list[str]:
    """What stands against `n_workers` processes on the device; [] when nothing does."""
    if name == TORCH_CPU:
        return []
    if not torch.cuda.is_available():
        return [
            f"--device {name}: torch {torch.__version__} finds no CUDA device; install torch with CUDA and the "
            "GPU's driver, or leave --device out"
        ]
    number, n_devices = torch.device(name).index or 0, torch.cuda.device_count()
    if number >= n_devices:
        return [f"--device {name}: there are {n_devices} CUDA devices, cuda:0 to cuda:{n_devices - 1}"]
    needed, free = n_workers * device_memory(), torch.cuda.mem_get_info(number)[0]
    if needed > free:
        return [
            f"memory of {name}: {n_workers} workers need {size(needed)}, {size(free)} free; use fewer --workers, "
            "or end what else uses the GPU"
        ]
    return []
