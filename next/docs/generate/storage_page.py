"""Write docs/storage-format.md from the tables, the kinds of entries and the documents.

storage_page.py    write the page; a test compares it with the code
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.journal import database, entries, run_document, sql

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[1] / "storage-format.md"

_HEAD = """\
# How to read a journal without maestro-hive

Format {format}. This page is generated from the code, and a test runs its commands. Everything in a
folder is private to its owner: files 0600, folders 0700.

```
state/
  journal.db  journal.db-wal  journal.db-shm  the journal: a SQLite database in WAL mode
  journal.db.lock                             processes queue here (flock) to write it
  holders/<id>                                one per process that uses it, locked while it lives
  runs/<run>/execution_state.json             the newest copy of a run; <run>/<child> of a child
  checkpoints/<run>/<name>.json               earlier copies
  damaged/                                    damaged files, copied before they were recovered
```

## A run is its entries

Nothing is ever changed in `entries`: a run is what its entries say, in their order. An entry is one
JSON text, and `sha256` is the digest of its bytes. Its key is the number of its run times 2³² plus
its own number, from 1 without gaps.

Any SQLite 3.37 or newer reads a copy of the files; take it while no process has the journal open,
or with `maestro backup`. The last 8 bytes of a page are its checksum (SQLite's `cksumvfs`).

```sh
mkdir copy && cp state/journal.db* copy/
sqlite3 copy/journal.db "SELECT name, workflow, status FROM runs"
sqlite3 copy/journal.db "SELECT entry FROM entries JOIN runs ON entries.id >> 32 = runs.id \\
    WHERE name = 'story-1' ORDER BY entries.id"
```

In PostgreSQL the tables have the same names and columns, in the schema `maestro`.

```sh
psql "$URL" --no-align --tuples-only --command "SELECT entry FROM maestro.entries \\
    JOIN maestro.runs ON entries.id / 4294967296 = runs.id \\
    WHERE name = 'story-1' ORDER BY entries.id"
```

Entries before the last `restored` no longer count. Times are microseconds since 1970, UTC. A field
that has its default is left out. A reader ignores fields that it does not know, and stops at a kind
that it does not know.

"""
_VALUES = """
## Values

A value (JSON in the table above) is plain JSON where that is enough. Everything else is an object
with the key `$`: `{"$":"date","v":"2030-01-01"}`. A value of 16 KB or more is in the table
`payloads`, and its entry refers to it: `{"$":"payload","v":[number,size,"sha256"]}`, with the size
and the digest of the whole text. A payload without a `base` is that text; another one is the
difference to the payload of that number of the same run.

"""
_DOCUMENTS = """
## Documents

A copy, a checkpoint and an export are the same JSON document,
`{{"document":{{"format":{format},"kind":"run",…}},"sha256":"…"}}` and a line feed. The digest is of
the bytes of the inner object, exactly as they stand there. To check a file, and print it:

```sh
python3 - state/runs/story-1/execution_state.json <<'EOF'
import hashlib, json, sys
text = open(sys.argv[1], "rb").read()
document, digest = text[12:-78], text[-67:-3].decode()
print("sound" if hashlib.sha256(document).hexdigest() == digest else "DAMAGED")
print(json.dumps(json.loads(document), indent=2))
EOF
```

Each entry is a line of its own, so that `grep` finds it. The name of a checkpoint is
`<fence>.<seq>~<expires>~<id>.json`: the fencing number under which it was written, the number of
its last entry, when it expires (seconds since 1970, or `never`), and its id, which starts with
`auto_` if it was written at an interval. Of two copies, the one with the higher fencing number,
then the higher `seq`, is newer. A document has at most 256 MB; a run that has more has no copies.

"""

#: The types of fields, in words of JSON.
_TYPES = {
    "Count": "number",
    "Micros": "time",
    "Value": "JSON",
    "Raw": "JSON",
    "str": "text",
    "int": "number",
    "bool": "true or false",
    "bytes": "base64",
    "Moment": "ISO 8601",
    "Digest": "hexadecimal",
    "tuple[str, ...]": "list of texts",
    "EndStatus": "`success`, `failed` or `cancelled`",
    "dict[str, Any]": "object",
    "dict[str, Raw]": "object",
    "list[AnyEntry]": "list of entries",
    "list[CopiedValue]": "list",
}
_FIELD = re.compile(r"    (\w+): (.+?)(?: = .*)?$")


def page() -> str:
    """Return the text of the page."""
    parts = [
        _HEAD.format(format=database.FORMAT),
        "## Tables\n\n```sql\n",
        sql.filled(sql.SCHEMA, "sqlite"),
        "\n```\n\n## Kinds of entries\n\n",
        "Every entry has `kind`, `seq` and `at`; one of a step its number and the attempt, one\n",
        "of another call its identity. The workflow sees **outcomes**, in their order.\n\n",
        "| kind | meaning | fields |\n|---|---|---|\n",
        *_kinds(),
        _VALUES,
        _DOCUMENTS.format(format=database.FORMAT),
        *_struct("A run in a document", run_document.RunCopy),
        *_struct("A value in `payloads` of a document", run_document.CopiedValue),
    ]
    return "".join(parts).rstrip() + "\n"


def _kinds() -> Iterator[str]:
    for name, kind in entries.KINDS.items():
        shown = f"**`{name}`**" if kind.is_outcome else f"`{name}`"
        fields = ", ".join(f"`{field}` {text}" for field, text, _ in _fields(kind))
        yield f"| {shown} | {_plain(kind.__doc__ or '')} | {fields} |\n"


def _struct(title: str, kind: type) -> Iterator[str]:
    yield f"**{title}** has\n\n| field | type | |\n|---|---|---|\n"
    for field, text, comment in _fields(kind):
        yield f"| `{field}` | {text} | {comment} |\n"
    yield "\n"


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the own fields of a struct: their names, types and the comments before them."""
    comment = ""
    for line in inspect.getsource(kind).partition("\n    def ")[0].splitlines():
        if line.startswith("    #: "):
            comment += line[6:]
        elif (match := _FIELD.match(line)) is not None:
            name, text = match.groups()
            yield name, _type(text), _plain(comment)
            comment = ""


def _type(text: str) -> str:
    if text.startswith("Literal["):
        *words, last = (f"`{word}`" for word in re.findall(r'"(\w+)"', text))
        return f"{', '.join(words)} or {last}"
    text = text.removesuffix(" | None").removesuffix(" | UnsetType")
    return _TYPES[text.removeprefix("kinds.")]


def _plain(text: str) -> str:
    return " ".join(inspect.cleandoc(text).replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(page())
