"""The source encodings of convert/encodings/ in torch, bit by bit the same, so that raw bytes can go to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from convert.encodings.mxfp4 import BLOCK, E2M1, E8M0, Mxfp4
from convert.encodings.plain import Plain
from convert.source import RawRows, SourceTensor
from convert.torch_device import Device

Decode = Callable[[Sequence[Tensor], Sequence[str], int], Tensor]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def decode(device: Device, source: SourceTensor, raw: RawRows) -> Tensor:
    """Raw rows → f32 [rows, cols] on the device. An encoding that is not in `DECODERS` is decoded on the processor."""
    cols = source.matrix[1]
    decoder = DECODERS.get(source.encoding.name)
    if decoder is None:
        return device.put(source.decode(raw)).view(torch.float32).view(-1, cols)
    return decoder([device.put(part) for part in raw], [part.dtype for part in source.parts], cols)


def _mxfp4(raw: Sequence[Tensor], dtypes: Sequence[str], cols: int) -> Tensor:
    packed, scales = raw
    values = torch.from_numpy(E2M1).to(packed.device)
    powers = torch.from_numpy(E8M0).to(packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1)
    decoded = values.index_select(0, nibbles.view(-1).to(torch.int32)).view(-1, BLOCK)
    return decoded.mul_(powers.index_select(0, scales.to(torch.int32))[:, None]).view(-1, cols)


def _plain(raw: Sequence[Tensor], dtypes: Sequence[str], cols: int) -> Tensor:
    (data,) = raw
    return data.view(DTYPES[dtypes[0]]).to(torch.float32).view(-1, cols)


DECODERS: Mapping[str, Decode] = {Mxfp4.name: _mxfp4, Plain.name: _plain}
