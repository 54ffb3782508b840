"""Places for journals, as tests need them: in memory, in a folder, on a PostgreSQL server."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

from tests.postgres_server import server_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The kinds of places, and those that several processes share.
KINDS = ("memory", "file", "postgres")
SHARED_KINDS = ("file", "postgres")
_numbers = itertools.count(1)


@contextlib.contextmanager
def place(kind: str, folder: Path) -> Iterator[str]:
    """Give an empty place that ``open_store`` and ``Hive`` open, and remove it at the end."""
    match kind:
        case "memory":
            yield ":memory:"
        case "file":
            yield str(folder / "state")
        case _:
            with postgres_place() as url:
                yield url


@contextlib.contextmanager
def postgres_place() -> Iterator[str]:
    """Give the URL of an empty PostgreSQL database."""
    url = server_url()
    import psycopg

    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(f"{url}/postgres", autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield f"{url}/{name}"
        finally:
            db.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
