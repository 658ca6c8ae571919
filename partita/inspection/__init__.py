"""Attention heads of trained models, read back as the partitions they make."""
