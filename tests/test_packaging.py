# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The two wheels: what they hold, and that they work outside the tree.

They are built, installed into an empty environment and run from another folder, with
triton and vllm made impossible to import. What they depend on is not installed again:
the environment's path ends with the site-packages of the one that runs the tests, whose
editable installs do not count there because .pth files are only read in the first.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from sparkgap.version import __version__

MOST_DEMO_BYTES = 32 * 10**6
# None in sys.modules makes an import fail as if the package were absent.
WITHOUT = "import sys; sys.modules.update(triton=None, vllm=None)\n"


@pytest.fixture(scope="module")
def wheels(root, tmp_path_factory) -> dict[str, Path]:
    """Distribution → its wheel, built from the tree."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    build += ["--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(root), str(root / "models")], check=True)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory) -> Path:
    """The interpreter of an environment that holds the two wheels."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    inside = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    install = [sys.executable, "-m", "pip", "--python", str(inside), "install"]
    install += ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, *map(str, wheels.values())], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return inside


def names(wheel: Path) -> dict[str, int]:
    """File → size."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def run(python: Path, folder: Path, code: str, *arguments: str) -> str:
    """What `code` prints when run in `folder`; its errors on failure."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-c", WITHOUT + code, *arguments],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(python: Path, folder: Path, *arguments: str) -> str:
    return run(python, folder, "from sparkgap.cli import main; main()", *arguments)


def test_versions_are_one(root, wheels):
    demo = tomllib.loads((root / "models" / "pyproject.toml").read_text())
    assert demo["project"]["version"] == __version__
    for distribution, wheel in wheels.items():
        assert wheel.name.startswith(f"{distribution}-{__version__}-py3-none-any")


def test_both_are_there(wheels):
    assert set(wheels) == {"sparkgap", "sparkgap_demo"}


def test_what_sparkgap_holds(root, wheels):
    held = names(wheels["sparkgap"])
    info = f"sparkgap-{__version__}.dist-info"
    source = root / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in held if not name.startswith(info)} == wanted
    assert "sparkgap/py.typed" in held
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(held)


def test_what_the_demo_holds(root, wheels):
    held = names(wheels["sparkgap_demo"])
    assert sum(held.values()) <= MOST_DEMO_BYTES
    code = {name for name in held if name.endswith(".py")}
    assert code == {"sparkgap_demo/__init__.py"}
    folder = root / "models" / "sparkgap_demo"
    for checkpoint in (path for path in folder.iterdir() if path.is_dir()):
        if checkpoint.name == "__pycache__":
            continue
        files = ("config.json", "model.safetensors", "training.json", "README.md")
        inside = f"sparkgap_demo/{checkpoint.name}"
        assert {f"{inside}/{name}" for name in files} <= set(held)


def test_the_installed_package_is_the_wheel(python, tmp_path):
    where = run(
        python, tmp_path, "import sparkgap, sparkgap_demo; print(sparkgap.__file__)"
    )
    assert Path(where.strip()).is_relative_to(python.parent.parent)


def test_inspect_runs_outside_the_tree(python, tmp_path):
    found = json.loads(command(python, tmp_path, "inspect", "kimi-k3", "--json"))
    assert found["parameters"] == 3_562_312_961


def test_doctor_runs_without_triton(python, tmp_path):
    assert json.loads(command(python, tmp_path, "doctor", "--json"))


@pytest.mark.demo
def test_generate_runs_outside_the_tree(python, tmp_path):
    found = json.loads(
        command(
            python,
            tmp_path,
            "generate",
            "Name three colours.",
            "--max-new-tokens=12",
            "--json",
        )
    )
    assert found["text"]
    assert found["rounds"] < 12  # some drafts were kept: the shipped drafter was found
