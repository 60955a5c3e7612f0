"""What lies in a bucket, and what `deltawire checkout` writes, are ordinary checkpoints: transformers loads them."""

from __future__ import annotations

import pytest
from support.checkpoints import CASES, Case, assert_transformers_loads, bring_all
from support.devhub import HubProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    home = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch, HubProcess(home / "server") as hub:
        patch.setenv("HF_HOME", str(home / "publisher"))
        return bring_all(hub, home)


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_every_version_bit_for_bit(cases: dict[str, Case], name: str) -> None:
    assert_transformers_loads(cases[name])


def test_sharded_checkpoints_come_in_several_files_with_an_index(cases: dict[str, Case]) -> None:
    files = {name: sorted(p.name for p in case.folder.glob("*.safetensors*")) for name, case in cases.items()}
    assert {len(files[name]) for name in CASES if not name.startswith("sharded")} == {1}
    for name in ("sharded-anchor", "sharded-older", "sharded-head"):
        assert len(files[name]) > 3
        assert "model.safetensors.index.json" in files[name]
