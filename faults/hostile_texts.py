"""Texts that a hostile or broken program could write where we read a document."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEEP = 100_000


def with_digest(document: bytes) -> bytes:
    """Return a document with a valid digest."""
    digest = hashlib.sha256(document).hexdigest().encode()
    return b'{"document":' + document + b',"sha256":"' + digest + b'"}\n'


def plain() -> Iterator[tuple[str, bytes]]:
    """Yield texts that are not a document, or not JSON."""
    yield "empty", b""
    yield "nul", b"\0"
    yield "nuls", b"\0" * 100_000
    yield "space", b" " * 1_000_000
    yield "byte order mark", b"\xef\xbb\xbf{}"
    yield "utf-16", '{"a": 1}'.encode("utf-16")
    yield "bad utf-8", b'{"a":"\xff\xfe"}'
    yield "overlong utf-8", b'{"a":"\xc0\xaf"}'
    yield "surrogate", b'{"a":"\xed\xa0\x80"}'
    yield "half a string", b'{"a":"'
    yield "half an escape", b'{"a":"\\u12'
    yield "null", b"null"
    yield "a number", b"42"
    yield "a list", b"[]"
    yield "an object", b"{}"
    yield "pickle", b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94."
    yield "elf", b"\x7fELF" + b"\0" * 200
    yield "gzip", b"\x1f\x8b\x08\0\0\0\0\0"
    yield "ten million digits", b"9" * 10_000_000
    yield from _nested()


def _nested() -> Iterator[tuple[str, bytes]]:
    for depth in (101, 1000, _DEEP):
        yield f"lists {depth} deep", b"[" * depth + b"]" * depth
        yield f"objects {depth} deep", b'{"a":' * depth + b"1" + b"}" * depth
        yield f"open lists {depth} deep", b"[" * depth


def odd_values() -> Iterator[tuple[str, bytes]]:
    """Yield JSON, or nearly JSON, to use in place of a value."""
    yield "NaN", b"NaN"
    yield "Infinity", b"Infinity"
    yield "minus Infinity", b"-Infinity"
    yield "1e999", b"1e999"
    yield "minus 1e999", b"-1e999"
    yield "tiny", b"1e-999999999"
    yield "5000 digits", b"1" * 5000
    yield "a million digits", b"1" * 1_000_000
    yield "a long exponent", b"1e" + b"9" * 10_000
    yield "key twice", b'{"a":1,"a":2}'
    yield "key twice, escaped", b'{"a":1,"\\u0061":2}'
    yield "lone surrogate", b'"\\ud800"'
    yield "a control character", b'"\x01"'
    yield "deep", b"[" * 5000 + b"]" * 5000
    yield "just too deep", b"[" * 101 + b"]" * 101
    yield "a negative", b"-1"
    yield "10^12", b"1000000000000"
    yield "2^63", b"9223372036854775808"
    yield "2^200", str(2**200).encode()
    yield "a text", b'"text"'
    yield "true", b"true"
    yield "a float", b"1.5"
    yield "an unknown tag", b'{"$":"object","v":1}'
    yield "a module's class", b'{"$":"dataclass","t":"os:system","v":{}}'
    yield "subprocess", b'{"$":"dataclass","t":"subprocess:Popen","v":{"args":"true"}}'
    yield "a bad datetime", b'{"$":"datetime","v":"tomorrow"}'
    yield "a bad decimal", b'{"$":"decimal","v":"1e9999999999999"}'
    yield "a bad uuid", b'{"$":"uuid","v":7}'
    yield "a bad set", b'{"$":"set","v":[[]]}'
    yield "bad bytes", b'{"$":"bytes","v":"***"}'
    yield "a tag of a tag", b'{"$":{"$":"path"},"v":"/etc/passwd"}'


def heads(kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield documents with a valid digest whose format, kind or shape is wrong."""
    for name, number in (
        ("format 2", b"2"),
        ("format 10^30", b"1" + b"0" * 30),
        ("format 0", b"0"),
        ("format -1", b"-1"),
        ("format true", b"true"),
        ("format 1.0", b"1.0"),
        ("format text", b'"1"'),
        ("format null", b"null"),
    ):
        yield name, with_digest(b'{"format":%s,"kind":"%s"}' % (number, kind.encode()))
    yield "no format", with_digest(b'{"kind":"%s"}' % kind.encode())
    yield "no kind", with_digest(b'{"format":1}')
    yield "another kind", with_digest(b'{"format":1,"kind":"escalation"}')
    yield "kind is a list", with_digest(b'{"format":1,"kind":["%s"]}' % kind.encode())
    yield "digested list", with_digest(b"[]")
    yield "digested null", with_digest(b"null")
    yield "digested nothing", with_digest(b"")
    yield (
        "digested twice",
        with_digest(with_digest(b'{"format":1,"kind":"%s"}' % kind.encode()).strip()),
    )
    yield "only the head", with_digest(b'{"format":1,"kind":"%s"}' % kind.encode())
    good = with_digest(b'{"format":1,"kind":"%s"}' % kind.encode())
    yield "another digest", good[:-20] + b"0" * 10 + good[-10:]
    yield "digest in capitals", good[:-67] + good[-67:-3].upper() + good[-3:]
    yield "no line end", good.rstrip()
    yield "two line ends", good + b"\n"
    yield "a space before", b" " + good
    yield "twice in a row", good + good


def altered(members: dict[str, object], kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield documents with a valid digest in which one member, at any depth, is replaced."""
    base = {**members, "format": 1, "kind": kind}
    for path in _paths(members):
        for name, value in odd_values():
            text = json.dumps(_replaced(base, path, "@@"), separators=(",", ":"), sort_keys=True)
            shown = ".".join(map(str, path))
            yield f"{name} at {shown}", with_digest(text.encode().replace(b'"@@"', value, 1))


def _paths(node: object, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items: list[tuple[str | int, object]] = []
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list):
        items += list(enumerate(node))[:2]
    for key, value in items:
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _replaced(node: object, path: tuple[str | int, ...], value: object) -> object:
    if not path:
        return value
    if isinstance(node, dict):
        return {k: _replaced(v, path[1:], value) if k == path[0] else v for k, v in node.items()}
    assert isinstance(node, list)
    return [_replaced(v, path[1:], value) if k == path[0] else v for k, v in enumerate(node)]


def bad_differences(kind: str, workflow: str) -> Iterator[tuple[str, bytes]]:
    """Yield runs with a valid digest whose large values have a wrong size, base or digest."""
    one, two = "11" * 32, "22" * 32
    cases: dict[str, dict[str, object]] = {
        "its own base": {one: {"base": one, "pieces": [[0, 5]]}},
        "each the base of the other": {
            one: {"base": two, "pieces": [[0, 5]]},
            two: {"base": one, "pieces": [[0, 5]]},
        },
        "a copy of 10^12": {one: {"base": two, "pieces": [[0, 10**12]]}, two: {"whole": "x"}},
        "255 MB out of 1 MB": {
            one: {"base": two, "pieces": [[0, 2550]] * 100_000},
            two: {"whole": "x" * 3000},
        },
        "beyond its base": {one: {"base": two, "pieces": [[10**9, 10]]}, two: {"whole": "x"}},
        "a missing base": {one: {"base": two, "pieces": [[0, 1]]}},
        "no pieces": {one: {"base": two}, two: {"whole": 1}},
        "pieces of text": {one: {"base": two, "pieces": "abc"}, two: {"whole": 1}},
        "negative pieces": {one: {"base": two, "pieces": [[-1, -5]]}, two: {"whole": 1}},
        "a true piece": {one: {"base": two, "pieces": [[True, True]]}, two: {"whole": "xx"}},
        "another digest": {one: {"whole": "not it"}},
        "not an object": {one: 7},
        "none": {},
    }
    for name, values in cases.items():
        yield f"values: {name}", with_digest(_run_text(kind, workflow, one, values))


def _run_text(kind: str, workflow: str, digest: str, values: dict[str, object]) -> bytes:
    entry = {
        "at": 1,
        "attempt": 1,
        "facts": None,
        "identity": None,
        "kind": "fields_set",
        "seq": 1,
        "sha256": digest,
        "step": 0,
    }
    run = {
        "entries": [entry],
        "fence": 1,
        "saved_at": "2030-01-01T00:00:00+00:00",
        "seq": 1,
        "state": {},
        "values": values,
        "workflow_id": workflow,
    }
    body: dict[str, object] = {"format": 1, "kind": kind}
    if kind == "checkpoint":
        body |= {
            "checkpoint_id": "hostile",
            "workflow_id": workflow,
            "created_at": "2030-01-01T00:00:00+00:00",
            "expires_at": None,
            "state": run,
        }
    else:
        body["run"] = run
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
