"""Every statement is understood by every database."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from maestro_hive.journal import sql

if TYPE_CHECKING:
    from maestro_hive.journal.database import Database, Transaction


def test_every_statement_can_be_prepared(database: Database) -> None:
    words = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
    texts = {name: text for name, text in database.sql.items() if text.startswith(words)}
    texts["append"] = sql.append(database.dialect, 3)
    assert len(texts) > 20

    def prepare(tx: Transaction) -> None:
        for name, text in texts.items():
            whole = text.replace("{workflows}", "'build'").replace("{limit}", "10")
            if database.dialect == "sqlite":
                count = len(set(re.findall(r"\$\d+", whole)))
                tx(f"EXPLAIN {whole}", *[None] * count)
            else:
                tx(f"PREPARE s_{name} AS {whole}")

    database.write(prepare, sync=False)
