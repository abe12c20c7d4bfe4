"""The house rules that a machine can check: who imports whom, who talks to the process, and what files are called."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("container", "download", "convert", "runtime", "validate")

# longest matching prefix of a module's path → packages of ours that it may import beside its own
SIBLINGS: dict[str, set[str]] = {
    "container": set(),
    "download": {"container"},
    "convert": {"container", "download"},
    "runtime": {"container"},
    "validate": {"container", "runtime"},
    "validate/reference": {"container"},
}
# third-party package → beginnings of the paths where it may be imported; packages that are not listed may be imported
# anywhere but in container
CONFINED: dict[str, set[str]] = {
    "torch": {"validate/", "convert/torch_"},
    "faiss": {"convert/"},
    "numba": {"convert/", "runtime/", "validate/"},
    "transformers": set(),
    "safetensors": {"validate/"},
    "huggingface_hub": {"download/"},
    "requests": {"download/"},
    "urllib3": {"download/"},
}
CONTAINER_THIRD_PARTY = {"numpy"}
EXCEPTIONS = {("container/progress.py", "tqdm")}  # the one place that all commands share
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

BY_NAME = {"importlib.import_module", "import_module", "__import__"}
PROCESS = {"sys.exit", "sys.argv", "os.environ", "os.getenv", "os.putenv", "os.environb"}
BUILTINS = {"print", "exit", "quit", "input", "breakpoint"}


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything a module imports: at any depth, relative, or by name through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, ".".join([*base, *filter(None, [node.module]), a.name])) for a in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            name = node.args[0] if node.args else None
            yield node.lineno, str(name.value) if isinstance(name, ast.Constant) else "a name made at run time"


def process_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every use of the process's own input, output, environment and exit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in PROCESS:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in {*BUILTINS, "SystemExit"}:
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom) and node.module in ("sys", "os"):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in names if name in PROCESS)


def violations(path: str, source: str) -> list[str]:
    """What is wrong with a module at `path` (relative to the root, with slashes)."""
    tree, parts = ast.parse(source), path.split("/")
    found = []
    for line, name in imports(tree, ".".join(parts[:-1])):
        problem = import_problem(path, name)
        if problem:
            found.append(f"{path}:{line}: {problem}")
    if parts[-1] != "__main__.py":
        found += [f"{path}:{line}: {name} outside __main__" for line, name in process_uses(tree)]
    return found


def import_problem(path: str, name: str) -> str | None:
    """Why the module at `path` may not import `name`, or None."""
    top, own = name.split(".")[0], path.split("/")[0]
    if top in sys.stdlib_module_names or (path, top) in EXCEPTIONS:
        return None
    if top == "a name made at run time":
        return "imports a name made at run time, which nobody can check"
    if top == "tests":
        return "imports tests"
    if top in PACKAGES:
        place = max((prefix for prefix in SIBLINGS if f"{path}/".startswith(f"{prefix}/")), key=len)
        if "/" in place and top == own:
            inside = f"{name}.".startswith(f"{place.replace('/', '.')}.") or name == own
            return None if inside else f"{place} imports {name}"
        return None if top == own or top in SIBLINGS[place] else f"{place} imports {name}"
    if own == "container" and top not in CONTAINER_THIRD_PARTY:
        return f"container imports {top}"
    if top in CONFINED and not path.startswith(tuple(CONFINED[top])):
        return f"{own} imports {top}"
    return None


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_the_modules_keep_the_rules():
    found = [
        problem
        for path in modules()
        for problem in violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


CAUGHT = [
    ("container/x.py", "import torch", "container imports torch"),
    ("container/x.py", "import tqdm", "container imports tqdm"),
    ("container/x.py", "from convert import plan", "container imports convert"),
    ("container/x.py", "def f():\n    import runtime.engine", "container imports runtime.engine"),
    ("download/x.py", "from convert.plan import Plan", "download imports convert.plan"),
    ("convert/x.py", "import runtime", "convert imports runtime"),
    ("convert/arch/x.py", "from validate.reference import model", "convert imports validate.reference"),
    ("convert/x.py", "import torch", "convert imports torch"),
    ("runtime/x.py", "import torch.nn as nn", "runtime imports torch"),
    ("runtime/models/x.py", "from torch import nn", "runtime imports torch"),
    ("runtime/x.py", "import convert", "runtime imports convert"),
    ("runtime/x.py", "import faiss", "runtime imports faiss"),
    ("validate/x.py", "import faiss", "validate imports faiss"),
    ("validate/x.py", "from convert.encodings import mxfp4", "validate imports convert"),
    ("validate/reference/x.py", "from runtime import engine", "validate/reference imports runtime"),
    ("validate/reference/x.py", "from validate import report", "validate/reference imports validate.report"),
    ("validate/reference/x.py", "from ..report import f", "validate/reference imports validate.report"),
    ("validate/x.py", "import importlib\nimportlib.import_module('convert.plan')", "validate imports convert.plan"),
    ("runtime/x.py", "import importlib\nimportlib.import_module('tor' + 'ch')", "a name made at run time"),
    ("runtime/x.py", "if TYPE_CHECKING:\n    from torch import Tensor", "runtime imports torch"),
    ("runtime/x.py", "from tests.checkpoints import k3_config", "imports tests"),
    ("runtime/x.py", "print(1)", "print outside __main__"),
    ("runtime/x.py", "f = print", "print outside __main__"),
    ("convert/x.py", "import sys\nsys.exit(1)", "sys.exit outside __main__"),
    ("convert/x.py", "raise SystemExit(1)", "SystemExit outside __main__"),
    ("convert/x.py", "from sys import argv", "sys.argv outside __main__"),
    ("convert/x.py", "import sys\nsys.argv[1:]", "sys.argv outside __main__"),
    ("convert/x.py", "import os\nos.environ['A'] = '1'", "os.environ outside __main__"),
    ("convert/x.py", "from os import environ", "os.environ outside __main__"),
    ("convert/pool.py", "import os\nos.getenv('A')", "os.getenv outside __main__"),
    ("container/x.py", "input()", "input outside __main__"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "source", "message"), CAUGHT, ids=lambda value: value if "/" in value else None)
def test_the_check_catches(path, source, message):
    # the first of them: `from a import b` is reported for `a` and for `a.b`
    assert message in "".join(violations(path, source)[:1])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("container/x.py", "import os, json\nimport numpy as np\nfrom container.errors import FormatError"),
        ("container/x.py", "import sys\nsys.byteorder\nos.fsync(1)"),
        ("convert/torch_x.py", "import torch"),
        ("convert/x.py", "import faiss, numba\nfrom container import x\nfrom download import a\nfrom . import plan"),
        ("convert/arch/x.py", "from convert.plan import Plan\nfrom ..plan import Plan"),
        ("runtime/x.py", "import numba\nfrom container.reader import ContainerReader"),
        ("validate/x.py", "import torch\nfrom runtime import engine\nfrom validate.reference import model"),
        ("validate/reference/x.py", "import torch\nfrom validate.reference.kda import f\nfrom .mla import g"),
        ("container/progress.py", "from tqdm import tqdm"),
        ("runtime/__main__.py", "import os, sys\nprint(os.environ)\nsys.exit(len(sys.argv))"),
    ],
)  # fmt: skip
def test_the_check_lets_pass(path, source):
    assert violations(path, source) == []


def test_every_package_says_it_is_one():
    folders = {path.parent for path in modules()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_wheel_holds_every_package():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == {path.relative_to(ROOT).parts[0] for path in modules()}


def test_names_say_what_a_module_is_for():
    everything = [*modules(), *(ROOT / "tests").rglob("*.py")]
    vague = [path for path in everything if VAGUE_NAMES & {path.stem, *path.relative_to(ROOT).parts}]
    assert vague == []
