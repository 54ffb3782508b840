"""What ``maestro doctor --fix`` does about what was found. It destroys nothing that is in use."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from maestro_hive.cli import words
from maestro_hive.cli.restoring import write_copy
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.cli.examination import Findings
    from maestro_hive.cli.rights import Exposed
    from maestro_hive.maestro.state.sqlite.store import SqliteStore


def mend_rights(found: list[Exposed]) -> Iterator[str]:
    """Make what is open to others private; say each thing, done or not."""
    for each in found:
        if each.can_be_mended:
            yield _tried(f"{each.path} {each.trouble}: mended", each.mend)


def mend(found: Findings, store: SqliteStore) -> Iterator[str]:
    """Mend what can be mended; say each thing, done or not."""
    for path in found.leftovers:
        yield _tried(f"{path} was left by a killed process: deleted", partial(files.remove, path))
    for lease in found.forsaken:
        said = f"{lease.name} was held by process {lease.holder.pid}, which is gone: freed"
        yield _tried(said, partial(store.release_lease, lease))
    if found.unused_values:
        said = f"deleted {words.many(found.unused_values, 'stored value')} that nothing refers to"
        yield _tried(said, store.collect)
    for name in found.without_copy:
        said = f"run {name!r} had no execution_state.json: written"
        yield _tried(said, partial(_write_copy, store, name))


def _write_copy(store: SqliteStore, run: str) -> None:
    hold = store.acquire_run(run)
    try:
        write_copy(store, run)
    finally:
        store.release_run(hold)


def _tried(done: str, action: Callable[[], object]) -> str:
    try:
        action()
    except MaestroError as error:
        return f"not mended: {error}"
    except OSError as error:
        return f"not mended: {error.filename}: {error.strerror}"
    return done
