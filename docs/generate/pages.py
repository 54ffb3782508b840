"""Which pages there are: made from the code alone, or executed; and where the pictures are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from docs.generate import api_page, cli_page, events_page, values_page

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]

#: Come out the same wherever they are made.
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/api.md": api_page.write,
    "docs/reference/cli.md": cli_page.write,
    "docs/reference/events.md": events_page.write,
    "docs/howto/values.md": values_page.write,
}

#: Executed from top to bottom, each in a fresh folder.
EXECUTED = (
    "README.md",
    "docs/tutorial.md",
    "docs/howto/errors.md",
    "docs/howto/escalate.md",
    "docs/howto/heal.md",
    "docs/howto/logging.md",
    "docs/howto/test-your-workflow.md",
    "docs/howto/stream-output.md",
    "docs/howto/schedules.md",
    "docs/howto/services.md",
    "docs/howto/budgets.md",
    "docs/security.md",
    "docs/howto/task-graphs.md",
    "docs/howto/run-a-task-graph.md",
    "docs/howto/agents.md",
    "docs/howto/coming-from-zerg.md",
    "docs/howto/policy.md",
)

PICTURES = ROOT / "docs" / "pictures"
