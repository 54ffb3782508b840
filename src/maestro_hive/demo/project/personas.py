"""The personas of the demonstration, scripted: what a model would write is written here already.

Each is a command as any other one: it gets its task in the environment, writes its files into the
current folder, and its exit code is its word. Before anything else it appends a line to a ledger that
the engine knows nothing of: so it can be counted afterwards how often each task was really started.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LEDGER = Path("..", "ledger.txt")
#: How long a persona seems to think, in seconds.
THINKS = {
    "architect": 0.8,
    "backend": 1.2,
    "frontend": 1.6,
    "docs": 0.8,
    "tester": 1.0,
    "reviewer": 0.8,
}
#: The first attempts of these are the ones that the kill meets, however slow the machine is.
KILLED = ("frontend", "docs")
LONG_ENOUGH = 300.0

CONTRACT = '''\
"""What the parts of the service owe to each other; `python3 contract.py PART` checks one."""

import sys
from pathlib import Path

ROUTES = ("GET /", "POST /links", "GET /CODE")
CODES = {35: "z", 1_000_000: "lfls", 0: "0"}


def check(part):
    if part == "links":
        from links import code_of

        for number, code in CODES.items():
            if code_of(number) != code:
                return f"code_of({number}) is {code_of(number)!r}, and has to be {code!r}"
    elif part == "page":
        from page import page

        if "<script>" in page({"z": "<script>"}):
            return "page() does not escape addresses"
    elif part == "readme":
        text = Path("README.md").read_text()
        missing = [route for route in ROUTES if route not in text]
        return f"README.md does not name {missing}" if missing else None
    return None


if __name__ == "__main__":
    sys.exit(check(sys.argv[1] if sys.argv[1:] else ""))
'''

LINKS = '''\
"""Addresses, and the short codes that stand for them."""

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def code_of(number):
    code = ""
    while number:
        number, digit = divmod(number, len(DIGITS))
        code = DIGITS[digit] + code
    return code


class Links:
    def __init__(self):
        self.addresses = {}

    def add(self, address):
        code = code_of(len(self.addresses))
        self.addresses[code] = address
        return code
'''

APP = '''\
"""The service: `python3 app.py` listens on http://127.0.0.1:8000."""

from urllib.parse import parse_qs
from wsgiref.simple_server import make_server

from links import Links
from page import page

links = Links()


def app(environ, start_response):
    method, code = environ["REQUEST_METHOD"], environ["PATH_INFO"].strip("/")
    if method == "POST" and code == "links":
        form = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode()
        links.add(parse_qs(form)["address"][0])
        start_response("303 See Other", [("Location", "/")])
        return [b""]
    if not code:
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
        return [page(links.addresses).encode()]
    if code in links.addresses:
        start_response("302 Found", [("Location", links.addresses[code])])
        return [b""]
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"no such code"]


if __name__ == "__main__":
    make_server("127.0.0.1", 8000, app).serve_forever()
'''

PAGE = '''\
"""The page: a form for an address, and the codes so far."""

from html import escape


def page(addresses):
    rows = "".join(
        f"<li><a href='/{code}'>/{code}</a>: {escape(address)}</li>"
        for code, address in addresses.items()
    )
    form = "<form method='post' action='/links'><input name='address'><button>Shorten</button></form>"
    return f"<!doctype html><title>Shortener</title>{form}<ul>{rows}</ul>"
'''

README = """\
# shortener

`python3 app.py` starts it on http://127.0.0.1:8000.

- `GET /`: the form, and all codes
- `POST /links` with `address=…`: a new code
- `GET /CODE`: leads to the address
"""

TESTS = '''\
"""The service as a browser sees it, without a network."""

import io
import unittest
from wsgiref.util import setup_testing_defaults

import app
from links import Links


def request(method, path, body=b""):
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "CONTENT_LENGTH": str(len(body))}
    setup_testing_defaults(environ)
    environ["wsgi.input"] = io.BytesIO(body)
    seen = {}
    text = b"".join(app.app(environ, lambda status, headers: seen.update(status=status, **dict(headers))))
    return seen["status"], seen.get("Location"), text.decode()


class Service(unittest.TestCase):
    def setUp(self):
        app.links = Links()

    def test_an_address_gets_a_code_that_leads_to_it(self):
        request("POST", "/links", b"address=http%3A%2F%2Fexample.com")
        self.assertEqual(request("GET", "/0")[:2], ("302 Found", "http://example.com"))

    def test_every_address_has_a_code_of_its_own(self):
        codes = [app.links.add(f"http://{n}.example.com") for n in range(1000)]
        self.assertEqual(len(set(codes)), 1000)

    def test_the_page_lists_addresses_and_escapes_them(self):
        request("POST", "/links", b"address=%3Cb%3E")
        self.assertIn("&lt;b&gt;", request("GET", "/")[2])

    def test_an_unknown_code_is_not_found(self):
        self.assertEqual(request("GET", "/nothing")[0], "404 Not Found")


if __name__ == "__main__":
    unittest.main()
'''


def design() -> dict[str, str]:
    """Return the contract."""
    return {"contract.py": CONTRACT}


def backend() -> dict[str, str]:
    """Return links and service. The code of 0 is empty, unless the feedback has said so."""
    links = LINKS
    if "code_of(0)" in os.environ["MAESTRO_FEEDBACK"]:
        print("the verification of the last attempt says that the code of 0 is wrong: fixing that")
        links = LINKS.replace("return code\n\n\nclass", 'return code or "0"\n\n\nclass')
    return {"links.py": links, "app.py": APP}


def review() -> dict[str, str]:
    """Return the review of what is there."""
    made = [each for each in sorted(Path().glob("*.py")) if each.name != Path(__file__).name]
    lines = {each.name: len(each.read_text(encoding="utf-8").splitlines()) for each in made}
    counted = "\n".join(f"- {name}: {count} lines" for name, count in lines.items())
    return {"REVIEW.md": f"{counted}\n\nApproved: the tests of level 3 have passed.\n"}


FILES = {
    "architect": design,
    "backend": backend,
    "frontend": lambda: {"page.py": PAGE},
    "docs": lambda: {"README.md": README},
    "tester": lambda: {"test_app.py": TESTS},
    "reviewer": review,
}


def main() -> None:
    """Do the task of a persona."""
    persona, attempt = sys.argv[1], os.environ["MAESTRO_ATTEMPT"]
    with LEDGER.open("a", encoding="utf-8") as ledger:
        ledger.write(f"{os.environ['MAESTRO_TASK_ID']} {attempt}\n")
    is_killed = persona in KILLED and attempt == "1"
    time.sleep(LONG_ENOUGH if is_killed else THINKS[persona])
    for name, text in FILES[persona]().items():
        Path(name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
