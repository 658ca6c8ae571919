"""Domains, partitions, grids and covers, and bounds on the leakage of a softmax over centers."""

from partita.geometry.cells import polygons
from partita.geometry.covers import Cover, farthest_point_cover
from partita.geometry.domains import Box, PointCloud, product
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import (
    AxisGeometry,
    dropped_mass,
    leakage,
    moment_bounds,
    soft_maximum_gap,
    temperature_for_leakage,
)
from partita.geometry.partitions import MaxAffine, Partition, PowerDiagram

__all__ = [
    "AxisGeometry",
    "Box",
    "Cover",
    "MaxAffine",
    "Partition",
    "PointCloud",
    "PowerDiagram",
    "ProductGrid",
    "dropped_mass",
    "farthest_point_cover",
    "leakage",
    "moment_bounds",
    "polygons",
    "product",
    "soft_maximum_gap",
    "temperature_for_leakage",
]
