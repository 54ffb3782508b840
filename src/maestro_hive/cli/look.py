"""A journal that is only read, as a context manager."""

from __future__ import annotations

from typing import Any, Self

from maestro_hive.maestro.state.sqlite.reader import SqliteReader


class Look(SqliteReader):
    """A reader with the former names."""

    @property
    def path(self) -> object:
        """The file."""
        return self._file.path

    def rows(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return all of it."""
        return self._file.rows(sql, bindings)

    def integrity(self) -> list[str]:
        """Have SQLite read every page and return what is wrong."""
        return self.check_pages()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
