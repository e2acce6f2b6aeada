"""One line of JSON as a row: what is read from where, and every reason to refuse it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.loader import FieldNames, LoaderConfig
from stages.loader.rows import BadRow, Row, RowParser


def parse(line: str | bytes | dict[str, Any], **settings: Any) -> Row:
    if isinstance(line, dict):
        line = json.dumps(line)
    return RowParser(LoaderConfig(path="x", **settings), "loader")(line.encode() if isinstance(line, str) else line)


def refused(line: Any, **settings: Any) -> str:
    with pytest.raises(BadRow) as e:
        parse(line, **settings)
    return str(e.value)


def test_a_plain_row() -> None:
    row = parse({"prompt": "1+1=", "answer": {"sum": "2"}, "data_source": "sums", "extra_info": {"i": 3}})
    assert row == Row(b'"1+1="', b'{"sum":"2"}', b"sums", b'{"i":3}')


def test_source_and_extra_may_be_missing_or_null() -> None:
    assert parse({"prompt": "a", "answer": 1})[2:] == (b"", b"{}")
    assert parse({"prompt": "a", "answer": 1, "data_source": None, "extra_info": None})[2:] == (b"", b"{}")


def test_the_layout_of_verl() -> None:
    chat = [{"role": "user", "content": "1+1="}]
    line = {
        "data_source": "openai/gsm8k",
        "prompt": chat,
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train"},
    }
    row = parse(line, fields=FieldNames(ground_truth="reward_model.ground_truth"))
    assert (json.loads(row.prompt), row.ground_truth, row.data_source) == (chat, b'"2"', b"openai/gsm8k")
    assert json.loads(row.extra) == {"split": "train"}


def test_a_key_with_a_dot_comes_before_nested_keys() -> None:
    fields = FieldNames(ground_truth="a.b")
    assert parse({"prompt": "p", "a.b": 1, "a": {"b": 2}}, fields=fields).ground_truth == b"1"
    assert parse({"prompt": "p", "a": {"b": 2}}, fields=fields).ground_truth == b"2"


def test_no_answer_is_looked_for_if_no_field_is_named() -> None:
    assert parse({"prompt": "p"}, fields=FieldNames(ground_truth="")).ground_truth == b"null"


def test_the_answer_after_the_last_mark() -> None:
    fields = FieldNames(ground_truth_after="####")
    line = {"prompt": "p", "answer": "two #### no\n####  1,234 \n"}
    assert parse(line, fields=fields).ground_truth == b'"1,234"'
    assert "no answer after '####'" in refused({"prompt": "p", "answer": "72"}, fields=fields)
    assert "no answer after '####'" in refused({"prompt": "p", "answer": "72 ####  "}, fields=fields)
    assert "must be text to look for '####' in, not a number" in refused({"prompt": "p", "answer": 72}, fields=fields)


def test_chats_are_made_where_they_are_asked_for() -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    text, chat = {"prompt": "hi", "answer": 1}, {"prompt": [user], "answer": 1}
    assert json.loads(parse(text, chat=True).prompt) == [user]
    assert json.loads(parse(text, system_prompt="be brief").prompt) == [system, user]
    assert json.loads(parse(chat, chat=True).prompt) == [user]
    assert json.loads(parse(chat, system_prompt="be brief").prompt) == [system, user]
    assert "system message of its own" in refused({"prompt": [system, user], "answer": 1}, system_prompt="x")


def test_messages_are_kept_as_they_are() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"b": 1, "a": 2}}]}
    chat = [{"role": "user", "content": "2+1"}, call]
    assert json.loads(parse({"prompt": chat, "answer": 3}).prompt) == chat


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            '{"answer": 1, "question": "q"}',
            "has no key 'prompt' (loader.fields.prompt); its keys are: 'answer', 'question'",
        ),
        ("{}", "its keys are: none"),
        ('{"prompt": "p"}', "has no key 'answer' (loader.fields.ground_truth); its keys are: 'prompt'"),
        ('{"prompt": null, "answer": 1}', "key 'prompt' is null"),
        ('{"prompt": "p", "answer": null}', "key 'answer' is null"),
        ('{"prompt": "", "answer": 1}', "is empty"),
        ('{"prompt": " \\n", "answer": 1}', "is empty"),
        ('{"prompt": [], "answer": 1}', "is a chat without messages"),
        ('{"prompt": 7, "answer": 1}', "must be text or a list of chat messages, not a number"),
        ('{"prompt": true, "answer": 1}', "not true or false"),
        ('{"prompt": {"a": 1}, "answer": 1}', "not an object"),
        ('{"prompt": ["hi"], "answer": 1}', "message 0 of the chat must be an object, not text"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "message 0 of the chat needs a text 'content', not null"),
        ('{"prompt": [{"role": 1, "content": "c"}], "answer": 1}', "needs a text 'role', not a number"),
        ('{"prompt": [{"role": "user", "content": " "}], "answer": 1}', "is a chat of empty messages"),
        ('{"prompt": "p", "answer": 1, "data_source": 3}', "key 'data_source' must be text, not a number"),
        ('{"prompt": "p", "answer": 1, "extra_info": [1]}', "key 'extra_info' must be an object, not a list"),
        ('[{"prompt": "p"}]', "an object is needed, not a list"),
        ("null", "an object is needed, not null"),
        ('"text"', "an object is needed, not text"),
        ('{"prompt": "p", "answer": 1', "is not JSON"),
        ('{"prompt": "p", "answer": NaN}', "is not JSON"),
        ('{"prompt": "p", "answer": 1} {}', "is not JSON"),
        ('{"prompt": "\\ud800", "answer": 1}', "is not JSON"),
        ('{"prompt": "p", "prompt": "q", "answer": 1}', "key 'prompt' stands twice in one object"),
        ('{"prompt": "p", "answer": {"a": 1, "b": 2, "a": 3}}', "key 'a' stands twice in one object"),
        ('{"prompt": "p", "answer": 18446744073709551616}', "too large for 64 bits"),
        ('{"prompt": "p", "answer": 1, "extra_info": {"n": [-9223372036854775809]}}', "too large for 64 bits"),
    ],
)
def test_rows_that_are_refused(line: str, reason: str) -> None:
    assert reason in refused(line)


def test_a_bad_byte_is_located() -> None:
    assert refused(b'{"prompt": "p\xac"}') == "is not UTF-8: byte 0xac at byte 14 of the line"


def test_large_numbers_that_are_exact_pass() -> None:
    line = '{"prompt": "p", "answer": [18446744073709551615, -9223372036854775808, 1e300]}'
    assert json.loads(parse(line).ground_truth) == [2**64 - 1, -(2**63), 1e300]


def test_no_reason_shows_what_a_row_says() -> None:
    for line in (
        '{"prompt": "secret"',
        '{"prompt": ["secret"], "answer": 1}',
        '{"prompt": "secret", "prompt": "secret"}',
    ):
        assert "secret" not in refused(line)


keys = st.sampled_from(["prompt", "answer", "a", ":", 'x":"y', "\\"])
values = st.recursive(
    st.sampled_from(["", ":", '":', "a:b", 1, None]),
    lambda inner: st.lists(st.tuples(keys, inner), max_size=3) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=6,
)


def write(value: Any, spaces: str) -> str:
    """JSON in which a list of pairs is an object, so that keys may stand twice."""
    if isinstance(value, list):
        members = (f"{json.dumps(k)}{spaces}:{spaces}{write(v, spaces)}" for k, v in value)
        return "{" + ",".join(members) + "}"
    return "[" + ",".join(write(v, spaces) for v in value) + "]" if isinstance(value, tuple) else json.dumps(value)


def repeats(value: Any) -> bool:
    if isinstance(value, list):
        return len({k for k, _ in value}) < len(value) or any(repeats(v) for _, v in value)
    return isinstance(value, tuple) and any(map(repeats, value))


@given(values, st.sampled_from(["", " "]))
def test_a_key_that_stands_twice_is_always_found(extra: Any, spaces: str) -> None:
    line = '{"prompt":"p","answer":' + write([("v", extra)], spaces) + "}"
    if repeats(extra):
        assert "stands twice" in refused(line)
    else:
        assert json.loads(parse(line).ground_truth) == json.loads(line)["answer"]
