"""The encodings a checkpoint may use, one file each; a new one is added to `ENCODINGS` and nowhere else."""

from convert.encodings.base import Encoding
from convert.encodings.mxfp4 import Mxfp4
from convert.encodings.plain import Plain

ENCODINGS: tuple[Encoding, ...] = (Plain(), Mxfp4())
