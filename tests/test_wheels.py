"""What people install: both wheels, in an environment that holds nothing else of this repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from studio_process import Running

ROOT = Path(__file__).parent.parent
PACKAGES = {"partita": ROOT / "partita", "partita_check": ROOT / "checker" / "partita_check"}


def run(command: list[object], cwd: Path) -> str:
    """The command's stdout, without the PYTHONPATH of this process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    answer = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=clean)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Both wheels, built without the network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES.values():
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], package.parent)
    return {name: next(folder.glob(f"{name}-*.whl")) for name in PACKAGES}


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The programs of an environment outside the repository with the two wheels; it sees the dependencies of this one."""
    place = tmp_path_factory.mktemp("elsewhere") / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", place], place.parent)
    binaries = place / ("Scripts" if os.name == "nt" else "bin")
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            binaries / "python",
            "install",
            "--no-deps",
            "--no-index",
            *wheels.values(),
        ],
        place.parent,
    )
    packages = next(place.rglob("partita/__init__.py")).parent.parent
    shared = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("".join(f"{p}\n" for p in shared))
    return binaries


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_every_file_of_its_package(wheels, name):
    package = PACKAGES[name]
    kinds = (".py", ".typed", ".html", ".js", ".css")
    files = {p.relative_to(package.parent).as_posix() for p in package.rglob("*") if p.suffix in kinds}
    pages = {"partita/studio/page/index.html", "partita/plots/page/model_page.html"}
    assert name != "partita" or pages <= files
    held = set(zipfile.ZipFile(wheels[name]).namelist())
    assert files <= held and not [f for f in held if not f.startswith((f"{name}/", f"{name}-"))]


def test_the_demo_runs_where_only_the_wheels_are_installed(installed, tmp_path):
    where = "import partita, partita_check; print(partita.__file__); print(partita_check.__file__)"
    places = run([installed / "python", "-c", where], tmp_path).split()
    assert all(Path(p).is_relative_to(installed.parent) for p in places), places
    shutil.copy(ROOT / "examples" / "demo.py", tmp_path)
    told = run([installed / "python", "demo.py", "--out", "out"], tmp_path)
    assert "proved" in told and (tmp_path / "out" / "cells.svg").exists()
    run([installed / "partita-check", "out/head", "--function", "sin(3*x0) + x0*cos(2*x1)"], tmp_path)
    assert run([installed / "partita", "--version"], tmp_path).strip()


def test_the_studio_runs_where_only_the_wheels_are_installed(installed, tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    (tmp_path / "json.py").write_text("raise ImportError('a file of the folder where the studio was started')")
    with Running([str(installed / "partita"), "studio", "--no-browser"], cwd=tmp_path, clean=True) as studio:
        page = studio.get(f"/?token={studio.token}")
        assert page.body == (ROOT / "partita" / "studio" / "page" / "index.html").read_bytes()
        for name in set(re.findall(rb'(?:src|href)="([\w.]+)"', page.body)):
            assert studio.get(f"/{name.decode()}").status == 200, name
        assert studio.post("/api/function", {"text": "x", "domain": "[0,1]"}).json["label"] == "x"
        assert studio.stop() == (0, "", "")


def test_a_missing_extra_names_a_command_that_pip_accepts(installed, wheels, tmp_path):
    code = (
        "import sys; sys.modules['sklearn'] = None\ntry: import partita.learn\nexcept ImportError as e: print(e.hint)"
    )
    told = run([installed / "python", "-c", code], tmp_path).strip()
    assert told == f'Run: pip install "{wheels["partita"]}[sklearn]"'
    wanted = shlex.split(told)[3:]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        installed / "python",
        "install",
        "--no-index",
        "--no-deps",
        "--dry-run",
    ]
    assert "already installed" in run([*pip, *wanted], tmp_path)  # extras of what is installed, not another package
