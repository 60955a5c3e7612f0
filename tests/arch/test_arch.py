"""The shape of the project: who imports whom, how large things may grow, what is documented and pinned."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.arch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sync", "trainer_node", "inference_space", "env_space")
CODE = [*sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py")), ROOT / "deltawire.py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULE_LINES, FUNCTION_LINES = 400, 70
Function = ast.FunctionDef | ast.AsyncFunctionDef


def rel(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every absolute import, also those inside functions and strings given to importlib."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "find_spec"):
            yield from ((node.lineno, str(a.value).split(".")[0]) for a in node.args if isinstance(a, ast.Constant))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_meet_over_sync_alone(package: str) -> None:
    allowed = {package, "sync"}
    files = [p for p in CODE if rel(p).startswith(f"{package}/")]
    assert files
    found = [f"{rel(p)}:{line} imports {name}" for p in files for line, name in imported(p)
             if name in {*PACKAGES, "deltawire", "tests"} - allowed]  # fmt: skip
    assert found == []


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("sync", {"torch", "transformers", "gradio", "vllm", "fastapi", "trl", "datasets"}),
        ("env_space", {"torch", "transformers", "vllm", "trl"}),
        ("inference_space", {"gradio", "trl"}),
        ("trainer_node", {"gradio", "vllm"}),
    ],
)
def test_heavy_packages_stay_where_they_belong(package: str, never: set[str]) -> None:
    files = [p for p in CODE if rel(p).startswith(f"{package}/")]
    assert [f"{rel(p)}:{line} imports {n}" for p in files for line, n in imported(p) if n in never] == []


@pytest.mark.parametrize(
    "module",
    [
        "sync",
        "deltawire",
        "trainer_node.config",
        "inference_space.config",
        "inference_space.router.config",
        "env_space.config",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    heavy = ["torch", "transformers", "trl", "gradio", "vllm", "fastapi", "uvicorn", "httpx", "datasets", "safetensors"]
    code = f"import json, sys, {module}; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_modules_stay_short() -> None:
    sizes = {rel(p): len(p.read_text().splitlines()) for p in CODE}
    assert {name: n for name, n in sizes.items() if n > MODULE_LINES} == {}


def test_functions_stay_short() -> None:
    long = {}
    for path in (*CODE, *TESTS, *(ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function) and (n := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
                long[f"{rel(path)}:{node.lineno} {node.name}"] = n
    assert long == {}


def test_every_module_is_typed_and_says_what_it_is() -> None:
    assert [rel(p) for p in CODE if not ast.get_docstring(ast.parse(p.read_text()))] == []
    missing = [rel(p) for p in CODE if "from __future__ import annotations" not in p.read_text()]
    assert [m for m in missing if ast.parse((ROOT / m).read_text()).body[1:]] == []  # a docstring alone needs none


def test_test_files_outside_packages_have_names_of_their_own() -> None:
    names = [p.name for p in TESTS if not (p.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))


# --- dependencies


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements() -> dict[str, list[str]]:
    """'' (the core) or extra → the distributions it names, without our own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {g: [n for n in map(name_of, reqs) if n != "deltawire"] for g, reqs in groups.items()}


def test_every_dependency_has_a_line_in_the_documentation() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    words = set(re.findall(r"[a-z0-9][a-z0-9._-]*", text))
    documented = {name_of(w) for w in words}
    wanted = {n for names in requirements().values() for n in names}
    assert len(wanted) > 15
    assert sorted(wanted - documented) == []


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {name_of(line) for line in lines if re.match(r"[A-Za-z0-9._-]+(\[[^]]*\])?\s*==\s*[0-9]", line)}
    assert [line for line in lines if line and name_of(line) not in pinned] == []
    wanted = {n for names in requirements().values() for n in names}
    assert sorted(wanted - pinned) == []


COMES_WITH = {"starlette": "fastapi", "pydantic-core": "pydantic", "yaml": "huggingface-hub",
              "httpx2": "huggingface-hub", "llvmlite": "numba"}  # fmt: skip
"""Packages that a declared one hands to its users as part of its own interface."""


def test_what_the_code_imports_is_declared() -> None:
    declared = requirements()
    extra_of = {"sync": "", "inference_space": "inference", "env_space": "env", "trainer_node": "trainer"}
    found = []
    for package, extra in extra_of.items():
        allowed = {*declared[""], *declared[extra]}
        if package == "sync":
            allowed |= {"uvicorn"}  # sync.serving loads it on use, for the two Spaces
        for path in (p for p in CODE if rel(p).startswith(f"{package}/")):
            optional = {*declared["hub"]} if rel(path).startswith("sync/devhub/") else set()
            if rel(path).startswith("inference_space/engines/vllm_"):
                optional |= {"vllm"}  # lives in an environment of its own: constraints-vllm.txt
            for line, name in imported(path):
                distribution = COMES_WITH.get(name_of(name), name_of(name))
                if name not in {*sys.stdlib_module_names, *PACKAGES} and distribution not in allowed | optional:
                    found.append(f"{rel(path)}:{line} imports {name}")
    assert found == []
