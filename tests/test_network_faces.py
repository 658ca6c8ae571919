"""What a network of heads shows of itself: the report of the three choices, the budget in words, the picture of its graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import partita as pa
from partita.cli import app

SUM = "sin(3*x0) + sin(3*x1) + sin(3*x2) + exp(x3)"
BELL = "exp(-(x0^2 + x1^2 + x2^2 + x3^2))"
FOUR = pa.Box([-1] * 4, [1] * 4)


def black_box(z: np.ndarray) -> np.ndarray:
    return np.asarray(np.round(np.sin(3 * z[:, 0]), 4) + np.exp(z[:, 1]) + z[:, 2] ** 2 + z[:, 3])


@cache
def made(name: str) -> pa.Compiled:
    kinds: dict[str, Any] = {
        "sum": lambda: pa.compile(SUM, FOUR, tolerance=1e-3),
        "bell": lambda: pa.compile(BELL, FOUR, tolerance=1e-3),
        "ten": lambda: pa.compile(" + ".join(f"sin(3*x{i})" for i in range(10)), "[-1,1]^10", tolerance=1e-4),
        "head": lambda: pa.compile("sin(3*x)", "[-1,1]", tolerance=1e-3),
        "estimated": lambda: pa.compile(black_box, FOUR, tolerance=1e-2),
        "two outputs": lambda: pa.compile("sin(3*x0) + x1^3, exp(x1) + x0", "[-1,1]^2", tolerance=1e-3, method="heads"),
    }
    return kinds[name]()


def choices(text: str) -> dict[str, str]:
    """The table of the three choices: its rows without the arrow, by their first words."""
    table = text.split("\n\n")[1].splitlines()[1:]
    forms = ("one head", "several heads in one layer", "several layers")
    return {form: row for form, row in zip(forms, table) if row.lstrip("→ ").startswith(form)}


# the report


def test_the_report_shows_three_choices_and_says_why_in_one_sentence() -> None:
    c = made("sum")
    rows, why = choices(c.report()), c.report().split("\n\n")[-1]
    assert len(rows) == 3 and [r.startswith("→") for r in rows.values()] == [False, True, False]
    single = next(row for row in c.candidates if row.method == "fitted")
    assert f"{single.parameters:,}" in rows["one head"] and "proved" in rows["one head"]
    assert f"{c.num_parameters:,}" in rows["several heads in one layer"] and "≤" in rows["several heads in one layer"]
    assert "refused" in rows["several layers"] and "one layer holds all of f" in rows["several layers"]
    assert why.startswith("Several heads in one layer were chosen, because they store")
    assert f"{c.num_parameters:,}" in why and f"{single.parameters:,}" in why and "proved" in why
    assert why.count(".") == 1 and "\n" not in why


def test_layers_that_were_chosen_say_so() -> None:
    c = made("bell")
    rows = choices(c.report())
    assert rows["several layers"].startswith("→") and "not a sum" in rows["several heads in one layer"]
    assert c.report().split("\n\n")[-1].startswith("Several layers were chosen, because they store")


def test_networks_that_were_not_tried_are_said_to_be() -> None:
    text = made("head").report()
    rows = choices(text)
    assert rows["one head"].startswith("→") and "not tried" in rows["several layers"]
    assert "networks of heads are tried only if one head stores more than 2,000 numbers" in text.split("\n\n")[-1]


def test_one_head_that_was_not_looked_for_is_said_to_be() -> None:
    text = made("ten").report()
    assert "not tried" in choices(text)["one head"] and "one head was not looked for" in text.split("\n\n")[-1]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_heads": 1, "max_layers": 1}, "max_heads=1 and max_layers=1 ask for one head"),
        ({"max_layers": 3}, "Within max_layers=3 one head was chosen, because it stores"),
    ],
)
def test_limits_that_were_given_are_named(limits: dict[str, int], said: str) -> None:
    text = pa.compile("sin(3*x)*y + x*y", "[-1,1]^2", tolerance=1e-3, **limits).report()
    assert said in text.split("\n\n")[-1]


def test_a_limit_that_stands_in_the_way_is_a_reason() -> None:
    found = pa.compile("sin(3*x0) + exp(x1) + x1^3", "[-1,1]^2", tolerance=1e-2, max_heads=1)
    assert "needs 2 heads in a layer; max_heads allows 1" in choices(found.report())["several heads in one layer"]


def test_a_method_that_was_asked_for_is_not_compared() -> None:
    text = pa.compile("sin(3*x)", "[-1,1]", tolerance=0.1, method="hard").report()
    assert text.split("\n\n")[1:] == ["method='hard' was asked for, and no other method was tried."]


def test_estimates_are_called_so_in_the_choice() -> None:
    text = made("estimated").report()
    assert "estimated" in choices(text)["several heads in one layer"] and "both errors are estimated" in text


def test_plans_and_the_command_line_tell_the_same_choice() -> None:
    found = CliRunner().invoke(app, ["plan", BELL, "--domain", "[-1,1]^4", "--tolerance", "1e-3"])
    assert found.exit_code == 0, found.output
    assert (
        "Several layers were chosen" in found.output.replace("\n", " ") and "several heads in one layer" in found.output
    )
    planned = pa.plan(BELL, FOUR, tolerance=1e-3)
    chosen = [row for row in planned.to_json()["candidates"] if row["because"]]
    assert len(chosen) == 1 and chosen[0]["form"] == "several layers" and chosen[0]["status"] == "found"
    assert chosen[0]["because"] in planned._repr_html_() and chosen[0]["because"] in made("bell")._repr_html_()
