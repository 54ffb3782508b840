"""``docs/reference/events.md``: the events of a run, as programs receive them."""

from __future__ import annotations

from docs.generate import sources
from maestro_hive.maestro.state.events import EVENT_TYPES, RunEvent

_HEAD = """\
# The events of a run

`async for event in hive.events(run_id)` yields these records, and `maestro events RUN --json`
prints them, one JSON object per line, with the name given here under `event` and times as
ISO 8601. They live in `maestro_hive.maestro.state.events`. Values are not in them: a result or
a memory may be large, and `maestro show` has it. `str(event)` is a line for people. This page is
made from the code by `make docs`, and a test compares the two.

"""


def write() -> str:
    """Return the page."""
    shared = {each.name for each in sources.attributes(RunEvent)}
    lines = [_HEAD, f"{sources.documentation(RunEvent)}\n\n"]
    lines += [f"- `{each.text}`\n" for each in sources.attributes(RunEvent)]
    lines.append("\n| event | in JSON | means | and has |\n|---|---|---|---|\n")
    for kind in EVENT_TYPES:
        own = [each.text for each in sources.attributes(kind) if each.name not in shared]
        shown = ", ".join(f"`{_in_a_table(text)}`" for text in own if not text.startswith("which"))
        means = " ".join(sources.documentation(kind).split())
        name = _json_name(kind.__name__)
        lines.append(f"| `{kind.__name__}` | `{name}` | {means} | {shown} |\n")
    return "".join(lines)


def _json_name(name: str) -> str:
    words = "".join(f"_{each.lower()}" if each.isupper() else each for each in name)
    return words.lstrip("_")


def _in_a_table(text: str) -> str:
    return text.replace("|", "\\|")
