"""Fixtures: heads made once per run, and the precision of ball arithmetic. Torch is loaded by the tests that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flint import ctx


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name → folder of the saved head."""
    from saved_heads import HEADS

    import partita as pa

    place, made = tmp_path_factory.mktemp("heads"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            function, domain, tolerance, options = HEADS[name]
            compiled = pa.compile(function, domain(), tolerance=tolerance, **options)
            made[name] = compiled.save(place / name.replace(" ", "-"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name → folder of the saved network of heads."""
    from saved_networks import NETWORKS

    place, made = tmp_path_factory.mktemp("networks"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = NETWORKS[name]().save(place / name.replace(" ", "-"))
        return made[name]

    return get


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """Every test starts at 64 bits and leaves what it found."""
    before, ctx.prec = ctx.prec, 64
    yield
    ctx.prec = before
