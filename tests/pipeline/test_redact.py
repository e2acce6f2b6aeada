"""Secrets of the environment are not written."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from pathlib import Path

import pytest

from pipeline import redact
from pipeline.metrics import JsonLines


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", {})
    monkeypatch.setattr(redact, "_seen", {})


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
        "HF_TOKEN2",
        "hfToken",
        "OPENAIAPIKEY",
        "my-api.key",
        "DB_PASS",
        "MYSQL_PWD",
    ],
)
def test_names_of_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abcdefgh")
    assert redact.text("<abcdefgh>") == f"<${{oc.env:{name}}}>"


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "KEYBOARD", "MONKEY", "AUTHOR", "PWD", "OLDPWD"])
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


def test_an_address_with_a_password_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:mine@proxy:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert redact.text("via http://me:mine@proxy:3128/") == "via ${oc.env:HTTPS_PROXY}/"
    assert redact.text("via http://proxy:3128/") == "via http://proxy:3128/"


def test_where_a_secret_lies_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEY_DIR", str(tmp_path))
    monkeypatch.setenv("A_KEY", f"{tmp_path}/missing")
    assert redact.text(f"in {tmp_path}/other and {tmp_path}/missing") == f"in {tmp_path}/other and ${{oc.env:A_KEY}}"


def test_the_line_end_of_the_file_a_value_was_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh\n")
    assert redact.text("<abcdefgh>") == "<${oc.env:A_KEY}>"
    monkeypatch.setenv("B_KEY", "       \n")
    assert redact.text("a            b") == "a            b"


def test_a_value_that_is_no_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    value = os.fsdecode(b"\xffabcdefgh")
    monkeypatch.setenv("A_KEY", value)
    assert redact.text(f"<{value}>") == redact.text("<%FFabcdefgh>") == "<${oc.env:A_KEY}>"


def test_numbers_of_a_file_are_not_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret of digits may stand in a number, by chance."""
    monkeypatch.setenv("PIN_KEY", "12345678")
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.write([{"loss": 0.12345678, "rows": 12345678, "text": "it is 12345678"}])
    file.close()
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written == {"loss": 0.12345678, "rows": 12345678, "text": "it is ${oc.env:PIN_KEY}"}


def test_a_line_costs_little_among_many_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(100):
        monkeypatch.setenv(f"VARIABLE_{i}", f"one of many, number {i}")
        monkeypatch.setenv(f"A_{i}_KEY", f"abcdefgh-{i:03}")
    line = "in step 12 the loss was 0.1234, and the reward of the last rows was better than before\n"
    redact.text(line)
    started = time.process_time()
    for _ in range(2000):
        redact.text(line)
    assert time.process_time() - started < 0.4


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
