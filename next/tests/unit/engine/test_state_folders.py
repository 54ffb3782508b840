"""Which folders are used: those that were set or none, and a fallback only for a default folder."""

from __future__ import annotations

import dataclasses
import logging
import stat
from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine import config as config_module
from maestro_hive.engine.config import ExecutionConfig, StateConfig, reset_execution_config
from maestro_hive.engine.state_folders import StateFolders, resolve_folders
from maestro_hive.kernel.errors import FolderError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOGGER = "maestro_hive.engine.state_folders"


@dataclasses.dataclass
class Place:
    """A machine in a folder: its default folders, and a home."""

    var: Path
    home: Path

    @property
    def default(self) -> StateFolders:
        return StateFolders(state=self.var / "state", checkpoints=self.var / "checkpoints")

    def spoil(self) -> None:
        """Make the default folders impossible, also for the superuser."""
        self.var.write_text("a file where the folder should be")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(var=tmp_path / "var" / "maestro", home=tmp_path / "home")
    made.var.parent.mkdir()
    made.home.mkdir()
    monkeypatch.setattr(config_module, "DEFAULT_STATE_DIR", str(made.var / "state"))
    monkeypatch.setattr(config_module, "DEFAULT_CHECKPOINT_DIR", str(made.var / "checkpoints"))
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.delenv("MAESTRO_STATE_DIR", raising=False)
    monkeypatch.delenv("MAESTRO_CHECKPOINT_DIR", raising=False)
    reset_execution_config()
    yield made
    reset_execution_config()


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each for each in caplog.records if each.name == LOGGER]
    assert all(each.levelno == logging.WARNING for each in found)
    return [each.getMessage() for each in found]


def test_the_default_folders_are_used_where_they_can_be(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    folders = resolve_folders(StateConfig())
    assert folders == place.default
    for folder in (folders.state, folders.checkpoints):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert everything_in(place.home) == []
    assert warnings(caplog) == []


def test_making_a_configuration_makes_no_folder(place: Place) -> None:
    ExecutionConfig().frozen()
    assert not place.var.exists()


def test_a_default_that_cannot_be_made_has_a_fallback_at_home_and_says_so_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.spoil()
    for _ in range(3):
        folders = resolve_folders(ExecutionConfig().frozen().state)
        assert folders.state == place.home / ".maestro" / "state"
        assert folders.checkpoints == place.home / ".maestro" / "checkpoints"
        assert [(each.wanted, each.used) for each in folders.fallbacks] == [
            (place.var / "state", folders.state),
            (place.var / "checkpoints", folders.checkpoints),
        ]
        assert all("is not a folder" in each.reason for each in folders.fallbacks)
    first, second = warnings(caplog)
    assert "MAESTRO_STATE_DIR" in first
    assert "MAESTRO_CHECKPOINT_DIR" in second


def test_each_folder_has_its_own_fallback(place: Place) -> None:
    place.var.mkdir()
    (place.var / "checkpoints").write_text("in the way")
    folders = resolve_folders(StateConfig())
    assert folders.state == place.var / "state"
    assert folders.checkpoints == place.home / ".maestro" / "checkpoints"


def test_a_decision_holds_for_the_whole_process(place: Place) -> None:
    place.spoil()
    fallback = resolve_folders(StateConfig()).state
    place.var.unlink()
    assert resolve_folders(StateConfig()).state == fallback


@pytest.mark.parametrize("how", ["argument", "attribute", "variable"])
def test_a_folder_that_was_set_has_no_fallback(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    wanted = tmp_path / "file" / "state"
    (tmp_path / "file").write_text("in the way")
    config = StateConfig()
    if how == "argument":
        config = StateConfig(state_dir=str(wanted))
    elif how == "attribute":
        config.state_dir = str(wanted)
    else:
        monkeypatch.setenv("MAESTRO_STATE_DIR", str(wanted))
        config = StateConfig()
    with pytest.raises(FolderError, match=r"state cannot be stored there .* MAESTRO_STATE_DIR"):
        resolve_folders(config)
    assert everything_in(place.home) == []


def test_without_persistence_no_folder_is_made(place: Place) -> None:
    folders = resolve_folders(StateConfig(enable_persistence=False))
    assert not folders.persistent
    assert not place.var.exists()


def test_checkpoints_are_in_the_state_folder_where_only_that_was_set(tmp_path: Path) -> None:
    folders = resolve_folders(StateConfig(state_dir=str(tmp_path / "mine")))
    assert folders.checkpoints == tmp_path / "mine" / "checkpoints"
    both = StateConfig(state_dir=str(tmp_path / "mine"), checkpoint_dir=str(tmp_path / "other"))
    assert resolve_folders(both).checkpoints == tmp_path / "other"
