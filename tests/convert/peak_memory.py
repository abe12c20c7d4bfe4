"""How much memory torch operations take, without a GPU to ask."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensors that lived at once since it began, temporaries between operations included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
        for tensor in filter(is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known | given:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self.forget, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def forget(self, pointer: int, n_bytes: int) -> None:
        self.known.discard(pointer)
        self.now -= n_bytes


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
