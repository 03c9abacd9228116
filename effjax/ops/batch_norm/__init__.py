"""Synchronized batch norm."""

from .statistics import BatchStats as BatchStats
from .sync import batch_norm_inference as batch_norm_inference
from .sync import sync_batch_norm as sync_batch_norm
