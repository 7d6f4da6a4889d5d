"""Imports go in one direction, infer, models, kernels, and load nothing heavy at once."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import places
import pytest

ROOT = places.ROOT
HEAVY = {"numpy", "wgpu", "tokenizers", "huggingface_hub", "jinja2", "safetensors", "cffi"}
# Packages of the extras `images`, `structured` and `chat`, and pydantic, which a program may have:
# the modules that import each.
EXTRA = {
    "PIL": ("infer.images.opening",),
    "llguidance": ("infer.engine.constraint",),
    "prompt_toolkit": ("infer.cli.lines",),
    "pydantic": ("infer.text.functions", "infer.typed"),
}

# Folder -> what its modules may import of this project.
ALLOWED = {
    "kernels": ("infer.kernels",),
    "models": ("infer.kernels", "infer.models"),
    "infer": ("infer",),
}
THIRD_PARTY = {
    "kernels": {"numpy", "wgpu", "wgpudawn"},
    "models": {"numpy", "safetensors"},
    "infer": HEAVY | {"typer"},
}
SERVER = {
    "starlette",
    "uvicorn",
    "httptools",
    "msgspec",
    "prometheus_client",
    "ray",
}  # what the extras `serve` and `ray` install


def modules(folder: str) -> list[Path]:
    found = sorted(
        path
        for path in (ROOT / folder).rglob("*.py")
        if path.parts[len(ROOT.parts) :][:2] not in (("infer", "kernels"), ("infer", "models"))
    )
    assert found
    return found


@cache
def imported(path: Path) -> Sequence[str]:
    """The dotted names that a module imports anywhere, in functions too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def dotted(path: Path) -> str:
    """The name that a module is imported by."""
    *folders, name = path.relative_to(ROOT).with_suffix("").parts
    names = folders if name == "__init__" else [*folders, name]
    return ".".join(names if names[0] == "infer" else ["infer", *names])


def project_imports() -> dict[str, set[str]]:
    """Each module of this project, and those of this project that it imports: not even functions,
    and type checkers, may see a circle in them."""
    paths = {dotted(path): path for folder in ALLOWED for path in modules(folder)}
    graph = {module: set[str]() for module in paths}
    for module, path in paths.items():
        for name in imported(path):
            found = name if name in paths else name.rpartition(".")[0]
            if found in paths:
                graph[module].add(found)
    assert len(graph["infer.loading"]) > 10
    return graph


def check_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_imports_go_in_a_circle() -> None:
    check_no_circle(project_imports())


def test_no_packages_of_kernels_go_in_a_circle() -> None:
    """The layers, from the GPU to the checks: none imports what stands on it."""
    folders = sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py"))
    assert {"gpu", "ops", "checks"} < {*folders}
    packages = {f"infer.kernels.{folder}": set[str]() for folder in folders}

    def package_of(module: str) -> str:
        return ".".join(module.split(".")[:3])

    for module, found in project_imports().items():
        own = package_of(module)
        if own in packages:
            packages[own] |= {package_of(name) for name in found} & packages.keys() - {own}
    check_no_circle(packages)


@pytest.mark.parametrize(
    ("top", "importers"),
    [
        ("infer.cli", ("infer.cli", "infer.__main__")),
        ("infer.bench", ("infer.bench", "infer.cli")),
        ("infer.server", ("infer.server", "infer.cli.serve", "infer.cli.openai_batch")),
    ],
)
def test_the_api_does_without_the_command_line(top: str, importers: tuple[str, ...]) -> None:
    for path in modules("infer"):
        for name in imported(path):
            if f"{name}.".startswith(f"{top}."):
                assert dotted(path).startswith(importers), f"{path} imports {name}"


def test_webgpu_libraries_are_called_in_one_package() -> None:
    """Their C functions, and what their Python packages keep to themselves."""
    native = ROOT / "kernels" / "gpu" / "native"
    own = re.compile(r"\bimport .*\b(ffi|lib)\b|\._internal\b|\b(ffi|lib|libf)\.\w")
    for path in [path for folder in ALLOWED for path in modules(folder)]:
        if path.parent == native:
            continue
        assert not own.search(path.read_text(encoding="utf-8")), path
        for name in imported(path):
            assert not f"{name}.".startswith(("wgpu.backends.", "wgpudawn.")), f"{path}: {name}"


def test_what_runs_a_model_needs_no_checks() -> None:
    """The cases of kernels, their references and the kernels by hand are for tests and for
    `infer devices --check`; infer.kernels offers them, and imports them when they are asked for."""

    offered_by = ("infer.kernels", "infer.cli.report")
    checks = "infer.kernels.checks"
    for path in [path for folder in ALLOWED for path in modules(folder)]:
        if dotted(path) not in offered_by and not dotted(path).startswith(checks):
            for name in imported(path):
                assert not name.startswith(checks), f"{path} imports {name}"


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder: str) -> None:
    for path in modules(folder):
        for name in imported(path):
            top = name.split(".")[0]
            if top == "infer":
                allowed = any(f"{name}.".startswith(f"{part}.") for part in ALLOWED[folder])
                assert allowed, f"{path} imports {name}"
            else:
                offered = THIRD_PARTY[folder]
                if dotted(path).startswith("infer.server."):
                    offered = offered | SERVER
                if dotted(path) in EXTRA.get(top, ()):
                    offered = offered | {top}
                known = top in sys.stdlib_module_names or top in offered
                assert known, f"{path} imports {name}"


def loaded_by(statement: str) -> set[str]:
    """The packages that a process of its own has loaded then."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {name.split(".")[0] for name in json.loads(output)}


@pytest.mark.parametrize(
    "statement", ["import infer", "import infer.kernels", "import infer.cli.app"]
)
def test_importing_is_light(statement: str) -> None:
    loaded = loaded_by(statement)
    assert "infer" in loaded
    assert not loaded & (HEAVY | SERVER | EXTRA.keys())


def test_a_local_model_is_loaded_without_what_only_others_need() -> None:
    assert not loaded_by("import infer.loading") & {"jinja2", "huggingface_hub", "typer"}
    assert not loaded_by("import infer.loading, infer.cli.report") & {"jinja2", "huggingface_hub"}


@pytest.mark.parametrize("name", ["infer", "infer.kernels"])
def test_public_names_are_those_in_all(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__, key=lambda word: (not word.isupper(), word))
    for public in module.__all__:
        assert getattr(module, public) is not None
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


@pytest.mark.parametrize("name", ["infer", "infer.kernels"])
def test_lazy_names_are_typed(name: str) -> None:
    """The names that a type checker sees, under TYPE_CHECKING, are those at run time."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infer")
        for alias in node.names
    }
    assert set(seen) == set(module.__all__)
    for public, origin in seen.items():
        source, _, attribute = origin.rpartition(".")
        parent = importlib.import_module(source)
        assert getattr(module, public) is getattr(parent, attribute)
