"""The cache of compiled kernels, shared by processes that compile at the same time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.unit
KERNEL = """
from sync.kernels import compiled

@compiled
def total(values):
    found = values[0]
    for i in range(1, len(values)):
        found += values[i]
    return found
"""
KINDS = ("int32", "float64", "uint16", "float32")


def loaded(folder: Path, name: str) -> Any:
    """The kernel as another process would have it: a dispatcher of its own on the same files."""
    spec = importlib.util.spec_from_file_location(name, folder / "shared_kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.total


def of(kind: str) -> Any:
    return np.arange(1, 5).astype(kind)


def test_two_that_compile_at_once_never_run_each_others_code(tmp_path: Path) -> None:
    (tmp_path / "shared_kernel.py").write_text(KERNEL)
    one, other = loaded(tmp_path, "one"), loaded(tmp_path, "other")
    file, others = one._cache._cache_file, other._cache._cache_file
    save_data: Callable[[str, Any], None] = file._save_data
    look: Callable[[], Any] = others._load_index
    seen: list[Any] = []

    def overtaken(name: str, data: Any) -> None:
        if not seen:
            before: list[Any] = [{}, {}]  # the other has looked already, when there was nothing
            others._load_index = lambda: before.pop() if before else look()
            seen.append(other(of("float64")))
        save_data(name, data)

    file._save_data = overtaken
    assert one(of("int32")) == 10
    assert seen == [10.0]
    third = loaded(tmp_path, "third")
    for kind in ("float64", *KINDS):
        assert third(of(kind)) == 10


def test_an_index_never_names_what_is_not_written_or_is_of_another_source(tmp_path: Path) -> None:
    (tmp_path / "shared_kernel.py").write_text(KERNEL)
    assert loaded(tmp_path, "one")(of("int32")) == 10
    (tmp_path / "shared_kernel.py").write_text(KERNEL.replace("found += values[i]", "found -= values[i]"))
    os.utime(tmp_path / "shared_kernel.py", (1, 1))
    one = loaded(tmp_path, "changed")
    file = one._cache._cache_file
    save_data: Callable[[str, Any], None] = file._save_data
    seen: list[Any] = []

    def asked_meanwhile(name: str, data: Any) -> None:
        if not seen:
            seen.append(None)
            seen.append(loaded(tmp_path, "meanwhile")(of("int32")))
        save_data(name, data)

    file._save_data = asked_meanwhile
    assert one(of("int32")) == 1 - 2 - 3 - 4
    assert seen == [None, 1 - 2 - 3 - 4]


def test_processes_that_start_together_on_an_empty_cache_agree(tmp_path: Path) -> None:
    (tmp_path / "shared_kernel.py").write_text(KERNEL)
    code = "import sys, numpy as np; from shared_kernel import total\n"
    code += "for kind in sys.argv[1:]: assert total(np.arange(1, 5).astype(kind)) == 10, kind"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        children = [
            subprocess.Popen([sys.executable, "-c", code, *KINDS[n:], *KINDS[:n]], env=environ, cwd=tmp_path)
            for n in range(len(KINDS))
        ]
        assert [child.wait(120) for child in children] == [0] * len(KINDS)
