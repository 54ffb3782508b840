"""Text in pieces, with secrets replaced."""

from __future__ import annotations

from maestro_hive.kernel.redacted_text import RedactedText
from maestro_hive.kernel.redaction import redact_text
from tests.planted_secrets import SHAPED, SURROUNDED, fragments
from tests.tables import for_each

PLANTED = {name: fragments(secret) for name, secret in SHAPED.items()} | {
    name: {part} for name, (_, part) in SURROUNDED.items()
}
TEXTS = {name: f"It is {secret} here.\nOver" for name, secret in SHAPED.items()} | {
    name: f"It is {whole} here.\nOver" for name, (whole, _) in SURROUNDED.items()
}


def shown(text: str, size: int) -> str:
    redacted = RedactedText(redact_text)
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    return "".join(redacted.release(redacted.add(piece)) for piece in pieces) + redacted.release()


@for_each("name", TEXTS)
def test_no_secret_is_shown_whatever_the_pieces_are(name: str) -> None:
    for size in (1, 2, 7, 30, 1000):
        text = shown(TEXTS[name], size)
        assert not [part for part in PLANTED[name] if part in text], (size, text)
        assert text.startswith("It is ")
        assert text.endswith(" here.\nOver")


def test_words_are_shown_when_they_end_and_the_rest_at_the_end() -> None:
    text = RedactedText(redact_text)
    seen = [text.release(text.add(piece)) for piece in ("Once up", "on a ti", "me\n", "€", "un")]
    assert seen == ["Once ", "upon a ", "time\n", "€", ""]
    assert (text.held, text.release(), text.held) == (2, "un", 0)


def test_a_text_without_secrets_is_shown_as_it_is() -> None:
    text = "".join(f"{number} words, wörter\t日本語 {'x' * number}\n" for number in range(40))
    assert {shown(text, size) for size in (1, 3, 50, 10_000)} == {text}


def test_much_text_before_a_secret_does_not_show_it() -> None:
    secret, text = SHAPED["github"], RedactedText(redact_text)
    pieces = ["words " * 20_000 + secret[:9], secret[9:], " over"]
    seen = [text.release(text.add(piece)) for piece in pieces]
    assert "".join([*seen, text.release()]) == "words " * 20_000 + "[redacted] over"


def test_what_has_no_end_is_not_held_back_for_ever() -> None:
    text = RedactedText(redact_text)
    assert len(text.release(text.add("a" * 100_000))) == 100_000
