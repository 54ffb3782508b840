"""Secrets are replaced in what leaves the process: logs, exports, reports, tickets.

Secrets are the values of environment variables whose names say so, what ``mark_secret`` was given, and
what has the shape of a key (``secret_shapes``); as they are, in base64 and percent-encoded. Each is
replaced by ``[redacted]``, that of an environment variable by ``[redacted:NAME]``.
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
from urllib.parse import quote_plus, unquote, unquote_to_bytes

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.secret_shapes import (
    is_ordinary,
    is_secret_name,
    shaped_secrets,
    token_runs,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from maestro_hive.kernel.secret_shapes import Span

#: What is read instead of a secret.
REDACTED = "[redacted]"

#: The shortest value of an environment variable that is a secret.
_SHORTEST = 6
#: The shortest value that can be marked: a shorter one is part of every text.
_SHORTEST_MARKED = 4
#: The shortest run of characters that is decoded as base64 to look for keys in it.
_SHORTEST_BASE64 = 20
#: The shortest line of base64 that is continued in the next one; mails and certificates wrap at 64.
_SHORTEST_WRAPPED = 60
#: How much more than what is left of a text is searched for secrets before it is cut.
_CUT_MARGIN = 1 << 16
#: How often what was decoded is decoded again.
_DEPTH = 2


class _Found(NamedTuple):
    """Where a secret is in a text, and the environment variable that has it."""

    start: int
    end: int
    name: str | None


class _Needle(NamedTuple):
    """A text that is a secret, or an encoded one; ``margin`` characters next to it are part of it."""

    text: str
    name: str | None
    margin: int = 0


# --- what is known to be secret ------------------------------------------------------------------


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
        """Return what to look for, made again when the environment has changed."""
        # The dict inside, if it is there: a log line is redacted in the time that a copy would take.
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
    """Replace this value by ``[redacted]`` in all that leaves the process; return it.

    For secrets that are in no environment variable: read from a file, or fetched from a vault. It is
    replaced in logs, exports, reports, tickets and error messages of the command line, also where it
    is encoded in base64 or percent-encoded, until the process ends.
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
        f"mark_secret was given {given}, and takes a text of at least {_SHORTEST_MARKED} characters:"
        " a shorter one would be replaced in the middle of ordinary words"
    )


#: Where a shell is and was: their names have the word for a password.
_FOLDERS = ("PWD", "OLDPWD")


def _secrets_of_variable(name: str, value: str) -> Iterator[str]:
    """Yield what is secret in the value of an environment variable."""
    value = value.strip()
    if len(value) < _SHORTEST or name in _FOLDERS:
        return
    secret_name = is_secret_name(name, any_key=True)
    passwords = [match["url"] or match["setting"] for match in _password_in().finditer(value)]
    for password in passwords:
        decoded = unquote(password)
        if len(decoded) >= _SHORTEST and not is_ordinary(decoded):
            yield decoded
    if secret_name and not is_ordinary(value) and not _is_open_address(value):
        yield value


def _is_open_address(value: str) -> bool:
    """Return whether a value is the address of something, with no user in it."""
    return "://" in value and "@" not in value and not any(shaped_secrets(value))


@cache
def _password_in() -> re.Pattern[str]:
    return re.compile(
        r"""://[^\s/?#:@]{0,200}+:(?P<url>[^\s/@]{1,300}+)@"""
        r"""|(?<![A-Za-z0-9])(?i:password|passwd|pwd)\s{0,4}=\s{0,4}(?P<setting>[^\s;&"']{1,300}+)"""
    )


def _needles_of(value: str, name: str | None) -> Iterator[_Needle]:
    """Yield how a secret can be written: plainly, escaped, in base64. Percent codes are decoded."""
    yield from (_Needle(text, name) for text in _escaped(value))
    encoded = value.encode(errors="surrogateescape")
    found = {piece for offset in range(3) for piece in _in_base64(encoded, offset)}
    yield from (_Needle(piece, name, margin=1) for piece in sorted(found))


def _escaped(value: str) -> set[str]:
    """Return a value as it is, and as it reads in JSON, in a representation and in a form."""
    quoted = (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value), ascii(value))
    return {value, quote_plus(value, errors="surrogateescape"), *(each[1:-1] for each in quoted)}


def _in_base64(value: bytes, offset: int) -> Iterator[str]:
    """Yield what is always there of a value in base64 if ``offset`` other bytes are before it."""
    whole = binascii.b2a_base64(bytes(offset) + value, newline=False).decode()
    # The first and the last character may have bits of what is before and after.
    piece = whole[(offset * 8 + 5) // 6 : (offset + len(value)) * 8 // 6]
    if len(piece) >= _SHORTEST:
        yield piece
        yield piece.replace("+", "-").replace("/", "_")


# --- texts ---------------------------------------------------------------------------------------


def redact_text(text: str, also: tuple[str, ...] = ()) -> str:
    """Return a text with every secret replaced by ``[redacted]`` or ``[redacted:NAME]``.

    What is in ``also`` is replaced, too, if it is not too short to be told from other text.
    """
    if len(text) < _SHORTEST_MARKED:
        return text
    needles = _KNOWN.needles()
    for value in also:
        if len(value) >= _SHORTEST_MARKED and not is_ordinary(value):
            needles += tuple(_needles_of(value, None))
    found = _merged(_secrets_in(text, needles, _DEPTH))
    if not found:
        return text
    parts, end = [], 0
    for secret in found:
        parts += [text[end : secret.start], _label(secret.name)]
        end = secret.end
    return "".join([*parts, text[end:]])


def _label(name: str | None) -> str:
    return f"[redacted:{name}]" if name else REDACTED


def _merged(found: Iterable[_Found]) -> list[_Found]:
    """Return where to replace, in order: what overlaps is one, with the name of the first that has one."""
    merged: list[_Found] = []
    for secret in sorted(found, key=lambda each: (each.start, -each.end)):
        last = merged[-1] if merged else None
        if last is None or secret.start >= last.end:
            merged.append(secret)
        else:
            end = max(last.end, secret.end)
            merged[-1] = _Found(last.start, end, last.name or secret.name)
    return merged


def _secrets_in(text: str, needles: tuple[_Needle, ...], depth: int) -> Iterator[_Found]:
    """Yield every secret of a text, also encoded ones."""
    for needle in needles:
        at = text.find(needle.text)
        while at >= 0:
            end = at + len(needle.text)
            yield _with_margin(text, at, end, needle)
            at = text.find(needle.text, end)
    for start, end in shaped_secrets(text):
        yield _Found(start, end, None)
    if depth:
        yield from _percent_encoded(text, needles, depth - 1)
        yield from _encoded_in_base64(text, needles, depth - 1)


def _with_margin(text: str, start: int, end: int, needle: _Needle) -> _Found:
    """Return a secret with the characters next to it that have some of its bits, and the padding."""
    if needle.margin:
        if start and text[start - 1] in _BASE64:
            start -= 1
        if end < len(text) and text[end] in _BASE64:
            end += 1
        while end < len(text) and text[end] == "=":
            end += 1
    return _Found(start, end, needle.name)


_BASE64 = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_")


@cache
def _percent_codes() -> re.Pattern[str]:
    return re.compile(r"%[0-9A-Fa-f]{2}(?:%[0-9A-Fa-f]{2})*+")


def _percent_encoded(text: str, needles: tuple[_Needle, ...], depth: int) -> Iterator[_Found]:
    """Yield the secrets that are there when percent codes are decoded."""
    codes = list(_percent_codes().finditer(text)) if "%" in text else []
    if not codes:
        return
    parts: list[str] = []
    starts: list[int] = []  # of each part in the text
    end = 0
    for code in codes:
        plain = text[end : code.start()]
        decoded = unquote_to_bytes(code[0]).decode(errors="surrogateescape")
        parts += [plain, decoded]
        starts += [end, code.start()]
        end = code.end()
    parts.append(text[end:])
    starts.append(end)
    decoded_starts = [0, *accumulate(map(len, parts))]
    ends = [*starts[1:], len(text)]
    for secret in _secrets_in("".join(parts), needles, depth):
        first = bisect_right(decoded_starts, secret.start) - 1
        last = bisect_right(decoded_starts, secret.end - 1) - 1
        start = starts[first] if first % 2 else starts[first] + secret.start - decoded_starts[first]
        stop = ends[last] if last % 2 else starts[last] + secret.end - decoded_starts[last]
        yield _Found(start, stop, secret.name)


def _encoded_in_base64(text: str, needles: tuple[_Needle, ...], depth: int) -> Iterator[_Found]:
    """Yield the runs of characters that have a secret when they are decoded as base64.

    Where the encoded text starts in its run is not known, as in ``path/c2Vj…``: so a run is decoded
    four times. All runs are searched as one text, because there may be many short ones.
    """
    runs = _base64_runs(text)
    if not runs:
        return
    characters = [_standard_base64(text[start:end]) for start, end in runs]
    for offset in range(4):
        decoded = [_decoded(each, offset) for each in characters]
        starts = [0, *accumulate(len(each) + 1 for each in decoded)]
        for secret in _secrets_in("\n".join(decoded), needles, depth):
            first = bisect_right(starts, secret.start) - 1
            last = bisect_right(starts, secret.end - 1) - 1
            for start, end in runs[first : last + 1]:
                yield _Found(start, end, secret.name)


def _base64_runs(text: str) -> list[Span]:
    """Return where a text has characters of base64 in a row; lines that were wrapped are one run."""
    runs: list[Span] = []
    run, more_lines = _base64_patterns()
    end = 0
    for first, last in token_runs(text):
        for match in run.finditer(text, max(first, end), last):
            end = match.end()
            if end - match.start() >= _SHORTEST_WRAPPED:
                more = more_lines.match(text, end)
                end = more.end() if more else end
            runs.append((match.start(), end))
    return runs


@cache
def _base64_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a run, and of the lines that follow it: the last one may be short."""
    line = r"(?:\r?\n|\\n)[A-Za-z0-9+/_-]++(?=[\r\n\"'=\\<]|$)"
    run = f"[A-Za-z0-9+/_-]{{{_SHORTEST_BASE64},}}+={{0,2}}"
    return re.compile(run), re.compile(f"(?:{line})++={{0,2}}")


_ALPHABET = {ord("-"): "+", ord("_"): "/", ord("\n"): None, ord("\r"): None, ord("="): None}


def _standard_base64(run: str) -> str:
    return run.replace("\\n", "").translate(_ALPHABET)


def _decoded(run: str, offset: int) -> str:
    """Return what the characters of a run say from ``offset`` on, a byte as a character."""
    length = len(run) - offset
    length -= length % 4 == 1  # one character alone is no byte
    padded = run[offset : offset + length] + "=" * (-length % 4)
    return binascii.a2b_base64(padded).decode("latin-1")


def cut(text: str, most: int) -> str:
    """Return the start of a text that is too long, cut after its secrets were replaced.

    Half a secret would not be found afterwards. A text that is short enough is not changed.
    """
    return text if len(text) <= most else redact_text(text[: most + _CUT_MARGIN])[:most]


def cut_start(text: str, most: int) -> str:
    """Return the end of a text that is too long, cut as ``cut`` does."""
    return text if len(text) <= most else redact_text(text[-most - _CUT_MARGIN :])[-most:]


# --- values --------------------------------------------------------------------------------------


def redact_value(value: object, also: tuple[str, ...] = ()) -> object:
    """Return a JSON-like value with every secret replaced, also what is under a name that says so.

    Texts are redacted as ``redact_text`` does; what is under a key such as ``password`` or ``api_key``
    is replaced whatever it looks like. Lists, tuples and dicts are copied; other values stay.
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
    """Return a value with all its texts and numbers replaced; what says nothing stays."""
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    known = redact_text(value) if isinstance(value, str) else ""
    return known if known.startswith("[redacted") and known.endswith("]") else REDACTED
