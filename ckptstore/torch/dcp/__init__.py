"""``torch.distributed.checkpoint`` (DCP) on top of a store: a StorageWriter and a StorageReader."""

from ckptstore.torch.dcp.reader import StoreReader
from ckptstore.torch.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter"]
