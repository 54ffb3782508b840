"""Values for those who have not imported the classes of what a program stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import UnknownClassError

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.records import Entry

    Load = Callable[[Entry], bytes | None]


def plainly(load: Load) -> Load:
    """Return ``load``, by which a value of a class that nobody knows here is its plain JSON."""

    def loaded(entry: Entry) -> bytes | None:
        data = load(entry)
        if data is None:
            return None
        try:
            codec.decode(data)
        except UnknownClassError:
            tree = codec.parse(data, depth=codec.DOCUMENT_DEPTH)
            return codec.encode(tree, depth=codec.WHOLE_DEPTH).data
        return data

    return loaded
