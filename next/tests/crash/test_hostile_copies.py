"""Exports and copies whose digests are right, and whose text no journal has written."""

from __future__ import annotations

import itertools
import random
import re
import time
from typing import TYPE_CHECKING

from maestro_hive.journal import documents, transfer
from maestro_hive.journal.entries import (
    AttemptFailed,
    AttemptStarted,
    FieldsSet,
    PersonaSaved,
    Retried,
    Spent,
    WaitStarted,
)
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import MaestroError
from tests.journal import recorded as runs

if TYPE_CHECKING:
    from maestro_hive.journal.store import Store

#: What takes the place of a word; nothing: another word of the document.
_WORDS = (
    *(b"", b""),
    *(b"null", b"0", b"-1", b"1e999", b"9" * 23, b'""', b"[]", b"{}", b"true", b"NaN"),
    *(b'"\\ud800"', b"[" * 20_000, b'"0001-01-01T00:00:00Z"', b'"9999-12-31T23:59:59"'),
)


def members(store: Store) -> bytes:
    """Return the members of the export of a run that has a bit of everything."""
    run = runs.start(store, "r")
    text = b'["' + b"x" * 20_000 + b'"]'
    grown = text[:-1] + b',"more"]'
    runs.complete(store, run, 1, runs.store_value(store, run, 1, text))
    runs.complete(store, run, 2, runs.store_value(store, run, 2, grown, base=text))
    runs.write(
        store,
        run,
        Spent(step=1, persona="p", tokens=3),
        FieldsSet(fields={"phase": runs.raw("building")}),
        WaitStarted(identity="w", name="approve"),
        PersonaSaved(persona="p", what="memory", value=runs.raw({"a": 1})),
        AttemptStarted(step=3, identity="s3"),
        AttemptFailed(step=3, error=runs.raw("no")),
        Retried(identities=("s3",)),
    )
    runs.end(store, run)
    body = bytes(documents.unseal(transfer.export_run(store, "r"), "it").body)
    return body[body.index(b'"run_id"') : -1]


def test_mutated_copies_raise_only_our_errors_and_harm_no_other_run() -> None:
    store = open_store(":memory:")
    text = members(store)
    before = runs.texts(store, "r")
    spots = [each.span() for each in re.finditer(rb'"[^"]{0,70}"|\d+|\[\]', text)]
    dice = random.Random(1)
    accepted = refused = 0
    for number, ((start, end), word) in enumerate(itertools.product(spots, _WORDS)):
        other = slice(*dice.choice(spots))
        changed = text[:start] + (word or text[other]) + text[end:]
        started = time.monotonic()
        try:
            copy = transfer.read_run(documents.seal("run", [changed]), "a file")
            name = transfer.import_run(store, copy, "a file", f"n{number}")
        except MaestroError:
            refused += 1
        else:
            accepted += 1
            transfer.read_run(transfer.export_run(store, name), "what was accepted")
            store.entries(store.find(name).number)
        assert time.monotonic() - started < 1
    assert runs.texts(store, "r") == before
    assert refused > 500
    assert accepted > 50
    store.db.close()
