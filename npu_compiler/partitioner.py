"""The public types and the function of partitioning."""

from .partitioning.partitioner import partition
from .partitioning.plan import Partition, PartitionPlan, TransferOp

__all__ = ["Partition", "PartitionPlan", "TransferOp", "partition"]
