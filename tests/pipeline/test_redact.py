"""Secrets of the environment are not written."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from pipeline import redact


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", {})


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "PGPASSWORD",
        "DB_PASSWORD_FILE",
        "MY_SECRET",
        "SERVICE_CREDENTIALS",
        "api_keys",
        "TOKEN",
    ],
)
def test_names_of_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abcdefgh")
    assert redact.text("<abcdefgh>") == f"<${{oc.env:{name}}}>"


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "KEYBOARD", "MONKEY", "AUTHOR"])
def test_other_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abcdefgh")
    assert redact.text("<abcdefgh>") == "<abcdefgh>"


def test_short_values_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "abcdefg")
    assert redact.text("abcdefg") == "abcdefg"


def test_every_way_to_write_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    value = "a\"b\\c'd é\n/?=&e"
    monkeypatch.setenv("A_KEY", value)
    for written in (value, json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
        assert "${oc.env:A_KEY}" in redact.text(written)
        assert "\\c" not in redact.text(written)
    assert redact.text("https://x/?k=a%22b%5Cc%27d%20%C3%A9%0A%2F%3F%3D%26e") == "https://x/?k=${oc.env:A_KEY}"


def test_a_value_inside_another_and_one_that_was_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh")
    monkeypatch.setenv("B_KEY", "abcdefgh-and-more")
    assert redact.text("abcdefgh abcdefgh-and-more") == "${oc.env:A_KEY} ${oc.env:B_KEY}"
    monkeypatch.delenv("A_KEY")
    assert redact.text("abcdefgh") == "${oc.env:A_KEY}"


def test_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh")
    given = {"a": ["x abcdefgh", 1, None], "abcdefgh": ("abcdefgh",), "n": 2.5}
    hidden = "${oc.env:A_KEY}"
    assert redact.structure(given) == {"a": [f"x {hidden}", 1, None], hidden: [hidden], "n": 2.5}


def test_streams_and_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    out, logged = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    redact.guard_streams()
    assert sys.stdout is out, "nothing is secret"
    monkeypatch.setenv("A_KEY", "abcdefgh")
    redact.guard_streams()
    redact.guard_streams()
    print("it is", "abcdefgh")
    sys.stdout.writelines(["abcdefgh", "."])
    assert out.getvalue() == "it is ${oc.env:A_KEY}\n${oc.env:A_KEY}."
    assert not sys.stdout.isatty()
    handler = logging.StreamHandler(logged)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    redact.guard_logs()
    redact.guard_logs()
    try:
        raise ValueError("abcdefgh")
    except ValueError:
        logging.getLogger("x").exception("what %s", "abcdefgh")
    assert "abcdefgh" not in logged.getvalue()
    assert logged.getvalue().startswith("what ${oc.env:A_KEY}\nTraceback")
    assert logged.getvalue().endswith("ValueError: ${oc.env:A_KEY}\n")
