"""Secrets are replaced in everything that leaves the process: logs, exports, reports, tickets.

Secrets are the values of environment variables with secret names, the values given to
``mark_secret``, and texts with the shape of a key (``secret_shapes``). They are found in plain
text, percent-encoded, and in one level of base64, and nowhere else. Each is replaced by
``[redacted]``, that of an environment variable by ``[redacted:NAME]``.
"""

from __future__ import annotations

import binascii
import json
import os
import re
import threading
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote_plus, unquote

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.secret_shapes import (
    is_ordinary,
    is_secret_name,
    shaped_secrets,
    token_runs,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: Shown in place of a secret.
REDACTED = "[redacted]"

#: The shortest value of an environment variable that is a secret.
_SHORTEST = 6
#: The shortest value that can be marked: a shorter one is part of every text.
_SHORTEST_MARKED = 4
#: How much more than the rest of a text is searched for secrets before it is cut.
_CUT_MARGIN = 1 << 16


class _Found(NamedTuple):
    """The place of a secret in a text, and the environment variable that has it."""

    start: int
    end: int
    name: str | None


class _Needle(NamedTuple):
    """A way to write a known secret, and the environment variable that has it."""

    text: str
    name: str | None


# --- known secrets ---------------------------------------------------------------------------


class _Known:
    """The secrets that are known by value: of the environment, as it is now, and marked ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked: tuple[str, ...] = ()
        self._environment: dict[bytes, bytes] | None = None
        self._needles: tuple[_Needle, ...] = ()

    def mark(self, value: str) -> None:
        """Treat a value as a secret from now on."""
        with self._lock:
            if value not in self._marked:
                self._marked = (*self._marked, value)
                self._environment = None

    def needles(self) -> tuple[_Needle, ...]:
        """Return the texts to search for, made again when the environment has changed."""
        # The dict inside, if it is there: a copy would take as long as redacting a log line.
        environment: Mapping[bytes, bytes] = getattr(os.environb, "_data", os.environb)
        if environment != self._environment:
            with self._lock:
                copied = dict(environment)
                self._needles = tuple(self._made(copied))
                self._environment = copied
        return self._needles

    def _made(self, environment: Mapping[bytes, bytes]) -> Iterator[_Needle]:
        values: dict[str, str | None] = {}
        for raw_name, raw_value in environment.items():
            name = os.fsdecode(raw_name)
            for value in _secrets_of_variable(name, os.fsdecode(raw_value)):
                values.setdefault(value, name)
        for value in self._marked:
            values.setdefault(value, None)
        # The longest first: a value that contains another one is replaced as a whole.
        for value in sorted(values, key=len, reverse=True):
            yield from _needles_of(value, values[value])


_KNOWN = _Known()


def mark_secret(value: str) -> str:
    """Replace this value by ``[redacted]`` in everything that leaves the process; return it.

    For secrets that are in no environment variable: read from a file, or fetched from a vault. It
    is replaced in logs, exports, reports, tickets and error messages of the command line, also
    where it is percent-encoded or encoded once in base64, until the process ends.
    """
    _KNOWN.mark(_checked(value))
    return value


def know_secret(value: str) -> None:
    """Treat a setting as ``mark_secret`` does, unless it is too short or an ordinary word."""
    if len(value) >= _SHORTEST and not is_ordinary(value):
        _KNOWN.mark(value)


def _checked(value: object) -> str:
    if isinstance(value, str) and len(value.strip()) >= _SHORTEST_MARKED:
        return value.strip()
    given = f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"mark_secret was given {given}, and takes a text of at least {_SHORTEST_MARKED}"
        " characters: a shorter one would be replaced in the middle of ordinary words"
    )


#: The folders of a shell: their names contain the word for a password.
_FOLDERS = ("PWD", "OLDPWD")


def _secrets_of_variable(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in the value of an environment variable."""
    value = value.strip()
    if len(value) < _SHORTEST or name in _FOLDERS:
        return
    passwords = [match["url"] or match["setting"] for match in _password_in().finditer(value)]
    for password in passwords:
        decoded = unquote(password)
        if len(decoded) >= _SHORTEST and not is_ordinary(decoded):
            yield decoded
    is_secret = is_secret_name(name, any_key=True) and not is_ordinary(value)
    if is_secret and not _is_open_address(value):
        yield value


def _is_open_address(value: str) -> bool:
    """Return whether a value is an address without a user in it."""
    return "://" in value and "@" not in value and not any(shaped_secrets(value))


@cache
def _password_in() -> re.Pattern[str]:
    return re.compile(
        r"""://[^\s/?#:@]{0,200}+:(?P<url>[^\s/@]{1,300}+)@|(?<![A-Za-z0-9])"""
        r"""(?i:password|passwd|pwd)\s{0,4}=\s{0,4}(?P<setting>[^\s;&"']{1,300}+)"""
    )


def _needles_of(value: str, name: str | None) -> Iterator[_Needle]:
    """Yield a secret as it is, as it reads in JSON, and as it reads in a form."""
    quoted = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    for text in {value, *quoted, quote_plus(value, errors="surrogateescape")}:
        yield _Needle(text, name)


# --- texts -----------------------------------------------------------------------------------


def redact_text(text: str, also: tuple[str, ...] = (), *, encoded: bool = True) -> str:
    """Return a text with every secret replaced by ``[redacted]`` or ``[redacted:NAME]``.

    Values in ``also`` are replaced, too, if they are long enough to stand out from other text.
    Not ``encoded``: those that are percent-encoded or in base64 are not looked for.
    """
    if len(text) < _SHORTEST_MARKED:
        return text
    needles = _KNOWN.needles()
    for value in also:
        if len(value) >= _SHORTEST_MARKED and not is_ordinary(value):
            needles += tuple(_needles_of(value, None))
    places = [*_secrets_in(text, needles)]
    if encoded:
        places += (*_percent_encoded(text, needles), *_encoded_in_base64(text, needles))
    found = _merged(places)
    if not found:
        return text
    parts, end = [], 0
    for secret in found:
        label = f"[redacted:{secret.name}]" if secret.name else REDACTED
        parts += [text[end : secret.start], label]
        end = secret.end
    return "".join([*parts, text[end:]])


def _merged(found: Iterable[_Found]) -> list[_Found]:
    """Return the places in order; those that overlap are one, with the first name among them."""
    merged: list[_Found] = []
    for secret in sorted(found, key=lambda each: (each.start, -each.end)):
        last = merged[-1] if merged else None
        if last is None or secret.start >= last.end:
            merged.append(secret)
        else:
            end = max(last.end, secret.end)
            merged[-1] = _Found(last.start, end, last.name or secret.name)
    return merged


def _secrets_in(text: str, needles: tuple[_Needle, ...]) -> Iterator[_Found]:
    """Yield every secret that stands in a text as it is."""
    for needle in needles:
        at = text.find(needle.text)
        while at >= 0:
            end = at + len(needle.text)
            yield _Found(at, end, needle.name)
            at = text.find(needle.text, end)
    for start, end in shaped_secrets(text):
        yield _Found(start, end, None)


@cache
def _address_run() -> re.Pattern[str]:
    return re.compile(r"""[^\s"'<>\\^`{|}]++""")


def _percent_encoded(text: str, needles: tuple[_Needle, ...]) -> Iterator[_Found]:
    """Yield the secrets that appear when the percent codes of a run of characters are decoded."""
    for run in _address_run().finditer(text) if "%" in text else ():
        if "%" not in run[0]:
            continue
        decoded = unquote(run[0], errors="surrogateescape")
        for start, end, name in _secrets_in(decoded, needles):
            secret = decoded[start:end]
            at = run.start() + run[0].find(secret)
            # A secret without codes in it leaves the rest readable.
            is_plain = run[0].count(secret) == 1
            yield _Found(*((at, at + len(secret)) if is_plain else run.span()), name)


def _encoded_in_base64(text: str, needles: tuple[_Needle, ...]) -> Iterator[_Found]:
    """Yield the runs of characters that have a secret when they are decoded as base64.

    An encoded text may start anywhere in its run, as in ``path/c2Vj…``: so a run is decoded four
    times. All runs are searched as one text, because there may be many short ones.
    """
    pattern = _base64_run()
    runs = [match for span in token_runs(text) for match in pattern.finditer(text, *span)]
    runs = [run for run in runs if run[0].strip(_HEX)]  # digests and UUIDs, which are many
    for offset in range(4 if runs else 0):
        decoded = [_decoded(run[0], offset) for run in runs]
        starts = [0, *accumulate(len(each) + 1 for each in decoded)]
        for secret in _secrets_in("\n".join(decoded), needles):
            first = bisect_right(starts, secret.start) - 1
            last = bisect_right(starts, secret.end - 1) - 1
            for run in runs[first : last + 1]:
                yield _Found(*run.span(), secret.name)


@cache
def _base64_run() -> re.Pattern[str]:
    return re.compile("[A-Za-z0-9+/_-]{20,}+={0,2}")


_HEX = "0123456789abcdef-"
_ALPHABET = {ord("-"): "+", ord("_"): "/", ord("="): None}


def _decoded(run: str, offset: int) -> str:
    """Return the text that the characters of a run encode from ``offset`` on."""
    characters = run.translate(_ALPHABET)[offset:]
    length = len(characters) - (len(characters) % 4 == 1)  # one character alone is no byte
    padded = characters[:length] + "=" * (-length % 4)
    return binascii.a2b_base64(padded).decode(errors="replace")


def cut(text: str, most: int) -> str:
    """Return the start of a text that is too long, cut after its secrets were replaced.

    Half a secret would not be found afterwards. A text that is short enough is not changed.
    """
    return text if len(text) <= most else redact_text(text[: most + _CUT_MARGIN])[:most]


# --- values ----------------------------------------------------------------------------------


def redact_value(value: object, also: tuple[str, ...] = ()) -> object:
    """Return a JSON-like value with every secret replaced, also the values under secret names.

    Texts are redacted as ``redact_text`` does; the value of a key such as ``password`` or
    ``api_key`` is replaced whatever it is. Lists, tuples and dicts are copied; other values stay.
    """
    if isinstance(value, str):
        return redact_text(value, also)
    if isinstance(value, dict):
        return {
            redact_text(key, also) if isinstance(key, str) else key: (
                _hidden(item)
                if isinstance(key, str) and is_secret_name(key)
                else redact_value(item, also)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [redact_value(item, also) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _hidden(value: object) -> object:
    """Return a value with all its texts and numbers replaced; booleans and empty values stay."""
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    known = redact_text(value) if isinstance(value, str) else ""
    return known if known.startswith("[redacted") and known.endswith("]") else REDACTED
