"""The page about the format of what is stored: it is current, and its commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from docs.generate.storage_page import PAGE, page
from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.store import Store, open_store
from tests.journal import recorded as runs
from tests.stores import postgres_place

if TYPE_CHECKING:
    from pathlib import Path


def test_the_page_is_what_the_generator_writes() -> None:
    assert PAGE.read_text() == page(), "run docs/generate/storage_page.py"


def commands(word: str) -> str:
    """Return the block of commands that has a word."""
    (found,) = [
        block for block in re.findall(r"```sh\n(.*?)```", page(), re.DOTALL) if word in block
    ]
    return str(found)


def output_of(word: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        ["sh", "-ec", commands(word)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def entries_of(store: Store) -> list[str]:
    return [text for _, text in store.texts(store.find("story-1").number)]


def test_sqlite3_reads_a_copy_of_the_journal(tmp_path: Path) -> None:
    store = open_store(tmp_path / "state")
    runs.recorded(store, "story-1")
    runs.recorded(store, "another")
    expected = ["story-1|build|success", "another|build|success", *entries_of(store)]
    store.db.close()
    assert output_of("sqlite3", tmp_path).splitlines() == expected


def test_psql_reads_the_journal_of_a_server(tmp_path: Path) -> None:
    with postgres_place() as url:
        store = open_store(url)
        runs.recorded(store, "story-1")
        expected = entries_of(store)
        assert output_of("psql", tmp_path, URL=url).splitlines() == expected
        store.db.close()


@pytest.mark.parametrize("is_sound", [True, False])
def test_python_checks_and_prints_a_document(tmp_path: Path, is_sound: bool) -> None:
    store = open_store(tmp_path / "state")
    copies = Copies(store, CopyFolder(tmp_path / "state"))
    copies.released(runs.recorded(store, "story-1").number)
    copies.close()
    path = tmp_path / "state" / "runs" / "story-1" / "execution_state.json"
    if not is_sound:
        path.write_bytes(path.read_bytes().replace(b'"done"', b'"gone"'))
    verdict, _, printed = output_of("python3", tmp_path).partition("\n")
    assert verdict == ("sound" if is_sound else "DAMAGED")
    found = [json.dumps(each, separators=(",", ":")) for each in json.loads(printed)["entries"]]
    assert (found == entries_of(store)) is is_sound
    store.db.close()
