"""``maestro schedules``: works on what workers recorded, without the user's code."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.hive import schedules
from maestro_hive.hive.schedule_rules import SCHEDULES
from maestro_hive.hive.schedules import _Keeper
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.cli.processes import answer, complaint, copy_of, in_terminal, maestro

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.hive.schedule_rules import Schedule


def program(folder: Path) -> Hive:
    """Return a hive with two schedules; one has had a run, which failed."""
    hive = Hive(folder)

    @hive.schedule("0 2 * * *", tz="Europe/Berlin", name="nightly", overlap="queue")
    @hive.workflow
    async def report() -> None:
        raise ValueError("no data")

    @hive.schedule("@hourly", args=("all",), tick="at", queue="mail")
    @hive.workflow
    async def send(to: str, at: datetime) -> str:
        return f"{to} at {at:%H:%M}"

    return hive


def _fill(folder: Path) -> None:
    with program(folder) as hive:
        _Keeper(hive).poll()
        change(folder, "nightly", lambda it: replace(it, considered=long_ago()))
        _Keeper(hive).poll()
        with pytest.raises(Exception, match="no data"):
            hive.run_sync(hive._workflows["report"], run_id=recorded(folder)["nightly"].last_run)


def long_ago() -> datetime:
    return datetime.now(UTC) - timedelta(days=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of(_fill, tmp_path / "state")


def change(folder: Path, name: str, how: Callable[[Schedule], Schedule]) -> None:
    store = SqliteStore(folder)
    schedules.update(store, name, how)
    store.close()


def recorded(folder: Path) -> dict[str, Schedule]:
    store = SqliteStore(folder)
    try:
        return SCHEDULES.all(store)
    finally:
        store.close()


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    found = answer(maestro("schedules", "--json", "--store", folder))["schedules"]
    return {each["name"]: each for each in found}


def test_where_no_worker_was_there_is_nothing_to_list(tmp_path: Path) -> None:
    with Hive(tmp_path / "state") as hive:
        hive.runs()
    done = maestro("schedules", "--store", tmp_path / "state")
    assert (done.returncode, done.stdout) == (0, "")
    assert "a worker records those of its code" in done.stderr


def test_schedules_are_listed_with_the_next_tick_and_the_last_run(folder: Path) -> None:
    nightly = listed(folder)["nightly"]
    assert nightly["expression"] == "0 2 * * *"
    assert nightly["tz"] == "Europe/Berlin"
    assert nightly["last_status"] == "failed"
    assert nightly["last_run"].startswith("nightly-20")
    assert datetime.fromisoformat(nightly["next_tick"]) > datetime.now(UTC)
    assert (nightly["paused"], nightly["overdue"]) == (False, False)
    assert (nightly["overlap"], nightly["catch_up"]) == ("queue", "latest")
    send = listed(folder)["send"]
    assert (send["last_run"], send["queue"], send["workflow"]) == (None, "mail", "send")
    lines = maestro("schedules", "--store", folder).stdout.splitlines()
    assert lines[0].startswith("nightly\t0 2 * * * Europe/Berlin\t20")
    assert "\tfailed\t" in lines[0]
    seen = in_terminal("schedules", "--store", folder, NO_COLOR="1", columns=160)
    assert "next" in seen.text
    assert "in " in seen.text


def test_what_no_worker_keeps_is_shown_as_overdue(folder: Path) -> None:
    change(folder, "send", lambda it: replace(it, considered=long_ago()))
    assert listed(folder)["send"]["overdue"] is True
    assert "overdue: no worker has it" in maestro("schedules", "--store", folder).stdout


def test_a_paused_schedule_makes_no_runs_until_it_is_resumed(folder: Path) -> None:
    assert maestro("schedules", "pause", "send", "--store", folder).returncode == 0
    shown = listed(folder)["send"]
    assert (shown["paused"], shown["next_tick"]) == (True, None)
    change(folder, "send", lambda it: replace(it, considered=long_ago()))
    with program(folder) as hive:
        _Keeper(hive).poll()
    assert listed(folder)["send"]["last_run"] is None
    assert maestro("schedules", "resume", "send", "--store", folder).returncode == 0
    with program(folder) as hive:
        _Keeper(hive).poll()
    shown = listed(folder)["send"]
    assert (shown["paused"], shown["last_run"]) == (False, None)
    assert datetime.fromisoformat(shown["next_tick"]) > datetime.now(UTC)


def test_one_is_run_now_with_the_arguments_of_the_schedule(folder: Path) -> None:
    assert maestro("schedules", "pause", "send", "--store", folder).returncode == 0
    done = maestro("schedules", "run", "send", "--store", folder)
    run = listed(folder)["send"]["last_run"]
    assert run.endswith("-manual")
    assert f"run {run} is enqueued" in done.stdout
    store = SqliteStore(folder)
    dispatch = store.dispatch(run)
    store.close()
    assert dispatch is not None
    assert dispatch.queue == "mail"
    with program(folder) as hive:
        hour = run.removeprefix("send-")[9:13]
        at = datetime.strptime(run[5:21], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        result = hive.run_sync(hive._workflows["send"], "all", at, run_id=run)
        assert result == f"all at {hour[:2]}:{hour[2:]}"


def test_a_tick_sees_a_run_that_a_person_started(folder: Path) -> None:
    assert maestro("schedules", "run", "send", "--store", folder).returncode == 0
    change(folder, "send", lambda it: replace(it, considered=long_ago()))
    with program(folder) as hive:
        _Keeper(hive).poll()
    assert listed(folder)["send"]["skipped"] == 1
    assert "1 skipped" in maestro("schedules", "--store", folder).stdout


def test_a_removed_schedule_is_recorded_again_by_the_next_worker_that_has_it(folder: Path) -> None:
    assert maestro("schedules", "remove", "nightly", "--store", folder).returncode == 0
    assert list(listed(folder)) == ["send"]
    with program(folder) as hive:
        _Keeper(hive).poll()
    assert listed(folder)["nightly"]["last_run"] is None


@pytest.mark.parametrize("verb", ["pause", "resume", "run", "remove"])
def test_an_unknown_name_is_an_error_with_the_known_ones(folder: Path, verb: str) -> None:
    before = recorded(folder)
    message = complaint(maestro("schedules", verb, "nigthly", "--store", folder), 2)
    assert "'nigthly'" in message
    assert "nightly." in message
    assert recorded(folder) == before


@pytest.mark.parametrize("arguments", [["pause"], ["run", "a", "b"], ["stop", "nightly"]])
def test_wrong_use_is_refused(folder: Path, arguments: list[str]) -> None:
    complaint(maestro("schedules", *arguments, "--store", folder), 2)
