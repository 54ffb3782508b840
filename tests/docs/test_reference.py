"""The reference is what the code says of itself, and the pictures show what verbs print."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from xml.etree import ElementTree as ET

import pytest

from docs.generate import api_page, pictures, sources, values_page
from docs.generate.pages import PAGES, PICTURES, ROOT
from maestro_hive.cli.app import VERBS
from maestro_hive.engine.options import CallOptions, StepOptions
from maestro_hive.maestro.state.codec_classes import BUILT_IN
from tests.docs.test_documents import start_forked


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_make_docs_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    page = (ROOT / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "type `make docs`"


def test_the_page_about_values_shows_every_type_that_has_a_form() -> None:
    shown = {type(value) for values in values_page.samples().values() for value in values}
    assert shown >= BUILT_IN


def test_the_pages_do_not_depend_on_who_makes_them() -> None:
    differ = "[name for name in PAGES if (ROOT / name).read_bytes() != PAGES[name]().encode()]"
    code = f"from docs.generate.pages import PAGES, ROOT; print({differ})"
    environment = {**os.environ, "COLUMNS": "40", "LC_ALL": "C", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"


@pytest.mark.parametrize("module", api_page.MODULES)
def test_every_public_name_and_method_says_what_it_promises(module: str) -> None:
    for name in api_page.names(module):
        thing = getattr(import_module(module), name)
        assert api_page.promise(module, name), f"{module}.{name}"
        if inspect.isclass(thing):
            for method in sources.methods(thing):
                assert method.promise, f"{module}.{name}.{method.name}"


@pytest.mark.parametrize(
    "name, attribute", [("RunHandle", "run_id"), ("Worker", "id"), ("Question", "asked_at")]
)
def test_what_is_handed_to_users_is_described(name: str, attribute: str) -> None:
    section = api_page.write().partition(f"\n### `{name}`\n")[2].partition("\n### ")[0]
    assert re.search(rf"^- `{attribute}\b", section, re.MULTILINE)
    assert f"{name}(" not in section


@pytest.mark.parametrize("taken", [StepOptions, CallOptions])
def test_every_option_of_a_step_is_described(taken: type) -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    section = page.partition(f"\n### `{taken.__name__}`\n")[2].partition("\n### ")[0]
    for name in taken.__annotations__:
        assert re.search(rf"^- `{name}: [^`]+`: \S", section, re.MULTILINE), name


def test_help_is_shown_as_the_command_prints_it() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert not re.search(r"^ +--help ", page, re.MULTILINE)
    assert re.search(r"^  -h, --help ", page, re.MULTILINE)


def test_links_inside_the_reference_lead_to_headings() -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ `([\w.]+)`$", page, re.MULTILINE)
    anchors: list[str] = []
    for heading in headings:
        slug = heading.lower().replace(".", "")
        again = sum(each == slug or each.startswith(f"{slug}-") for each in anchors)
        anchors.append(f"{slug}-{again}" if again else slug)
    linked = re.findall(r"\]\(#([\w-]+)\)", page)
    assert len(set(linked)) > 60
    assert set(linked) <= set(anchors)


def test_every_verb_has_its_help_on_the_page() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    for name, verb in VERBS.items():
        assert f"### `maestro {name}`\n" in page
        assert f"Usage: maestro {name} [OPTIONS]" in page
        assert verb.summary in page


def test_pictures_show_what_the_verbs_print() -> None:
    printed = pictures.seen((ROOT / "README.md").read_text(encoding="utf-8"), start_forked)
    for name, text in printed.items():
        picture = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert pictures.shows(picture, text), f"type `make docs`: {name}.svg is not of\n{text}"
    assert {each.stem for each in PICTURES.iterdir()} == {*printed, "demo"}


def test_pictures_are_whole_small_and_need_nothing_from_elsewhere() -> None:
    for file in PICTURES.iterdir():
        picture = file.read_text(encoding="utf-8")
        ET.fromstring(picture)
        assert len(picture) < 40_000
        assert re.findall(r"https?://[^\" ]+", picture) == ["http://www.w3.org/2000/svg"]
        assert "@import" not in picture
        assert "url(h" not in picture


def test_a_picture_of_something_else_is_noticed() -> None:
    drawn = pictures.draw("runs", "run  status\n\x1b[32mx\x1b[0m  success\n")
    assert pictures.shows(drawn, "run  status\nx    success\n")
    assert not pictures.shows(drawn, "run  status\nx    failed\n")
    assert not pictures.shows(drawn, "x success\nrun status\n")
    assert pictures.shows(drawn, "x success\nrun status\n", in_order=False)
