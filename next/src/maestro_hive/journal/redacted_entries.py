"""Secrets are replaced in what entries have for people, before it is written.

What a run is resumed from stays as it is: arguments of workflows, results, answers, and what steps
save. Nothing reads the input of a step again: its identity was made before, of the value itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Raw
from msgspec.json import decode, encode

from maestro_hive.journal.entries import replace
from maestro_hive.journal.values import decode_tree
from maestro_hive.kernel.errors import CodecError
from maestro_hive.kernel.redaction import REDACTED, redact_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.journal.entries import Entry

#: In longer texts, secrets are found as they are, and not encoded: that would take too long.
_LONG = 1 << 18


def without_secrets(entry: Entry) -> Entry:
    """Return an entry with the secrets replaced in its fields for people."""
    changed: dict[str, Any] = {}
    for name in entry.redacted:
        value = getattr(entry, name)
        if isinstance(value, str):
            changed[name] = redact_text(value)
        elif isinstance(value, Raw) and (clean := redact_json(data := bytes(value))) is not data:
            changed[name] = Raw(clean)
    return replace(entry, **changed) if changed else entry


def redact_json(data: bytes) -> bytes:
    """Return the text of a value, or of an error, with the secrets in its texts replaced."""
    if b'"' not in data:
        return data  # without a text
    redact, text = partial(redact_text, encoded=len(data) < _LONG), data.decode()
    return data if redact(text) == text else encode(_clean(decode(data), redact))


def _clean(tree: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(tree, str):
        return redact(tree)
    if isinstance(tree, list):
        return [_clean(each, redact) for each in tree]
    if not isinstance(tree, dict):
        return tree
    clean = {redact(key): _clean(each, redact) for key, each in tree.items()}
    if "$" in tree and clean != tree:
        try:
            decode_tree(clean)
        except CodecError:  # such as bytes: their text is their base64
            return REDACTED
    return clean
