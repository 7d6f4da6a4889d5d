"""The package: from a clone, installed as editable, and as a wheel in a clean environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import places
import pytest
from marks import others_full

ROOT = places.ROOT
LINKED = ("infer/kernels", "infer/models")
# Packages, and their folders in a clone.
FOLDERS = {
    f"{link}{path.parent.as_posix().removeprefix(folder)}": path.parent.as_posix()
    for link, folder in zip(("infer", *LINKED), ("infer", "kernels", "models"), strict=True)
    for path in (found.relative_to(ROOT) for found in (ROOT / folder).rglob("__init__.py"))
    if not path.as_posix().startswith(LINKED)
}
STORY = "Once upon a time"


def packaged(*patterns: str) -> dict[str, Path]:
    """The files of the packages: their names in the wheel, and where they come from."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}": path
        for package, folder in FOLDERS.items()
        for pattern in patterns
        for path in (ROOT / folder).glob(pattern)
    }


WANTED = packaged(
    "*.py",
    "py.typed",
    "wgsl/*/*.wgsl",
    "demo/*.*",
    "demo/draft/*",
    "page/*.*",
    "page/vendor/*.*",
)


def run(*command: str | Path, cwd: Path = Path("/"), **variables: str) -> str:
    """Standard output of a command that knows nothing of this process."""
    mine = ("PYTHONPATH", "INFER_DEVICE", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_of_the_tree(folder: Path, links: str = "links") -> Path:
    """Copies the files of a clone, the links as links; or as "files", which git makes of them where
    it makes no links (Windows); or "gone"."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    names = [line.strip("/") for line in ignored]
    keep = shutil.ignore_patterns(".git", *names)
    shutil.copytree(ROOT, folder, symlinks=True, ignore=keep)
    for link in LINKED if links != "links" else ():
        (folder / link).unlink()
        if links == "files":
            (folder / link).write_text(f"../{FOLDERS[link]}")
    return folder


def test_there_are_kernels_and_a_model() -> None:
    """Or the lists below would prove nothing."""
    wgsl, python = (
        ("infer/kernels/wgsl/linear/matmul_vec.wgsl",),
        ("infer/cli/app.py", "infer/models/llama.py"),
    )
    assert {*wgsl, *python, "infer/py.typed", "infer/demo/model.safetensors"} <= WANTED.keys()


@others_full("links", ["links", "files", "gone"], ["links", "gone"])
def test_a_clone_runs_as_it_is(tmp_path: Path, links: str) -> None:
    tree = copy_of_the_tree(tmp_path / "tree", links)
    code = """if True:
        import infer.cli.app, infer.kernels.gpu.shader, infer.models.llama
        from infer.kernels.lowering import graph
        print(infer.__file__, graph.__name__, graph is infer.kernels.lowering.graph)
    """
    printed = run(sys.executable, "-c", code, PYTHONPATH=str(tree))
    assert printed == f"{tree}/infer/__init__.py infer.kernels.lowering.graph True\n"
    run(sys.executable, tree / "scripts" / "make_tables.py", "--check")


def test_links_lead_to_the_folders() -> None:
    for link in LINKED:
        place, target = ROOT / link, f"../{FOLDERS[link]}"
        assert target == (str(place.readlink()) if place.is_symlink() else place.read_text())


def test_version_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    stated = re.search(r'^version = "(.*)"$', project, re.M)
    assert stated is not None
    code = "import infer; print(infer.__version__)"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(ROOT)).strip() == stated[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it, here: the editable install
    is built in an environment of its own. The clone has no links, those that the scripts install
    have."""
    tree = copy_of_the_tree(tmp_path_factory.mktemp("build") / "tree", "gone")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("infer_wgpu-*-py3-none-any.whl")
    return wheel


def environment(folder: Path) -> Path:
    """The programs of a new virtual environment."""
    venv.create(folder)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def pip(programs: Path, *arguments: str | Path) -> None:
    """This environment's pip, for another that has none."""
    run(sys.executable, "-m", "pip", "--python", programs / "python", *arguments)


def install(programs: Path, *arguments: str | Path) -> None:
    pip(programs, "install", "--quiet", "--no-compile", *arguments)


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it asks for."""
    programs = environment(tmp_path_factory.mktemp("clean") / "environment")
    install(programs, wheel)
    return programs


@pytest.mark.full
@pytest.mark.packaging
def test_the_wheel_holds_infer_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == WANTED.keys()
        assert all(archive.read(name) == path.read_bytes() for name, path in WANTED.items())


@pytest.mark.full
@pytest.mark.packaging
def test_the_sdist_holds_what_the_wheel_is_made_of(built: Path) -> None:
    (sdist,) = built.glob("infer_wgpu-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for path in WANTED.values()}
    assert wanted | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.full
@pytest.mark.packaging
def test_the_wheel_runs_anywhere(clean: Path) -> None:
    text = run(clean / "infer", "run", "demo", "--prompt", STORY, "--max-tokens", "16")
    assert text.startswith(f"{STORY}, there was a ")
    where = run(clean / "python", "-c", "import infer.kernels; print(infer.kernels.__file__)")
    assert Path(where.strip()).is_relative_to(clean.parent)
    # Nothing that the package needs is there by chance, from the tests' own environment.
    pip(clean, "check")


@pytest.fixture(scope="module")
def installed_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tree called infer, in whose .venv is what a script installs from it, and nothing else."""

    @cache
    def install_as(script: str) -> Path:
        tree = copy_of_the_tree(tmp_path_factory.mktemp("clone") / "infer")
        text = (tree / "scripts" / script).read_text(encoding="utf-8")
        (command,) = re.findall(r"^install_package .*$", text, re.M)
        venv.create(tree / ".venv", with_pip=True)
        run("bash", "-c", f"source scripts/lib.sh; {command} --no-deps", cwd=tree)
        return tree

    return install_as


PROGRAM = """\
import infer

reveal_type(infer.load)
reveal_type(infer.UnsupportedError)
"""


@pytest.mark.full
@pytest.mark.packaging
@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_it_is_found_beside_a_clone_of_its_name(
    installed_by: Callable[[str], Path], script: str
) -> None:
    """By Python and by mypy, though the folder that one is in has a folder infer in it. With no
    option: quickstart.sh installs a copy, test.sh as editable."""
    tree = installed_by(script)
    assert_found(tree / ".venv" / "bin" / "python", tree.parent)


@pytest.mark.full
@pytest.mark.packaging
def test_the_wheel_has_its_types(clean: Path, tmp_path: Path) -> None:
    assert_found(clean / "python", tmp_path)


def assert_found(python: Path, folder: Path) -> None:
    """By Python and by mypy, from a folder."""
    code = "import infer.models.loading.formats; print(infer.__version__, infer.RequestError)"
    assert run(python, "-c", code, cwd=folder).endswith("errors.RequestError'>\n")
    (folder / "program.py").write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull]
    said = run(*mypy, "--python-executable", python, "program.py", cwd=folder)
    assert 'Revealed type is "def (model: ' in said
    assert "-> infer.llm.LLM" in said
    assert "infer.kernels.errors.UnsupportedError" in said


@pytest.mark.full
@pytest.mark.packaging
def test_changes_in_the_tree_that_is_tested_count_at_once(
    installed_by: Callable[[str], Path],
) -> None:
    tree = installed_by("test.sh")
    for package, folder in FOLDERS.items():
        (tree / folder / "added.py").write_text(folder)
        # Not imported: what a package imports is not installed.
        found = (
            f"importlib.util.find_spec({package.replace('/', '.')!r}).submodule_search_locations"
        )
        code = f"import importlib.util; print(open({found}[0] + '/added.py').read())"
        assert run(tree / ".venv" / "bin" / "python", "-c", code) == f"{folder}\n"


@pytest.mark.full
@pytest.mark.packaging
@pytest.mark.parametrize("links", ["files", "gone"])
def test_a_clone_without_links_installs(tmp_path: Path, links: str) -> None:
    """A clone installs as a copy and as editable."""
    tree = copy_of_the_tree(tmp_path / "tree", links)
    programs = environment(tmp_path / "environment")
    for arguments in ((tree,), ("--no-deps", "--editable", tree)):
        install(programs, *arguments)
        where = run(programs / "python", "-c", "import infer; print(infer.__file__)")
        own = tree if "--editable" in arguments else programs.parent
        assert Path(where.strip()).is_relative_to(own)
        text = run(programs / "infer", "run", "demo", "--prompt", STORY, "--max-tokens", "16")
        assert text.startswith(f"{STORY}, there was a ")
    run(sys.executable, "-m", "pytest", "tests/project/test_imports.py", cwd=tree)
