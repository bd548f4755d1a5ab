"""The public types and the function of partitioning."""

from .partitioning.partitioner import Partition, PartitionPlan, TransferOp, partition

__all__ = ["Partition", "PartitionPlan", "TransferOp", "partition"]
