"""The pytest plugin: two fixtures, which load the rest when a test asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.hive.hive import Hive
    from maestro_hive.testing.kit import Kit


@pytest.fixture
def hive_kit() -> Iterator[Kit]:
    """A kit of maestro-hive: a Hive in memory, time that skips, stand-ins, early answers, crashes."""
    from maestro_hive.testing.kit import use

    with use() as kit:
        yield kit


@pytest.fixture
def hive(hive_kit: Kit) -> Hive:
    """A Hive of maestro-hive in memory; that of ``hive_kit``."""
    return hive_kit.hive
