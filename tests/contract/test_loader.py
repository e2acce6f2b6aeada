"""What every loader must do, and that all of them do the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import registry
from pipeline.context import Context
from pipeline.metrics import summarise
from pipeline.registry import Entry
from stages.loader import FieldNames, Loader, SamplingOverride
from stages.loader.rows import DataError
from stages.records import PromptBatch, Sampling
from tests.builders import plan_facts

registry.discover("stages.loader")
ENTRIES = registry.entries("loader")
Open = Callable[..., Loader]


@pytest.fixture(params=ENTRIES, ids=lambda e: e.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


@pytest.fixture
def open_loader(make_context: Callable[..., Context]) -> Iterator[Callable[..., Loader]]:
    """`open_loader(entry, path, seed=0, node="loader", **settings)`; closed at the end."""
    opened: list[Loader] = []

    def open_(entry: Entry, path: Path, seed: int = 0, node: str = "loader", **settings: Any) -> Loader:
        loader: Any = entry.cls(entry.config(path=str(path), **settings))
        opened.append(loader)
        loader.open(make_context(node, seed=seed))
        return loader

    yield open_
    for loader in opened:
        loader.close()
        loader.close()


def write(path: Path, rows: int) -> Path:
    path.write_text("".join(f'{{"prompt": "p{i}", "answer": "{i}"}}\n' for i in range(rows)))
    return path


def answers(batch: PromptBatch) -> list[Any]:
    return [batch.ground_truth.json(i) for i in range(len(batch))]


def test_rows_are_those_of_the_file(entry: Entry, open_loader: Open, root: Path) -> None:
    path = root / "data" / "digits" / "heldout.jsonl"
    batch = open_loader(entry, path, batch_size=0, shuffle=False, purpose="eval").run()
    expected = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert [batch.prompt.json(i) for i in range(len(batch))] == [r["prompt"] for r in expected]
    assert answers(batch) == [r["answer"] for r in expected]
    assert (batch.purpose, batch.group_size, batch.step) == ("eval", 1, 1)
    assert batch.row_id.tolist() == batch.group_id.tolist() == list(range(len(expected)))


def test_every_row_comes_once_an_epoch_and_batches_are_never_short(
    entry: Entry, open_loader: Open, tmp_path: Path
) -> None:
    loader = open_loader(entry, write(tmp_path / "a.jsonl", 10), batch_size=4)
    batches = [loader.run() for _ in range(5)]
    seen = [int(a) for b in batches for a in answers(b)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert [len(b) for b in batches] == [4] * 5
    assert np.concatenate([b.row_id for b in batches]).tolist() == list(range(20))
    assert [b.step for b in batches] == [1, 2, 3, 4, 5]


def test_order_follows_from_seed_and_node(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 50)
    first, again = (answers(open_loader(entry, path, batch_size=50).run()) for _ in range(2))
    assert first == again
    assert first != answers(open_loader(entry, path, seed=1, batch_size=50).run())
    assert first != answers(open_loader(entry, path, node="other", batch_size=50).run())
    assert first != [str(i) for i in range(50)]


def test_a_resumed_loader_goes_on_exactly(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    loader = open_loader(entry, path, batch_size=4)
    for _ in range(3):
        loader.run()
    state = json.loads(json.dumps(loader.state_dict()))
    other = open_loader(entry, path, batch_size=4)
    other.load_state_dict(state)
    assert other.state_dict() == loader.state_dict() == state
    for _ in range(4):
        assert other.run().same(loader.run())


def test_a_state_of_another_file_or_batch_is_refused(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    state = open_loader(entry, path, batch_size=4).state_dict()
    with pytest.raises(ValueError, match="batch_size = 4 and has 5 now"):
        open_loader(entry, path, batch_size=5).load_state_dict(state)
    with pytest.raises(ValueError, match="rows = 10 and has 9 now"):
        open_loader(entry, write(path, 9), batch_size=4).load_state_dict(state)


def test_all_loaders_give_the_same_batches(open_loader: Open, root: Path) -> None:
    assert len(ENTRIES) > 1
    path = root / "data" / "digits" / "train.jsonl"
    settings = {"batch_size": 700, "chat": True, "system_prompt": "s"}
    first, *others = (open_loader(e, path, seed=3, **settings) for e in ENTRIES)
    for _ in range(7):  # 4900 prompts: over the end of the first epoch
        batch = first.run()
        for other in others:
            assert other.run().same(batch)


ROW = b'{"prompt": "p", "answer": "a"}'


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(ROW + b"\n" + ROW + b"\n", id="plain"),
        pytest.param(ROW + b"\n" + ROW, id="no newline at the end"),
        pytest.param(ROW + b"\r\n" + ROW + b"\r\n", id="carriage returns"),
        pytest.param(ROW + b"\r\n" + ROW + b"\n", id="mixed ends"),
        pytest.param(b"\xef\xbb\xbf" + ROW + b"\n" + ROW, id="byte order mark"),
        pytest.param(b"\n \t\n" + ROW + b"\n\r\n\n" + ROW + b"\n \n\n", id="blank lines"),
        pytest.param(b"  " + ROW + b" \n\t" + ROW + b"\t", id="indented"),
    ],
)
def test_the_same_two_rows_however_lines_end(entry: Entry, open_loader: Open, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    batch = open_loader(entry, path, batch_size=0, shuffle=False).run()
    assert [batch.prompt.json(i) for i in range(len(batch))] == ["p", "p"]
    assert answers(batch) == ["a", "a"]


def test_separators_inside_text_do_not_end_a_row(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\rg\nh\x00i\U0001f600"
    rows = [{"prompt": text, "answer": text}, {"prompt": "next", "answer": "n"}]
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())
    batch = open_loader(entry, path, batch_size=0, shuffle=False).run()
    assert [batch.prompt.json(i) for i in range(2)] == [text, "next"]


def test_a_very_long_row(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    long = "a" * 5_000_000
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": 1}) for p in ("x", long, "y")))
    batch = open_loader(entry, path, batch_size=0, shuffle=False).run()
    assert [batch.prompt.json(i) for i in range(3)] == ["x", long, "y"]


def opening_error(open_loader: Open, entry: Entry, path: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as e:
        open_loader(entry, path, **settings)
    return str(e.value)


def test_all_bad_rows_are_found_at_once_with_their_places(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW + b'\n\n[1]\n{"prompt": "p"}\r\n' + ROW + b'\n{"prompt": "\xac"}\n{"prompt": "p", "ans')
    lines = opening_error(open_loader, entry, path).split("\n")
    assert lines[0] == f"4 of 6 rows of {path} cannot be used:"
    assert lines[1] == f"  {path}:3 (byte 32): an object is needed, not a list"
    assert lines[2].startswith(f"  {path}:4 (byte 36): has no key 'answer'")
    assert lines[3] == f"  {path}:6 (byte 84): is not UTF-8: byte 0xac at byte 13 of the line"
    assert lines[4].startswith(f"  {path}:7 (byte 100): is not JSON")
    assert lines[4].endswith("(the file ends here without a newline: is it cut short?)")


@pytest.mark.parametrize("depth", [700, 5000])
def test_rows_nested_too_deeply_are_bad_rows(entry: Entry, open_loader: Open, tmp_path: Path, depth: int) -> None:
    """Deeper than Python recurses, and deeper than the parser goes. What the writer can write again is read."""
    path = tmp_path / "a.jsonl"
    objects, lists = (o * depth + b"1" + c * depth for o, c in ((b'{"a":', b"}"), (b"[", b"]")))
    row = b'{"prompt": "p", "answer": %s}\n'
    path.write_bytes(ROW + b"\n" + row % objects + row % lists)
    lines = opening_error(open_loader, entry, path).split("\n")
    assert lines[0] == f"2 of 3 rows of {path} cannot be used:"
    assert lines[1].startswith(f"  {path}:2 (byte {len(ROW) + 1}): is nested too deeply: at most 128")
    assert lines[2].startswith(f"  {path}:3 (byte {len(ROW) + 1 + len(row % objects)}): is nested too deeply")
    fits, over = (b"[" * d + b"]" * d for d in (127, 128))  # in an object
    path.write_bytes(row % fits)
    assert answers(open_loader(entry, path, batch_size=1).run()) == [json.loads(fits)]
    path.write_bytes(row % over)
    assert "is nested too deeply" in opening_error(open_loader, entry, path)


def test_of_many_bad_rows_ten_are_listed(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" * 1000 + ROW)
    lines = opening_error(open_loader, entry, path).split("\n")
    assert lines[0] == f"1000 of 1001 rows of {path} cannot be used; the first 10:"
    assert len(lines) == 11


def test_all_loaders_refuse_with_the_same_words(open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content in (b"", b"\n \n", ROW + b'\nnull\n{"prompt": 1}\n{"a": 1, "a": 2}', b"\x1f\x8b\x08\x00", b"\xff" * 9):
        path.write_bytes(content)
        assert len({opening_error(open_loader, e, path) for e in ENTRIES}) == 1


def test_files_without_rows(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    assert opening_error(open_loader, entry, path) == f"{path} is empty"
    path.write_bytes(b"\n\r\n")
    assert opening_error(open_loader, entry, path) == f"{path} has no rows, only blank lines"
    assert "is a directory" in opening_error(open_loader, entry, tmp_path)
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(9))
    assert "holds zstd content" in opening_error(open_loader, entry, path)


def test_a_batch_larger_than_the_file_names_both(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 7)
    message = opening_error(open_loader, entry, path, batch_size=8)
    assert "loader.batch_size is 8" in message
    assert "gives 7 rows" in message
    assert "loader.skip 0, limit 5" in opening_error(open_loader, entry, path, batch_size=6, limit=5)


def test_only_the_first_rows_if_limited(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 7)
    path.write_bytes(path.read_bytes() + b"not looked at")
    loader = open_loader(entry, path, batch_size=3, limit=3)
    assert sorted(answers(loader.run())) == sorted(answers(loader.run())) == ["0", "1", "2"]


def test_skipped_rows_are_left_to_others(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    """`skip` k and `limit` k cut one file into two sets that share no row."""
    path = write(tmp_path / "a.jsonl", 7)
    rest, first = open_loader(entry, path, batch_size=5, skip=2), open_loader(entry, path, batch_size=2, limit=2)
    assert sorted(answers(rest.run())) == ["2", "3", "4", "5", "6"]
    assert sorted(answers(first.run())) == ["0", "1"]
    assert sorted(answers(open_loader(entry, path, batch_size=3, skip=1, limit=3).run())) == ["1", "2", "3"]
    assert "loader.skip is 7" in opening_error(open_loader, entry, path, batch_size=1, skip=7)


def test_sampling_and_purpose_travel_with_the_batch(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 2)
    override = SamplingOverride(n=1, temperature=0, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=3)
    batch = open_loader(entry, path, batch_size=2, purpose="eval", sampling=override).run()
    assert batch.sampling == Sampling(n=1, temperature=0, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=3)
    assert open_loader(entry, path, batch_size=2).run().sampling == Sampling()


def test_speed_is_measured_for_training_only(entry: Entry, open_loader: Open, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 2)
    train, evaluation = (open_loader(entry, path, batch_size=2, purpose=p) for p in ("train", "eval"))
    train.run()
    evaluation.run()
    assert summarise(train.ctx.meter.drain())["loader/rows_per_s"] > 0
    assert evaluation.ctx.meter.drain() == {}


def test_the_plan_finds_what_is_wrong_without_reading(entry: Entry, tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", 2)
    assert list(entry.cls(entry.config(path=str(good))).check(plan_facts("loader"))) == []
    bad: Any = entry.cls(entry.config(path=str(tmp_path / "none"), purpose="test", fields=FieldNames(prompt="")))
    problems = {p.where: f"{p.what} {p.hint}" for p in bad.check(plan_facts("eval_loader"))}
    assert set(problems) == {"eval_loader.path", "eval_loader.purpose", "eval_loader.fields.prompt"}
    assert "there is no file" in problems["eval_loader.path"]
    assert "allowed: eval, train" in problems["eval_loader.purpose"]
    cold: Any = entry.cls(entry.config(path=str(good), sampling=SamplingOverride(temperature=1e-39)))
    found = [p for p in cold.check(plan_facts("loader")) if p.where == "loader.sampling.temperature"]
    assert [(p.what, p.level) for p in found] == [("1e-39 is not allowed", "error")]


def test_facts(entry: Entry) -> None:
    assert entry.cls(entry.config(path="x", batch_size=5, chat=True)).facts() == {
        "prompts_per_step": 5,
        "chat_prompts": True,
    }
    assert entry.cls(entry.config(path="x", batch_size=0)).facts() == {}


def test_a_relative_path_is_looked_for_here_then_in_the_checkout(
    entry: Entry, open_loader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("data/digits/heldout.jsonl")
    assert len(open_loader(entry, path, batch_size=0).run()) == 512
    path.parent.mkdir(parents=True)
    write(path, 2)
    assert len(open_loader(entry, path, batch_size=0).run()) == 2


def test_a_loader_closes_after_a_failed_open(
    entry: Entry, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"nonsense\n")
    loader: Any = entry.cls(entry.config(path=str(path)))
    with pytest.raises(DataError):
        loader.open(make_context("loader"))
    loader.close()


def test_gsm8k(entry: Entry, open_loader: Open, shared: Path) -> None:
    path = shared / "data" / "gsm8k" / "test.jsonl"
    fields = FieldNames(prompt="question", ground_truth_after="####")
    batch = open_loader(entry, path, batch_size=0, shuffle=False, chat=True, fields=fields).run()
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert answers(batch) == [r["answer"].split("####")[-1].strip() for r in rows]
    assert batch.prompt.json(0) == [{"role": "user", "content": rows[0]["question"]}]


def test_the_wiring_and_the_settings_of_a_loader_agree(entry: Entry, tmp_path: Path) -> None:
    """Evaluation is of held-out rows, is called so, and only it may override how prompts are sampled."""
    path = write(tmp_path / "a.jsonl", 9)

    def loader(**settings: Any) -> Any:
        return entry.cls(entry.config(path=str(path), **settings))  # pyright: ignore[reportCallIssue]

    def problems(own: Any, *, evaluates: bool, **others: Any) -> list[str]:
        facts = plan_facts("own", evaluates=evaluates, nodes={"own": own, **others})
        return [p.where for p in own.check(facts)]

    held_out, rest = loader(purpose="eval", limit=3), loader(skip=3)
    assert not problems(held_out, evaluates=True, train=rest)
    assert not problems(rest, evaluates=False, eval_loader=held_out)
    for leaking in (loader(), loader(skip=2), loader(limit=1)):
        assert problems(held_out, evaluates=True, train=leaking) == ["own.path"]
    assert problems(loader(purpose="eval", skip=3), evaluates=True, train=rest) == ["own.path"]
    assert problems(held_out, evaluates=False) == ["own.purpose"]
    assert problems(rest, evaluates=True) == ["own.purpose"]
    override = SamplingOverride(n=3)
    assert problems(loader(sampling=override), evaluates=False) == ["own.sampling"]
    assert not problems(loader(sampling=override, purpose="eval"), evaluates=True)
