"""What is installed: its size, how long it takes to import, its stubs, and the lines of its guide."""

import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest

import foveal
from foveal import _foveal

FOLDER = pathlib.Path(foveal.__file__).parent
CHECKOUT = pathlib.Path(__file__).parents[2]


def test_version():
    declared = re.search(r'^version = "(.*)"', (CHECKOUT / "pyproject.toml").read_text(), re.M).group(1)
    assert foveal.__version__ == foveal.version() == declared
    try:
        assert importlib.metadata.version("foveal") == declared
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("foveal is not installed, but on the path")


def test_import_is_quick_and_brings_no_framework():
    """The processor's time and the best of some: a machine that is busy with something else must not fail this."""
    program = "import sys, time; t = time.process_time(); import foveal; print(time.process_time() - t, *sys.modules)"
    runs = [subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split() for _ in range(7)]
    assert not {"numpy", "torch", "jax", "cupy"} & set(runs[0])
    assert min(float(run[0]) for run in runs) < 0.05


def test_size():
    files = [file for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(os.path.getsize(file) for file in files) < 20 << 20  # The wheel, compressed, is measured by run.sh.


def stub():
    file = FOLDER / "_foveal.pyi"
    if not file.exists():
        pytest.skip("the stubs are made by the build of the wheel")
    return ast.parse(file.read_text())


def test_stubs_name_what_there_is():
    def members(body):
        return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

    tree = stub()
    assert {name for name in members(tree.body) if not name.startswith("_")} == {name for name in vars(_foveal) if not name.startswith("_")}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != "UnsupportedError":
            there = {name for name, value in vars(getattr(_foveal, node.name)).items() if not name.startswith("__")}
            assert {name for name in members(node.body) if not name.startswith("__")} == there, node.name


def test_everything_public_is_documented():
    for name in foveal.__all__:
        assert getattr(foveal, name).__doc__, name
    for name in ("attention", "varlen_attention", "paged_attention", "merge_states"):
        assert "num_heads, head_size" in getattr(foveal, name).__doc__


def blocks():
    return [block for page in ("python.md", "coming_from.md") for block in re.findall(r"```python\n(.*?)```", (CHECKOUT / "docs" / page).read_text(), re.S)]


@pytest.mark.parametrize("block", blocks())
def test_the_guides_lines_run(block):
    for name in ("torch", "transformers"):
        if f"import {name}" in block:
            pytest.importorskip(name)
    exec(compile(block, "guide", "exec"), {"__name__": "guide"})
