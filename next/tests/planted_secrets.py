"""Made-up secrets to plant, one of each shape, in parts, so that no scanner finds them."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

#: Secrets that are found by their shape, by name.
SHAPED: dict[str, str] = {
    "openai": "sk-" + "4fQz8LmT2vXb7RkW9pYc3HnJ5sDgA1uE6iOoZtVyBxCw",
    "openai-project": "sk-" + "proj-Zk3_vT8bQ-x1LmN0pRsWyUuYaBcDeFgHiJkLmNoPq",
    "anthropic": "sk-" + "ant-api03-hT7kQ2mX9-vL4pRb_wZ8sYc3nJ6dGfA1uE5iOoAA",
    "aws": "AKIA" + "Q3EGRIVWQ7ZKXN4T",
    "github": "ghp" + "_x7Kq2MzT9vLb4RwYc8HnJ5sDgA1uE6iOpQrS",
    "github-app": "ghs" + "_b4RwYc8HnJ5sDgA1uE6iOpQrSx7Kq2MzT9vL",
    "github-fine": "github" + "_pat_11ABCDEFG0x7Kq2MzT9vLb4_RwYc8HnJ5sDgA1uE6iOpQrS",
    "slack": "xoxb" + "-314159265358-271828182845-Tq7ZkWmB2xVn9LcR4pYs8HdJ",
    "google": "AIza" + "SyD7kQ2mX9vL4pRbwZ8sYc3nJ6dGfA1uE5i",
    "stripe": "sk_live" + "_51H7kQ2mX9vL4pRbwZ8sYc3nJ6",
    "web-token": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ"
    + "zdWIiOiJwbGFudGVkIn0.Qm7xVn9LcR4pYs8HdJTq7ZkWmB2x-_w",
    "atlassian": "ATATT" + "3xFfGF0T7kQ2mX9vL4pRbwZ8sYc3nJ6dGfA1uE5i-_Q=1A2B3C4D",
    "npm": "npm" + "_x7Kq2MzT9vLb4RwYc8HnJ5sDgA1uE6iOpQrS",
    "pypi": "pypi" + "-AgEIcHlwaS5vcmcCJDQ3ZjY4ZWQ3LTk2YjEtNGI0My1hZTRi",
    "hugging-face": "hf" + "_QzXvBnMkLpOiUyTrEwQaSdFgHjKlZxCv12",
    "private-key": "-----BEGIN RSA " + "PRIVATE KEY-----\n"
    + "MIIEowIBAAKCAQEA7kQ2mX9vL4pRbwZ8sYc3nJ6dGfA1uE5iOoZtVyBxCw4fQz8L\n"
    + "mT2vXb7RkW9pYc3HnJ5sDgA1uE6iOoZtVyBxCwTq7ZkWmB2xVn9LcR4pYs8HdJ==\n"
    + "-----END RSA " + "PRIVATE KEY-----",
}  # fmt: skip

#: Secrets that are found by their place: the text, and a part that must not be left.
SURROUNDED: dict[str, tuple[str, str]] = {
    "bearer": ("Authorization: Bearer mF_9.B5f-4.1JqM", "mF_9.B5f-4.1JqM"),
    "basic": (
        f"'authorization': 'Basic {base64.b64encode(b'ada:l0velace').decode()}'", "mwwdmVsYWNl",
    ),
    "address": ("postgresql" + "://ada:l0ve%2Flace@db.example.com:5432/app", "l0ve"),
    "aws-setting": (
        "aws_secret_access_key = " + "kT7/Q2mX9vL4pRbwZ8sYc3nJ+dGfA1uE5iOoZtVy", "kT7/Q2mX9",
    ),
}  # fmt: skip

#: The value of an environment variable that only its name makes a secret.
VARIABLE = "PLANTED_API_KEY"
VARIABLE_VALUE = 'pl4nted "env" välue/+&='
#: A value that only a mark makes a secret.
MARKED = "the marked + value/of tests"


def encoded(secret: str) -> dict[str, str]:
    """Return a secret percent-encoded, in JSON, and in base64 after 0, 1 and 2 other bytes."""
    texts = {
        "quoted": quote(secret),
        "quoted whole": quote(secret, safe=""),
        "quoted in lower case": quote(secret, safe="").replace("%2F", "%2f").replace("%0A", "%0a"),
        "in a form": quote_plus(secret),
        "in JSON": json.dumps({"text": secret}),
    }
    for before in (b"", b":", b"- "):
        data = before + secret.encode() + b" more"
        texts[f"base64 after {len(before)}"] = base64.b64encode(data).decode()
        texts[f"URL-safe base64 after {len(before)}"] = base64.urlsafe_b64encode(data).decode()
    return texts


def fragments(secret: str) -> set[str]:
    """Return parts of a secret, also in base64, of which none may be in what left the process."""
    plain = secret.encode()
    pieces = {secret[at : at + 12] for at in range(0, max(1, len(secret) - 12), 4)}
    for offset in range(3):
        whole = base64.b64encode(bytes(offset) + plain).decode()
        middle = whole[4:-4]
        pieces |= {middle[at : at + 16] for at in range(0, max(1, len(middle) - 16), 4)}
    return {piece for piece in pieces if not piece.startswith("-----")}
