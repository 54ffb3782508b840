"""The shapes of keys and tokens, and the names of secret values.

A shape is searched by a short text that is part of it, which is quick, and by its pattern only
where that occurs. The time of each pattern is proportional to the text: repetitions are possessive
or bounded, and a place that could be tried again and again starts at the edge of a word.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cache, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The place of a secret in a text.
Span = tuple[int, int]

# --- shapes ----------------------------------------------------------------------------------


def _word_edge(before: str) -> str:
    r"""Return the pattern before a word: none of these characters, except at the end of some.

    These are escapes, such as ``\n`` or ``\u003d``, and the code of a colour.
    """
    return (
        rf"(?:(?<![{before}]{{anchor}})|(?<=\\[nrtbf]{{anchor}})"
        r"|(?<=\\x[0-9A-Fa-f]{{2}}{anchor})|(?<=\\u00[0-9A-Fa-f]{{2}}{anchor})"
        r"|(?<=[0-9\[]m{anchor}))"
    )


class Shape(NamedTuple):
    """A kind of secret: the text it is found by, and the pattern of the rest.

    The group ``secret`` of the pattern is the secret; without one, it is the whole match. A match
    that ``accept`` refuses is no secret.
    """

    anchor: str
    rest: str
    accept: Callable[[str], bool] | None = None
    edge: str = _word_edge("A-Za-z0-9")


def _is_mixed(text: str) -> bool:
    """Return whether a text has a digit: words joined by hyphens have none."""
    return any(map(str.isdigit, text))


def _is_password(text: str) -> bool:
    """Return whether a password can be real: not the ``***`` or ``<password>`` of documents."""
    return not _PLACEHOLDER.fullmatch(text)


_PLACEHOLDER = re.compile(
    r"\W*|x+|X+|[^{}<>$\[\]]*+[{}<>$\[\]].*|%s"
    r"|(?i:pass|passwd|password|pw|secret|token|your[-_]?\w*)"
)

#: Shapes that start a word.
_PREFIXED: tuple[Shape, ...] = (
    Shape("sk-", r"(?:ant|proj|svcacct|admin)-[A-Za-z0-9_-]{12,}+"),  # Anthropic, OpenAI
    Shape("sk-", r"[A-Za-z0-9_-]{20,}+", _is_mixed),
    *(Shape(name, r"(?:live|test)_[A-Za-z0-9]{10,}+") for name in ("sk_", "rk_")),  # Stripe
    Shape("whsec_", r"[A-Za-z0-9+/=]{16,}+"),
    *(Shape(name, r"[A-Z0-9]{16}(?![A-Za-z0-9])") for name in ("AKIA", "ASIA")),  # AWS
    Shape("gh", r"[pousr]_[A-Za-z0-9]{30,}+"),  # GitHub
    Shape("github_pat_", r"[A-Za-z0-9_]{20,}+"),
    Shape("glpat-", r"[A-Za-z0-9_-]{20,}+"),  # GitLab
    Shape("xox", r"[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}+", _is_mixed),  # Slack
    Shape("xapp-", r"[A-Za-z0-9-]{10,}+", _is_mixed),
    Shape("hooks.slack.com/", r"[a-z]{1,20}/(?P<secret>[A-Za-z0-9_/-]{16,}+)"),
    Shape("AIza", r"[A-Za-z0-9_-]{35}"),  # Google
    Shape("ya29.", r"[A-Za-z0-9._-]{20,}+"),
    Shape("GOCSPX-", r"[A-Za-z0-9_-]{20,}+"),
    # The start of a web token is that of a run of its characters, which is scanned once.
    Shape(
        "eyJ",
        r"[A-Za-z0-9_-]{5,}+\.eyJ[A-Za-z0-9_-]{5,}+(?:\.[A-Za-z0-9_-]*+)?",
        edge=_word_edge("A-Za-z0-9_-"),
    ),
    *(Shape(name, r"[A-Za-z0-9_=-]{16,}+") for name in ("ATATT", "ATCTT")),  # Atlassian
    Shape("npm_", r"[A-Za-z0-9]{30,}+"),
    Shape("pypi-", r"[A-Za-z0-9_-]{20,}+", _is_mixed),
    Shape("hf_", r"[A-Za-z0-9]{20,}+"),  # Hugging Face
    Shape("gsk_", r"[A-Za-z0-9]{20,}+"),  # Groq
    Shape("xai-", r"[A-Za-z0-9]{20,}+"),
    Shape("SG.", r"[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),  # SendGrid
)

#: After a name: as in ``name: value``, ``"name": "value"``, ``name=value``, ``("name", "value")``.
_ASSIGNED = r"""\\?["']?[ \t]{0,4}(?:=>|[:=,])[ \t]{0,4}b?\\?["']?"""

#: Shapes that stand anywhere: in a frame, or after the name of a header or setting.
_ANYWHERE: tuple[Shape, ...] = (
    Shape(
        "-----BEGIN",
        # To its end; if that was cut off, as much as looks like it. In forms a space is a plus.
        r"[ +][A-Z0-9 +]{0,40}PRIVATE[ +]KEY(?:[ +]BLOCK)?-----"
        # No possessive groups: they match wrongly in early versions of Python 3.11.
        r"(?:(?s:(?!-----).)*-----END[A-Z0-9 +]{0,50}-----"
        r"|(?:(?:\s|\\+[nr])*[A-Za-z0-9+/=]{16,})*)",
        edge="",
    ),
    *(
        Shape(
            name,
            rf"{_ASSIGNED}(?:(?i:bearer|basic|token|digest|apikey|bot)[ \t]{{1,4}})?+"
            # A word before a bracket is a name in a program.
            r"(?P<secret>[A-Za-z0-9._~+/=:-]{6,}+)(?![(\[])",
            _is_password,
            edge="",
        )
        for name in "uthorization UTHORIZATION".split()
    ),
    *(
        Shape(name, r"[ \t]{1,4}(?P<secret>[A-Za-z0-9._~+/=-]{10,}+)", _is_mixed, edge="")
        for name in ("Bearer", "bearer", "BEARER")
    ),
    Shape(
        "://",
        r"""[^\s/?#:@"'<>]{0,200}+:(?P<secret>[^\s/@"'<>]{1,300}+)@""",
        _is_password,
        edge="",
    ),
    *(
        Shape(name, rf"{_ASSIGNED}(?P<secret>[A-Za-z0-9/+]{{40}})(?![A-Za-z0-9/+=])", edge="")
        for name in ("ccess_key", "CCESS_KEY", "ccessKey", "ccess-key", "cret_key", "CRET_KEY")
    ),
)

#: The shortest run of characters of a key that one of ``_PREFIXED`` matches, in the mask.
_RUN = b"a" * 15
#: How many characters before a run its patterns look at.
_CONTEXT = 8
_TOKEN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.+/=~")
_MASK = bytes(ord("a") if byte in _TOKEN else ord(" ") for byte in range(256))


def shaped_secrets(text: str) -> Iterator[Span]:
    """Yield the places of all texts in the shape of a secret, in no order."""
    yield from _matches(text, _patterns(_ANYWHERE))
    runs = token_runs(text)
    if not runs:
        return
    # Most of a text is words, too short to be a key: only the other runs are searched.
    pieces = [text[max(0, start - _CONTEXT) : end] for start, end in runs]
    starts = [0, *accumulate(len(piece) + 1 for piece in pieces)]
    for start, end in _matches("\n".join(pieces), _patterns(_PREFIXED)):
        piece = bisect_right(starts, start) - 1
        moved = max(0, runs[piece][0] - _CONTEXT) - starts[piece]
        yield start + moved, end + moved


def token_runs(text: str) -> list[Span]:
    """Return the places of many characters of keys in a row: ``A-Za-z0-9_-.+/=~``."""
    mask = text.encode("ascii", "replace").translate(_MASK)  # a byte for each character
    found = []
    start = mask.find(_RUN)
    while start >= 0:
        end = mask.find(b" ", start + len(_RUN))
        end = len(mask) if end < 0 else end
        found.append((start, end))
        start = mask.find(_RUN, end)
    return found


def _matches(text: str, shapes: tuple[tuple[Shape, re.Pattern[str]], ...]) -> Iterator[Span]:
    for shape, pattern in shapes:
        if shape.anchor not in text:
            continue
        group = "secret" if pattern.groups else 0
        for match in pattern.finditer(text):
            start, end = match.span(group)
            if shape.accept is None or shape.accept(text[start:end]):
                yield start, end


@cache
def _patterns(shapes: tuple[Shape, ...]) -> tuple[tuple[Shape, re.Pattern[str]], ...]:
    """Return shapes with their patterns, compiled when the first text is searched."""
    return tuple((shape, _pattern(shape)) for shape in shapes)


def _pattern(shape: Shape) -> re.Pattern[str]:
    # The anchor comes first, and the edge is a look-behind: so the search is one for a literal.
    anchor = re.escape(shape.anchor)
    edge = shape.edge.format(anchor=anchor)
    return re.compile(f"{anchor}{edge}{shape.rest}")


# --- names -----------------------------------------------------------------------------------

#: Words in the names of secret values.
_SECRET_WORDS = frozenset(
    "apikey accesskey secretkey privatekey auth authorization credential credentials dsn"
    " passphrase passwd password passwords pgpassword private pwd secret secrets token jwt"
    " authtoken cookie".split()
)
#: Words before ``key`` in such names.
_KEY_WORDS = frozenset(
    "access account api app auth client consumer encryption deploy master private secret service"
    " session shared signing ssh storage".split()
)
#: Last words of names of things about a secret.
_ABOUT_WORDS = frozenset(
    "algorithm audience backend count dir directory email enabled endpoint env expires expiry"
    " file folder header host id ids issuer length limit method mode name names path policy port"
    " provider region scheme sock size ttl type uri url user username version".split()
)
#: Values that are no secrets, whatever their name: words of settings, passwords of examples.
_ORDINARY = frozenset(
    "bearer changeme default development digest disabled docker enabled environment example"
    " external guest internal keyring localhost memory mysql optional password postgres postgresql"
    " production rabbitmq required secret staging system testing unlimited unknown".split()
)

_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(r"[-+]?[0-9][0-9_.,:]*(?:[eE][-+]?[0-9]+)?[A-Za-z]{0,3}")
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w.@+-]+(?:/[\w.@+-]*)+|(?:~|\.{1,2})/.*|/\w{1,30}")


#: How many names are remembered: values have the same few again and again.
_REMEMBERED_NAMES = 1024


def _words(name: str) -> list[str]:
    return [word.lower() for word in _NAME_WORDS.findall(name)]


@lru_cache(_REMEMBERED_NAMES)
def is_secret_name(name: str, *, any_key: bool = False) -> bool:
    """Return whether a value with this name should be a secret.

    ``any_key`` is for environment variables, where every name with the word ``key`` is one;
    elsewhere, a key is most often an identifier.
    """
    words = _words(name)
    if not words or words[-1] in _ABOUT_WORDS or "public" in words or "project" in words:
        return False
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    if "key" not in words:
        return False
    return any_key or not _KEY_WORDS.isdisjoint(words)


def is_ordinary(value: str) -> bool:
    """Return whether a value is a common word, a number or a path, whatever its name says."""
    return bool(value.lower() in _ORDINARY or _NUMBER.fullmatch(value) or _PATH.fullmatch(value))
