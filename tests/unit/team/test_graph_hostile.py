"""Large and hostile task graphs: read in time, or refused; nothing in them is executed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.team.graph import check_graph, simulate
from maestro_hive.team.graph.documents import MAX_BYTES, MAX_TOML_BYTES, MOST_LINES
from maestro_hive.team.graph.drawing import draw
from maestro_hive.team.graph.problems import MOST
from maestro_hive.team.graph.reading import MAX_TASKS
from maestro_hive.team.graph_files import check_file
from tests.timing import cpu_seconds, is_within
from tests.unit.team.graphs import document, good, task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What a hostile graph may take in CPU time; most take a hundredth of it.
_SECONDS = 10.0


def large(count: int, wide: int = 100) -> dict[str, Any]:
    """Return a graph as a program would write it: levels of equal size, each depends on the last."""
    tasks = []
    for number in range(count):
        level, at = divmod(number, wide)
        before = range((level - 1) * wide + at, (level - 1) * wide + at + 2) if level else ()
        tasks.append(
            task(
                f"SHOP-L{level + 1}-{at}",
                *(f"SHOP-L{level}-{each % wide}" for each in before),
                level=level + 1,
                description="Do what the title says, and do it well. " * 4,
                files={"create": [f"src/part{number}.py"], "modify": [], "read": ["README.md"]},
                verification={"command": "pytest -q && true", "timeout_seconds": 60},
                estimate_minutes=5 + number % 20,
            )
        )
    names = [each["id"] for each in tasks]
    levels = {
        str(level + 1): {"name": "part", "tasks": names[level * wide : (level + 1) * wide]}
        for level in range(count // wide)
    }
    return document(*tasks, levels=levels)


def test_ten_thousand_tasks_are_read_checked_and_planned_in_two_seconds() -> None:
    data = json.dumps(large(10_000)).encode()

    def plan() -> None:
        found = check_graph(data, "json")
        assert (found.errors, found.warnings) == ((), ())
        assert found.plan is not None
        assert len(simulate(found.plan, 8).lanes) == 8

    assert cpu_seconds(plan, enough=2.0) < 2.0


MANY = 2_000
LONG = "bcdefghijklmnopqrstuvwxyz-abcdefghijklmnopqrstuvwxyz"


def ids(prefix: str = "T") -> list[str]:
    return [f"{prefix}{number}" for number in range(MANY)]


def chain(**members: Any) -> list[Any]:
    return [
        task(each, *([f"T{number - 1}"] if number else []), **members)
        for number, each in enumerate(ids())
    ]


#: Documents that are as bad as they can be; what grows with the square of the size takes minutes.
HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "a long chain": lambda: document(*chain()),
    "a long circle": lambda: document(task("T0", f"T{MANY - 1}"), *chain()[1:]),
    "one file for all": lambda: document(*chain(files=["x"])),
    "one file without order": lambda: document(
        *(task(each, files=["x", f"d{at % 50}/"]) for at, each in enumerate(ids()))
    ),
    "one folder without order": lambda: document(
        *(
            task(each, files=["src/" if at % 3 == 0 else f"src/{at}"])
            for at, each in enumerate(ids())
        )
    ),
    "all in conflict": lambda: document(*map(task, ids()), conflict_matrix=[ids()] * 20),
    "a gate for each": lambda: document(
        *(task(each, level=at) for at, each in enumerate(ids())),
        levels={str(at): {"gates": [{"command": "x"}]} for at in range(MANY)},
    ),
    "many dependencies": lambda: document(
        *(
            task(f"T{at}", *(f"T{each}" for each in range(max(0, at - 100), at)))
            for at in range(1000)
        )
    ),
    "unknown dependencies": lambda: document(task("A", *(["x"] * 50_000))),
    "dependencies of another name": lambda: document(
        task("A", *(f"{each}-z{LONG}" for each in ids()[:1_100])),
        *(task(f"{each}-a{LONG}") for each in ids()[:499]),
    ),
    "dependencies within a level": lambda: document(
        *(task(f"T{at}", level=1) for at in range(15_000)),
        *(task(f"H{at}", *(f"T{each}" for each in range(15_000)), level=1) for at in range(20)),
    ),
    "wrong values": lambda: document(task("A", files=[0] * 100_000)),
    "unknown keys": lambda: document(task("A") | {f"dependencie{at}": 0 for at in range(5_000)}),
    "deep paths": lambda: document(
        *(task(each, files=["a/" * 2000, "../" * 1000 + "x"]) for each in ids()[:100])
    ),
    "many personas": lambda: document(
        task("A"), personas={each: {"command": "x " * 50} for each in ids()}
    ),
    "long texts": lambda: document(task("A", title="x" * 3_000_000, verification="'" * 3_000_000)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_read_or_refused_in_bounded_time(name: str) -> None:
    data = json.dumps(HOSTILE[name]()).encode()

    def check() -> None:
        found = check_graph(data, "json")
        assert len(found.errors) <= MOST
        assert len(found.warnings) <= MOST
        if found.plan is not None:
            simulate(found.plan, 8)

    assert cpu_seconds(check, enough=_SECONDS, tries=2) < _SECONDS


def test_a_document_over_the_limits_is_refused_at_once() -> None:
    found = [
        check_graph(b" " * (MAX_BYTES + 1), "json"),
        check_graph(b"#" * (MAX_TOML_BYTES + 1), "toml"),
        check_graph(json.dumps(document(*([0] * (MAX_TASKS + 1)))).encode(), "json"),
    ]
    assert [each.code for one in found for each in one.errors] == [
        "unreadable",
        "unreadable",
        "too-many-tasks",
    ]


def test_a_hundred_thousand_tasks_are_refused() -> None:
    tasks = ",".join(
        f'{{"id":"T{number}","title":"t","dependencies":[]}}' for number in range(100_000)
    )
    data = f'{{"feature":"f","tasks":[{tasks}]}}'.encode()
    (error,) = check_graph(data, "json").errors
    assert error.code == "too-many-tasks"


@pytest.mark.parametrize(
    "text",
    [
        "a = [" + "[" * 400_000,
        "x" * 400_000,
        "".join(f"[a.b{number}]\n" for number in range(4_000)),
        "a." * 400_000,
        "'a'." * 200_000,
        '"' * 400_000,
        "\\" * 400_000,
        "feature = '''" + "a.b " * 100_000 + "'''",
    ],
    ids=lambda text: str(text)[:12],
)
def test_hostile_toml_is_read_or_refused_in_bounded_time(text: str) -> None:
    assert cpu_seconds(lambda: check_graph(text.encode(), "toml"), _SECONDS, 2) < _SECONDS


def test_what_stands_in_titles_and_names_is_only_a_text_in_the_picture() -> None:
    evil = '</text><script>alert("x")</script>\x1b[2J\0&'
    plan = good(document(task("A", title=evil), levels={"1": {"name": evil}}, feature=evil)).plan
    assert plan is not None
    picture = draw(plan)
    assert "<script" not in picture
    assert not {"\x1b", "\0"} & set(picture)


def test_similar_names_are_suggested_for_the_first_unknown_dependencies_of_a_large_graph() -> None:
    ids_that_exist = [f"TASK-{number}" for number in range(100, 600)]
    unknown = [each.replace("TASK", "TSK") for each in ids_that_exist]
    tasks = [task("A", *unknown), *map(task, ids_that_exist)]
    found = check_graph(json.dumps(document(*tasks)).encode())
    likes = ["TASK-" in each.advice for each in found.errors]
    first = likes.index(False)
    assert 10 < first < 50
    assert not any(likes[first:])


def test_the_lines_of_the_first_errors_are_looked_for_whatever_the_form_is(tmp_path: Path) -> None:
    wrong = [f'[[tasks]]\nid = "{at}"\ntitle = "t"\noutput_schema = {{type = 7}}\n' for at in ids()]
    path = tmp_path / "g.toml"
    path.write_text('feature = "f"\n' + "".join(wrong))
    lines = [each.line for each in check_file(path).errors]
    assert lines[:MOST_LINES] == [5 + 4 * at for at in range(MOST_LINES)]
    assert lines[MOST_LINES:] == [None] * (MOST - MOST_LINES)


def test_many_errors_in_toml_cost_no_more_than_its_parser_takes(tmp_path: Path) -> None:
    """Most of the lines are empty, which the parser skips fast: each error had all of them split."""
    table = '[[tasks]]\nid = "T{}"\ntitle = "t"\noutput_schema = {{type = "x{}"}}\n' + "\n" * 50
    tables = [table.format(each, at) for at, each in enumerate(ids())]
    path = tmp_path / "g.toml"

    def check(count: int) -> Callable[[], object]:
        def work() -> None:
            path.write_text('feature = "f"\n' + "".join(tables[:count]))
            assert len(check_file(path).errors) == count

        return work

    # Five times the document has five times the errors: that costs no more than ten times the time.
    assert is_within(10, check(1_000), check(200))
