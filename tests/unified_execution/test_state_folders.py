"""Which folders are used: those that were set or none, and a fallback only for a default folder."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import pickle
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine import config as config_module
from maestro_hive.engine.config import (
    ExecutionConfig,
    StateConfig,
    StateFolders,
    reset_execution_config,
)
from maestro_hive.kernel.errors import FolderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOGGER = "maestro_hive.engine.config"


@dataclasses.dataclass
class Place:
    """A machine in a folder: where its defaults are, and a home."""

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
    return [
        r.getMessage() for r in caplog.records if (r.name, r.levelno) == (LOGGER, logging.WARNING)
    ]


# --- the default -----------------------------------------------------------------------------


def test_the_default_folders_are_used_where_they_can_be(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    folders = StateConfig().resolve()
    assert folders == place.default
    assert folders.persistent
    assert folders.fallbacks == ()
    for folder in (folders.state, folders.checkpoints):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert everything_in(place.home) == []
    assert caplog.records == []


def test_making_a_configuration_makes_no_folder(place: Place) -> None:
    ExecutionConfig().frozen()
    assert not place.var.exists()


def test_a_default_that_cannot_be_made_has_a_fallback_at_home(place: Place) -> None:
    place.spoil()
    folders = StateConfig().resolve()
    assert folders.state == place.home / ".maestro" / "state"
    assert folders.checkpoints == place.home / ".maestro" / "checkpoints"
    assert folders.persistent
    assert [(each.wanted, each.used) for each in folders.fallbacks] == [
        (place.var / "state", folders.state),
        (place.var / "checkpoints", folders.checkpoints),
    ]
    assert all(each.reason == f"{place.var}: is not a folder" for each in folders.fallbacks)
    for folder in (folders.state, folders.checkpoints, place.home / ".maestro"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_default_that_cannot_be_written_has_a_fallback(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may write everywhere, so the system's answer is imitated."""
    real = os.access

    def access(path: Path, mode: int, **options: bool) -> bool:
        return place.var not in Path(path).parents and real(path, mode)

    monkeypatch.setattr(os, "access", access)
    folders = StateConfig().resolve()
    assert folders.state == place.home / ".maestro" / "state"
    assert folders.fallbacks[0].reason == f"{place.var / 'state'}: cannot be written"


def test_each_folder_has_its_own_fallback(place: Place) -> None:
    place.var.mkdir()
    (place.var / "checkpoints").write_text("in the way")
    folders = StateConfig().resolve()
    assert folders.state == place.var / "state"
    assert folders.checkpoints == place.home / ".maestro" / "checkpoints"
    assert [each.wanted for each in folders.fallbacks] == [place.var / "checkpoints"]


def test_the_fallbacks_are_said_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.spoil()
    for _ in range(3):
        assert StateConfig().resolve().fallbacks
        assert ExecutionConfig().frozen().state.resolve().fallbacks
    [message] = warnings(caplog)
    assert str(place.home / ".maestro" / "state") in message
    assert str(place.home / ".maestro" / "checkpoints") in message
    assert "is not a folder" in message
    assert "MAESTRO_STATE_DIR" in message
    assert len(caplog.records) == 1


def test_a_fallback_is_stored_for_the_whole_process(place: Place) -> None:
    place.spoil()
    first = StateConfig().resolve()
    place.var.unlink()
    assert StateConfig().resolve() == first
    assert not place.var.exists()
    reset_execution_config()
    assert StateConfig().resolve() == place.default


def test_a_default_that_was_used_and_then_fails_is_an_error(place: Place) -> None:
    """Its state would not be found in a fallback."""
    folders = StateConfig().resolve()
    folders.state.rmdir()
    folders.state.write_text("in the way")
    with pytest.raises(FolderError, match="is not a folder"):
        StateConfig().resolve()
    assert everything_in(place.home) == []


def test_another_home_is_another_decision(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place.spoil()
    StateConfig().resolve()
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert StateConfig().resolve().state == tmp_path / "other" / ".maestro" / "state"


def test_when_the_fallback_fails_too_the_error_names_both_and_the_way_out(place: Place) -> None:
    place.spoil()
    (place.home / ".maestro").write_text("in the way")
    with pytest.raises(FolderError) as caught:
        StateConfig().resolve()
    message = str(caught.value)
    assert caught.value.path == place.var / "state"
    assert f"({place.var}: is not a folder)" in message
    assert f"({place.home / '.maestro'}: is not a folder)" in message
    assert "set MAESTRO_STATE_DIR" in message


def test_without_a_home_the_error_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.spoil()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(FolderError, match="home directory is unknown; set MAESTRO_STATE_DIR"):
        StateConfig().resolve()


# --- folders that were set -------------------------------------------------------------------


def by_argument(state: str, checkpoints: str, monkeypatch: pytest.MonkeyPatch) -> StateConfig:
    return StateConfig(state_dir=state, checkpoint_dir=checkpoints)


def by_attribute(state: str, checkpoints: str, monkeypatch: pytest.MonkeyPatch) -> StateConfig:
    config = ExecutionConfig()
    config.state.state_dir = state
    config.state.checkpoint_dir = checkpoints
    return config.state


def by_environment(state: str, checkpoints: str, monkeypatch: pytest.MonkeyPatch) -> StateConfig:
    monkeypatch.setenv("MAESTRO_STATE_DIR", state)
    monkeypatch.setenv("MAESTRO_CHECKPOINT_DIR", checkpoints)
    return StateConfig()


Choose = Any
CHOOSING = [by_argument, by_attribute, by_environment]


@pytest.mark.parametrize("choose", CHOOSING)
def test_chosen_folders_are_made_and_used(
    choose: Choose, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.spoil()
    config = choose(str(tmp_path / "a" / "s"), str(tmp_path / "a" / "c"), monkeypatch)
    assert config.resolve() == StateFolders(
        state=tmp_path / "a" / "s", checkpoints=tmp_path / "a" / "c"
    )
    assert stat.S_IMODE((tmp_path / "a" / "s").stat().st_mode) == 0o700


@pytest.mark.parametrize("choose", CHOOSING)
@pytest.mark.parametrize("bad", ["state", "checkpoints"])
def test_a_chosen_folder_that_fails_is_an_error_and_has_no_fallback(
    choose: Choose,
    bad: str,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / bad).write_text("in the way")
    chosen = {
        "state": tmp_path / "good",
        "checkpoints": tmp_path / "good",
        bad: tmp_path / bad / "x",
    }
    config = choose(str(chosen["state"]), str(chosen["checkpoints"]), monkeypatch)
    with pytest.raises(FolderError) as caught:
        config.resolve()
    message = str(caught.value)
    assert caught.value.path == tmp_path / bad / "x"
    assert f"{tmp_path / bad}: is not a folder" in message
    assert "set another one" in message
    assert {"state": "MAESTRO_STATE_DIR", "checkpoints": "MAESTRO_CHECKPOINT_DIR"}[bad] in message
    assert everything_in(place.home) == []
    assert caplog.records == []


@pytest.mark.parametrize("choose", CHOOSING)
def test_who_passes_the_text_of_the_default_has_chosen_it(
    choose: Choose, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.spoil()
    config = choose(str(place.var / "state"), str(place.var / "checkpoints"), monkeypatch)
    assert config == StateConfig()
    with pytest.raises(FolderError, match="was set explicitly"):
        config.resolve()


def test_checkpoints_go_with_a_chosen_state_folder(place: Place, tmp_path: Path) -> None:
    """Or two state folders would share checkpoints, and resume each other's runs."""
    folders = StateConfig(state_dir=str(tmp_path / "mine")).resolve()
    assert folders.state == tmp_path / "mine"
    assert folders.checkpoints == tmp_path / "mine" / "checkpoints"
    assert folders.fallbacks == ()
    assert not place.var.exists()


def test_a_chosen_checkpoint_folder_leaves_the_state_where_it_was(
    place: Place, tmp_path: Path
) -> None:
    folders = StateConfig(checkpoint_dir=str(tmp_path / "mine")).resolve()
    assert folders.state == place.default.state
    assert folders.checkpoints == tmp_path / "mine"


COPIES: list[Callable[[StateConfig], StateConfig]] = [
    copy.copy,
    copy.deepcopy,
    lambda config: pickle.loads(pickle.dumps(config)),
    dataclasses.replace,
    lambda config: config.frozen(),
    lambda config: StateConfig(state_dir=config.state_dir, checkpoint_dir=config.checkpoint_dir),
]


@pytest.mark.parametrize(
    "how", COPIES, ids=["copy", "deepcopy", "pickle", "replace", "frozen", "by hand"]
)
def test_a_copy_of_an_untouched_configuration_is_untouched(
    how: Callable[[StateConfig], StateConfig], place: Place
) -> None:
    place.spoil()
    assert how(StateConfig()).resolve().state == place.home / ".maestro" / "state"
    with pytest.raises(FolderError):
        how(StateConfig(state_dir=str(place.var / "state"))).resolve()


def test_a_home_in_a_chosen_folder_is_expanded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAESTRO_CHECKPOINT_DIR", "~/cp")
    config = StateConfig(state_dir="~/here/state")
    assert config.state_dir == str(place.home / "here" / "state")
    assert config.checkpoint_dir == str(place.home / "cp")
    config.state_dir = "~"
    assert config.resolve() == StateFolders(state=place.home, checkpoints=place.home / "cp")


def test_a_tilde_elsewhere_in_a_path_is_only_a_tilde(tmp_path: Path) -> None:
    config = StateConfig(state_dir=f"{tmp_path}/~/state")
    assert config.resolve().state == tmp_path / "~" / "state"


def test_a_relative_folder_becomes_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = StateConfig(state_dir="state", checkpoint_dir="./checkpoints").resolve()
    assert folders == StateFolders(state=tmp_path / "state", checkpoints=tmp_path / "checkpoints")


# --- no persistence --------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [False, True])
def test_without_persistence_no_folder_is_made_or_even_looked_at(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, spoilt: bool
) -> None:
    if spoilt:
        place.spoil()
    before = everything_in(tmp_path)
    folders = StateConfig(enable_persistence=False).resolve()
    assert not folders.persistent
    assert folders.fallbacks == ()
    assert (folders.state, folders.checkpoints) == (place.default.state, place.default.checkpoints)
    assert everything_in(tmp_path) == before
    assert caplog.records == []


def test_without_persistence_a_chosen_folder_is_not_made_either(tmp_path: Path) -> None:
    config = StateConfig(state_dir=str(tmp_path / "mine"), enable_persistence=False)
    assert not config.resolve().persistent
    assert not (tmp_path / "mine").exists()
