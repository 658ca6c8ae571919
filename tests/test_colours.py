"""The colours of figures, documentation and studio, for colour-blind readers and in grey: measured, with the numbers stated.

Colour blindness is simulated by the matrices of Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB; distances
between colours are CIEDE2000 (Sharma, Wu and Dalal 2005), lightness is CIE L*.
"""

from __future__ import annotations

import ast
import json
import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.spatial

from partita.errors import UnsupportedError
from partita.plots.colours import (
    DARK,
    LIGHT,
    MAPS,
    TINTS,
    Theme,
    colour_at,
    colour_map,
    palette,
    print_palette,
    tint_numbers,
)

ROOT = Path(__file__).parent.parent
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ.sum(axis=1)


def srgb(colour: str) -> np.ndarray:
    assert re.fullmatch("#[0-9a-f]{6}", colour), colour
    return np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255


def linear(colours: np.ndarray) -> np.ndarray:
    return np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)


def seen(colours: np.ndarray, vision: str) -> np.ndarray:
    """CIE Lab of sRGB colours `(n, 3)` as a reader with this vision sees them."""
    ratio = np.clip(linear(colours) @ np.asarray(VISIONS[vision]).T, 0, 1) @ TO_XYZ.T / WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000 of two Lab colours."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1 + 0.5 * (1 - np.sqrt(chroma**7 / (chroma**7 + 25.0**7)))
    c1, c2 = np.hypot(stretch * a1, b1), np.hypot(stretch * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    across = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    middle = h1 + h2 if c1 * c2 == 0 else h1 + turn / 2
    light, c = (l1 + l2) / 2, (c1 + c2) / 2
    t = 1 - 0.17 * np.cos(np.radians(middle - 30)) + 0.24 * np.cos(np.radians(2 * middle))
    t += 0.32 * np.cos(np.radians(3 * middle + 6)) - 0.2 * np.cos(np.radians(4 * middle - 63))
    parts = (
        (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)),
        (c2 - c1) / (1 + 0.045 * c),
        across / (1 + 0.015 * c * t),
    )
    bent = 60 * np.exp(-(((middle % 360 - 275) / 25) ** 2))
    twist = -np.sin(np.radians(bent)) * 2 * np.sqrt(c**7 / (c**7 + 25.0**7))
    return float(np.sqrt(sum(p * p for p in parts) + twist * parts[1] * parts[2]))


def contrast(one: str, other: str) -> float:
    """WCAG 2: 1 for equal colours, 21 for black on white."""
    low, high = sorted(float(linear(srgb(c)) @ TO_XYZ[1]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def closest(colours: tuple[str, ...], *, neighbours: bool) -> float:
    """The smallest distance over all visions: of neighbours in the list, or of any two."""
    found = []
    for vision in VISIONS:
        labs = seen(np.array([srgb(c) for c in colours]), vision)
        found += [distance(a, b) for a, b in (pairwise(labs) if neighbours else combinations(labs, 2))]
    return min(found)


def rises(name: str, vision: str) -> np.ndarray:
    """Steps of lightness along a map, at 257 places."""
    places = np.array([colour_at(name, t) for t in np.linspace(0, 1, 257)])
    return np.diff(seen(places, vision)[:, 0])


def test_the_ruler() -> None:
    """Four pairs of the published test data for CIEDE2000."""
    published = [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ]
    for one, other, expected in published:
        assert distance(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert seen(np.ones((1, 3)), "normal")[0] == pytest.approx([100, 0, 0], abs=1e-3)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_series_and_tints_stay_apart_for_every_reader(theme: Theme) -> None:
    assert closest(theme.series, neighbours=True) >= 12
    assert closest(theme.series, neighbours=False) >= 8
    assert closest(theme.tints, neighbours=False) >= 9
    grey = sorted(seen(np.array([srgb(c) for c in theme.tints]), "normal")[:, 0])
    assert min(b - a for a, b in pairwise(grey)) >= 2.5  # L*, in grey print


def test_bad_colours_are_noticed() -> None:
    assert closest(("#ff0000", "#00a000"), neighbours=True) < 6  # red and green
    assert closest(("#ff0000", "#0000ff"), neighbours=True) > 30


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_can_be_read(theme: Theme) -> None:
    for ground in (theme.background, theme.panel):
        assert contrast(theme.ink, ground) >= 12
        assert contrast(theme.muted, ground) >= 4.5
        assert contrast(theme.accent, ground) >= 4.5
    assert all(contrast(theme.ink, tint) >= 4.5 for tint in theme.tints)  # borders and labels on cells
    # pale ones of the published palette are below 3 on white, and come with markers and dashes
    assert sum(contrast(colour, theme.background) >= 2.9 for colour in theme.series) >= 6
    assert min(contrast(colour, theme.background) for colour in theme.series) >= 2


@pytest.mark.parametrize("vision", VISIONS)
def test_maps_are_monotone_in_lightness(vision: str) -> None:
    assert (rises("value", vision) > 0.1).all()
    assert (rises("error", vision) < -0.1).all() and (rises("weight", vision) < -0.1).all()
    signed = rises("signed", vision)
    assert (signed[:128] > 0.1).all() and (signed[128:] < -0.1).all()
    for share in (0.1, 0.3, 0.5):  # the two signs of one size
        below, above = seen(np.array([colour_at("signed", 0.5 - share), colour_at("signed", 0.5 + share)]), vision)
        assert distance(below, above) >= 25


def test_a_rainbow_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.plots.colours.MAPS", {"value": ("#0000ff", "#00ff00", "#ffff00", "#ff0000")})
    assert not (rises("value", "normal") > 0.1).all()


def test_matplotlib_draws_the_same_maps() -> None:
    pytest.importorskip("matplotlib")
    for name in MAPS:
        drawn = np.array([colour_map(name)(t)[:3] for t in np.linspace(0, 1, 33)])
        assert np.abs(drawn - [colour_at(name, t) for t in np.linspace(0, 1, 33)]).max() < 0.01
    with pytest.raises(UnsupportedError, match=r"rainbow.*value, signed, error, weight"):
        colour_map("rainbow")
    assert colour_at("error", -1.0) == colour_at("error", 0.0) == tuple(srgb(MAPS["error"][0]))


def test_neighbouring_cells_get_different_tints() -> None:
    rng = np.random.default_rng(0)
    triangles = scipy.spatial.Delaunay(rng.uniform(size=(400, 2))).simplices
    touching: list[set[int]] = [set() for _ in range(400)]
    for a, b, c in triangles.tolist():
        touching[a] |= {b, c}
        touching[b] |= {a, c}
        touching[c] |= {a, b}
    tints = tint_numbers(touching)
    assert max(tints) < len(TINTS) and all(tints[a] != tints[b] for a in range(400) for b in touching[a])
    numbered = [k % len(TINTS) for k in range(400)]  # tints by number alone: some neighbours look the same
    assert any(numbered[a] == numbered[b] for a in range(400) for b in touching[a])
    assert tint_numbers([]) == []
    assert tint_numbers([[], []]) == [0, 0]


def test_the_numbers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_palette()
    assert json.loads(capsys.readouterr().out) == palette()
    assert palette()["light"]["series"] == list(LIGHT.series) and palette()["maps"]["value"] == list(MAPS["value"])


def test_no_other_file_names_a_colour() -> None:
    """Every figure takes its colours from the table: no #rrggbb and no map of matplotlib elsewhere in the library."""
    found = []
    for path in sorted((ROOT / "partita").rglob("*.py")):
        if path.name != "colours.py":
            strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            found += [(path.name, s) for s in strings if isinstance(s, str) and _names_a_colour(s)]
    assert found == []
    assert _names_a_colour("#1f2933") and _names_a_colour("viridis") and not _names_a_colour("value")


def _names_a_colour(text: str) -> bool:
    maps = {"cividis", "viridis", "magma", "inferno", "plasma", "Greys", "RdBu", "coolwarm"}
    return text in maps or re.search(r"#[0-9a-fA-F]{6}\b", text) is not None
