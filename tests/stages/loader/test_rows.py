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


def test_a_number_beyond_64_bits_harms_only_where_it_is_used() -> None:
    large = str(2**70)
    row = parse('{"prompt": "p", "answer": 1, "unused": [' + large + ", 1e300, -" + large + "]}")
    assert row == Row(b'"p"', b"1", b"", b"{}")
    chat = '{"prompt": [{"role": "user", "content": "c", "n": ' + large + '}], "answer": 1}'
    assert "too large for 64 bits" in refused(chat)


def test_colons_and_keys_in_text_are_no_keys() -> None:
    """Also where that looks like a second key: what is read again, key by key, is the same row."""
    text = '"a":"b", "prompt": "c" : d \\"e\\":'
    row = parse({"prompt": text, "answer": text, "extra_info": {"x:y": text}})
    assert (json.loads(row.prompt), json.loads(row.ground_truth)) == (text, text)
    assert json.loads(row.extra) == {"x:y": text}


def test_a_long_list_of_keys_is_cut() -> None:
    reason = refused({f"k{i}": 1 for i in range(1000)})
    assert reason.endswith("'k18', 'k19' and 980 more")
    assert len(refused({"k" * 10_000: 1})) < 200


def test_rows_of_other_formats_come_as_objects() -> None:
    parser = RowParser(LoaderConfig(path="x"), "loader")
    assert parser.columns({"prompt": "p", "answer": 1.5}) == Row(b'"p"', b"1.5", b"", b"{}")
    with pytest.raises(BadRow, match="holds what JSON cannot: Type is not JSON serializable: bytes"):
        parser.columns({"prompt": "p", "answer": b"raw"})


def test_keys_change_with_what_they_stand_for() -> None:
    def keys(**settings: Any) -> tuple[bytes, bytes]:
        parser = RowParser(LoaderConfig(path="x", **settings), "loader")
        return parser.verdict_key(), parser.columns_key()

    plain = keys()
    assert plain == keys() == keys(batch_size=5, shuffle=False)
    assert all(len(k) == 16 for k in plain)
    fields = ({"prompt": "q"}, {"ground_truth": "q"}, {"ground_truth_after": "#"}, {"data_source": "q"}, {"extra": "q"})
    others = [keys(fields=FieldNames(**f)) for f in fields]
    assert len({plain, *others}) == len({k[0] for k in (plain, *others)}) == len({k[1] for k in (plain, *others)}) == 6
    chat, one, two = keys(chat=True), keys(system_prompt="a"), keys(system_prompt="b")
    assert chat[0] == plain[0]  # the same rows are bad
    assert one[0] == two[0] != plain[0]  # a chat with a system message of its own is
    assert len({plain[1], chat[1], one[1], two[1]}) == 4


def test_what_is_kept_of_a_row_is_as_large_as_it_is() -> None:
    """The JSON writer's own result holds 4 KiB, however short it is."""
    line, parser = b'{"prompt": "p", "answer": 1}', RowParser(LoaderConfig(path="x"), "loader")
    parser(line)
    rss = resident()
    rows = [parser(line) for _ in range(20_000)]
    assert resident() - rss < 20_000 * 700
    assert len(rows) == 20_000


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_rows_that_were_taken_before_give_the_same_columns_without_the_checks() -> None:
    """Of every row that a parser takes, also one with what only the checks tell apart."""
    rows = [
        b'{"prompt": "p", "answer": 18446744073709551615}',
        b'{"prompt": "a:b", "answer": "\\":\\"", "extra_info": {"x": 1e300, "y": [1.5, null]}}',
        b'{"prompt": [{"role": "user", "content": "c"}], "answer": [1, {"b": true}], "data_source": "d"}',
    ]
    for settings in ({}, {"system_prompt": "s"}, {"chat": True}):
        parser = RowParser(LoaderConfig(path="x", **settings), "loader")
        assert [parser.for_known_good()(r) for r in rows] == [parser(r) for r in rows]
    with pytest.raises(BadRow, match="is not JSON"):
        parser.for_known_good()(b'{"prompt"')
