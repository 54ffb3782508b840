"""``make docs``: write again what is made from the code, and say what changed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from docs.generate import pictures
from docs.generate.executed_page import execute
from docs.generate.pages import EXECUTED, PAGES, PICTURES, ROOT


def main() -> None:
    """Write the pages, execute those that are executed, and draw the pictures."""
    for name, write in PAGES.items():
        _write(ROOT / name, write())
    for name in EXECUTED:
        with tempfile.TemporaryDirectory(prefix="maestro-docs-") as folder:
            page = ROOT / name
            _write(page, execute(page.read_text(encoding="utf-8"), Path(folder)))
    for name, printed in pictures.seen((ROOT / "README.md").read_text(encoding="utf-8")).items():
        _draw(name, printed)
    _draw("demo", pictures.demonstrated(ROOT), in_order=False)


def _draw(name: str, printed: str, *, in_order: bool = True) -> None:
    picture = PICTURES / f"{name}.svg"
    known = picture.read_text(encoding="utf-8") if picture.exists() else ""
    if not pictures.shows(known, printed, in_order=in_order):
        _write(picture, pictures.draw(name, printed))


def _write(page: Path, text: str) -> None:
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(f"{page.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
