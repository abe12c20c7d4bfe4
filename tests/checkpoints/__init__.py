"""Small checkpoints in the exact on-disk layout of the released models, built in code and seeded.

configs    config.json of Kimi K3 and Kimi-Linear in small numbers
inventory  every tensor a config implies: name, shape, dtype
mxfp4      packer and slow unpacker of the 4-bit float format
weights    seeded values for an inventory, and the float32 meaning of stored tensors
tokenizer  a small tiktoken rank file and its configuration
folder     a whole checkpoint folder on disk
slices     one layer with real expert shapes, streamed to disk
"""

from tests.checkpoints.configs import K3_DIMENSIONS, k3_config, kimi_linear_config
from tests.checkpoints.folder import write_checkpoint
from tests.checkpoints.inventory import TensorSpec, tensor_table
from tests.checkpoints.mxfp4 import pack_mxfp4, unpack_mxfp4
from tests.checkpoints.slices import hollow_checkpoint, real_shape_slice
from tests.checkpoints.weights import checkpoint_tensors, logical_tensor

__all__ = [
    "K3_DIMENSIONS",
    "TensorSpec",
    "checkpoint_tensors",
    "hollow_checkpoint",
    "k3_config",
    "kimi_linear_config",
    "logical_tensor",
    "pack_mxfp4",
    "real_shape_slice",
    "tensor_table",
    "unpack_mxfp4",
    "write_checkpoint",
]
