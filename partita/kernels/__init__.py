"""Kernels: how the sums over the cells that matter are run fast, on each device."""
