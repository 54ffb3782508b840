"""``docs/howto/values.md``: what can be stored, and how it comes back, as the codec does it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, auto
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
from pydantic import BaseModel

from maestro_hive.maestro.state import codec

_HEAD = """\
# Values: what can be stored, and how it comes back

Arguments, results and answers are stored as JSON with tags, and what a workflow gets is always what
was read back, also the first time: a run that was killed and resumed sees the same values as one that
was not. No pickle is used, and nothing is imported because a stored text names it.

## What comes back the same

Order is kept, types too: a tuple is a tuple afterwards. Each value of this table was encoded and
decoded to make it; `make docs` writes the page, and a test compares the two.

| type | for example | stored as |
|---|---|---|
"""

_TAIL = """\

- One object in two places of a value comes back as two equal ones.
- A class derived from `dict`, `list`, `str`, `int` or `float` would come back as its base, so it is an
  error; convert it, or register it.
- A defaultdict comes back if its factory is `int`, `list`, `dict`, `set`, `str`, `float`, `bool` or
  `tuple`.
- Classes are found by the name they have in their module, among the modules that are imported when the
  value is read. `python app.py` stores the classes of `app`, not of `__main__`: both find the other's.
- A dataclass, pydantic model, enum or named tuple must be defined in a module, not in a function.

Anything else is an `EncodeError` that names the path, such as `result.users[3].photo`.

## Your own classes

`register_codec` says how instances of exactly that class are stored:

```python
from maestro_hive import register_codec

register_codec(Image, encode=lambda image: image.to_png(), decode=Image.from_png, name="image")
```

`encode` may return anything that can be stored. The name is written with every value, and finds the
codec when the value is read: it must stay the same, also when the class is moved. Without `name=` it is
`module:name` of the class. Call it where the class is defined, so that whoever has the class has the
codec.

A package can register its classes for all programs that have it installed, with an entry point that
names a function without arguments:

```toml
[project.entry-points."maestro_hive.codecs"]
images = "image_package.maestro:register_codecs"
```

It is called once, when a class or a name is met that nobody registered.

## What a step is identified by

A step is its persona, its name and its input, all of it: two calls with other values never share a
result. So an argument that cannot be encoded is an error, at the call, with its path (`input.client`).
If it does not matter to the result, leave it out by name; the step gets it as it is, and nothing of it
is stored:

```python
@hive.step(ignore=("client",))
async def ask(client: Client, prompt: str) -> str: ...
```

Or say yourself what identifies the call, with a text or a function of the arguments:

```python
@hive.step(key="invoice-{number}")
async def send(number: int, mailer: Mailer) -> None: ...
```

**Defaults are part of the input.** A call that leaves an argument out is the call that gives its
default. An argument that is added with a default changes nothing: a call with that default finds what
was recorded before the argument was there, as long as the default stays what it was when it was added.
A default that is changed is another input, and the step runs again.

**Methods** are steps, too. The instance is part of the identity, and there are two ways to say which
one it is:

```python
# By its encoding: a dataclass, a pydantic model, or register_codec.
@dataclass
class Writer:
    style: str

    @hive.step
    async def draft(self, topic: str) -> str: ...


# By a name that it gives: a text, the same after a restart. A property will do.
class Researcher:
    def __init__(self, name: str, client: Client) -> None:
        self.step_identity = name
        self.client = client

    @hive.step
    async def research(self, topic: str) -> str: ...
```

Equal instances are one: what one of them has recorded, the other finds. An instance that has neither is
an error at the call; `ignore=("self",)` leaves it out. By its encoding, the step gets a copy, as of any
argument; by its name, the instance itself, and it must not change it: after a restart the step is not
called, and the change would be missing. The step is called `Writer.draft`. Below `@staticmethod` and
`@classmethod`, `@hive.step` works as well; a workflow cannot be a method.

**One name is one step.** Two steps of one persona and name are refused when the second is made, also
when both are made by one piece of code, as in a loop: give each its own `name=`. A module that is
reloaded and a cell of a notebook that is executed again replace what they defined before.

`PersonaExecutor` takes any input: without a `workflow_id` nothing is encoded; with one it warns
(`UnencodableInputWarning`), and tells such calls apart by the rest of their input and by their order.
"""


class Colour(Enum):
    """An enum, as a user defines it."""

    RED = 1


class Access(Flag):
    """A flag, as a user defines it."""

    READ = auto()
    WRITE = auto()


@dataclass
class Part:
    """A dataclass, as a user defines it."""

    name: str


class Point(NamedTuple):
    """A named tuple, as a user defines it."""

    x: int


class User(BaseModel):
    """A pydantic model, as a user defines it."""

    name: str


def samples() -> dict[str, list[Any]]:
    """Return values to show, by what their type is called."""
    when = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    return {
        "`None`, `bool`, `int`, `str`": [None, True, 3, "é"],
        "`float`, with NaN, infinities and -0.0": [0.1, -0.0, math.nan, math.inf],
        "`complex`": [1 + 2j],
        "`list`, `dict`, in their order": [[1, 2], {"b": 1, "a": 2}],
        "`dict` with keys that are not texts": [{1: "a", (2, 3): "b"}],
        "`tuple`": [(1, "a")],
        "`set`, `frozenset`": [{1, 2}, frozenset({1})],
        "`range`": [range(1, 9, 2)],
        "`bytes`, `bytearray`": [b"abc", bytearray(b"abc")],
        "`collections`": [
            Counter("aab"),
            OrderedDict(b=1, a=2),
            defaultdict(list, a=[1]),
            deque([1], maxlen=3),
        ],
        "`Decimal`, `Fraction`": [Decimal("1.10"), Fraction(1, 3)],
        "`datetime`, `date`, `time`": [when, date(2030, 1, 2), time(3, 4)],
        "`timedelta`, `timezone`": [timedelta(days=1, seconds=5), timezone(timedelta(hours=1))],
        "`UUID`": [UUID(int=7)],
        "`Path`, `PurePath`": [Path("a/b"), PurePosixPath("a/b"), PureWindowsPath("a/b")],
        "enums and flags": [Colour.RED, Access.READ | Access.WRITE],
        "dataclasses": [Part("door")],
        "named tuples": [Point(1)],
        "pydantic models": [User(name="Ada")],
        "numpy scalars and arrays": [np.float32(0.5), np.arange(3, dtype="int16")],
    }


def write() -> str:
    """Return the page."""
    rows = [
        f"| {name} | {_listed(map(repr, values))} | {_listed(map(_stored, values))} |\n"
        for name, values in samples().items()
    ]
    return "".join([_HEAD, *rows, _TAIL])


def _stored(value: Any) -> str:
    data = codec.encode(value).data
    back = codec.decode(data)
    if type(back) is not type(value) or repr(back) != repr(value):
        raise ValueError(f"{value!r} comes back as {back!r}")
    return data.decode()


def _listed(texts: Any) -> str:
    shown = [text.replace("|", "\\|").replace(f"{__name__}:", "app:") for text in texts]
    return "<br>".join(f"`{text}`" for text in shown)
