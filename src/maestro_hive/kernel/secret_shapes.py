"""What a secret looks like: the shapes of keys and tokens, and names that say that a value is one.

A shape is looked for by a short text that is part of it, which is quick, and by its pattern only
where that occurs. No pattern takes longer than in proportion to the text: what repeats is possessive
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

#: Where a secret is in a text.
Span = tuple[int, int]

# --- shapes --------------------------------------------------------------------------------------


def _word_edge(before: str) -> str:
    r"""Return the pattern for what is before a word: none of these characters, but for some ends.

    These are the ends of an escape, such as ``\n`` or ``\u003d``, and of the code of a colour.
    """
    return (
        rf"(?:(?<![{before}]{{anchor}})|(?<=\\[nrtbf]{{anchor}})|(?<=\\x[0-9A-Fa-f]{{{{2}}}}{{anchor}})"
        r"|(?<=\\u00[0-9A-Fa-f]{{2}}{anchor})|(?<=[0-9\[]m{anchor}))"
    )


class Shape(NamedTuple):
    """A kind of secret: what it is found by, and the pattern of what follows that.

    The group ``secret`` of the pattern is the secret if there is one, or else all of it. Those that
    are ``accept`` refuses are none.
    """

    anchor: str
    rest: str
    accept: Callable[[str], bool] | None = None
    edge: str = _word_edge("A-Za-z0-9")


def _is_mixed(text: str) -> bool:
    """Return whether a text has a digit: words that are joined by hyphens have none."""
    return any(map(str.isdigit, text))


def _is_password(text: str) -> bool:
    """Return whether a password can be real: not what documents write for one, such as ``***``."""
    return not _PLACEHOLDER.fullmatch(text)


_PLACEHOLDER = re.compile(
    r"\W*|x+|X+|[^{}<>$\[\]]*+[{}<>$\[\]].*|%s|(?i:pass|passwd|password|pw|secret|token|your[-_]?\w*)"
)

#: Shapes that start a word.
_PREFIXED: tuple[Shape, ...] = (
    Shape("sk-", r"(?:ant|proj|svcacct|admin)-[A-Za-z0-9_-]{12,}+"),  # Anthropic, OpenAI
    Shape("sk-", r"[A-Za-z0-9_-]{20,}+", _is_mixed),
    Shape("sk_", r"(?:live|test)_[A-Za-z0-9]{10,}+"),  # Stripe
    Shape("rk_", r"(?:live|test)_[A-Za-z0-9]{10,}+"),
    Shape("whsec_", r"[A-Za-z0-9+/=]{16,}+"),
    Shape("AKIA", r"[A-Z0-9]{16}(?![A-Za-z0-9])"),  # AWS
    Shape("ASIA", r"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    Shape("ghp_", r"[A-Za-z0-9]{30,}+"),  # GitHub
    Shape("gho_", r"[A-Za-z0-9]{30,}+"),
    Shape("ghu_", r"[A-Za-z0-9]{30,}+"),
    Shape("ghs_", r"[A-Za-z0-9]{30,}+"),
    Shape("ghr_", r"[A-Za-z0-9]{30,}+"),
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
    Shape("ATATT", r"[A-Za-z0-9_=-]{16,}+"),  # Atlassian
    Shape("ATCTT", r"[A-Za-z0-9_=-]{16,}+"),
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
        r"(?:[^-]*+(?:-(?!----)[^-]*+)*+-----END[A-Z0-9 +]{0,50}-----"
        r"|(?:(?:\s|\\+[nr])*+[A-Za-z0-9+/=]{16,}+)*+)",
        edge="",
    ),
    *(
        Shape(
            name,
            rf"{_ASSIGNED}(?:(?i:bearer|basic|token|digest|apikey|bot)[ \t]{{1,4}})?+"
            # What is called or indexed is a name in a program.
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

#: How far from the id of an access key its secret is looked for.
_NEAR = 120

_HEX = frozenset("0123456789abcdefABCDEF")

#: The shortest run of characters of a key that one of ``_PREFIXED`` matches, and what it is found by.
_RUN = b"a" * 15
#: How many characters before a run its patterns look at.
_CONTEXT = 8
_TOKEN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.+/=~")
_MASK = bytes(ord("a") if byte in _TOKEN else ord(" ") for byte in range(256))


def shaped_secrets(text: str) -> Iterator[Span]:
    """Yield where the text has something in the shape of a secret, in no order."""
    yield from _matches(text, _patterns(_ANYWHERE))
    runs = token_runs(text)
    if not runs:
        return
    # Most of a text are words, which are too short to be a key: only the others are searched.
    pieces = [text[max(0, start - _CONTEXT) : end] for start, end in runs]
    starts = [0, *accumulate(len(piece) + 1 for piece in pieces)]
    access_keys = []
    for start, end in _matches("\n".join(pieces), _patterns(_PREFIXED)):
        piece = bisect_right(starts, start) - 1
        moved = max(0, runs[piece][0] - _CONTEXT) - starts[piece]
        yield start + moved, end + moved
        if text.startswith(("AKIA", "ASIA"), start + moved):
            access_keys.append((start + moved, end + moved))
    yield from _secrets_near(text, sorted(access_keys))


def token_runs(text: str) -> list[Span]:
    """Return where a text has many characters of keys in a row: ``A-Za-z0-9_-.+/=~``."""
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


def _secrets_near(text: str, access_keys: list[Span]) -> Iterator[Span]:
    """Yield where the secrets of access keys can be: 40 characters next to an id, not a hash."""
    searched = 0
    for start, end in access_keys:
        last = end + _NEAR
        for match in _access_secret().finditer(text, max(searched, start - _NEAR), last + 1):
            hashed = match[0].isalpha() or _HEX.issuperset(match[0])
            if match.end() <= last and not hashed:  # further on, it may be part of something longer
                yield match.span()
        searched = last - 40  # what starts before that was found


@cache
def _patterns(shapes: tuple[Shape, ...]) -> tuple[tuple[Shape, re.Pattern[str]], ...]:
    """Return shapes with their patterns, which are compiled when the first text is searched."""
    return tuple((shape, _pattern(shape)) for shape in shapes)


def _pattern(shape: Shape) -> re.Pattern[str]:
    # The anchor comes first, and what precedes it is looked back at: its search is one for a literal.
    anchor = re.escape(shape.anchor)
    edge = shape.edge.format(anchor=anchor)
    return re.compile(f"{anchor}{edge}{shape.rest}")


@cache
def _access_secret() -> re.Pattern[str]:
    return re.compile(r"(?<![A-Za-z0-9/+=_-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_-])")


# --- names ---------------------------------------------------------------------------------------

#: Words in a name that say that its value is a secret.
_SECRET_WORDS = frozenset(
    "apikey accesskey secretkey privatekey auth authorization credential credentials dsn passphrase"
    " passwd password passwords pgpassword private pwd secret secrets token jwt authtoken cookie".split()
)
#: Words before ``key`` that say so.
_KEY_WORDS = frozenset(
    "access account api app auth client consumer encryption deploy master private secret service"
    " session shared signing ssh storage".split()
)
#: Last words that say that it is something about a secret instead.
_ABOUT_WORDS = frozenset(
    "algorithm audience backend count dir directory email enabled endpoint env expires expiry file"
    " folder header host id ids issuer length limit method mode name names path policy port provider"
    " region scheme sock size ttl type uri url user username version".split()
)
#: Values that are none, whatever their name: what settings say, and the passwords of every example.
_ORDINARY = frozenset(
    "bearer changeme default development digest disabled docker enabled environment example"
    " external guest internal keyring localhost memory mysql optional password postgres postgresql"
    " production rabbitmq required secret staging system testing unlimited unknown".split()
)

_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(r"[-+]?[0-9][0-9_.,:]*(?:[eE][-+]?[0-9]+)?[A-Za-z]{0,3}")
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w.@+-]+(?:/[\w.@+-]*)+|(?:~|\.{1,2})/.*|/\w{1,30}")


#: Values have the same few names again and again.
_REMEMBERED_NAMES = 1024


def _words(name: str) -> list[str]:
    return [word.lower() for word in _NAME_WORDS.findall(name)]


@lru_cache(_REMEMBERED_NAMES)
def is_secret_name(name: str, *, any_key: bool = False) -> bool:
    """Return whether the value of something with this name should be a secret.

    ``any_key`` is for the names of environment variables, of which each that has the word ``key`` is
    one; elsewhere, what is called a key is most often what something is found by.
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
