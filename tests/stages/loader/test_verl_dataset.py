"""verl's own dataset and ours, on the same files: every field of every row, in the same order."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.loader.rows import BadRow, DataError
from stages.loader.verl_rows import Converter, open_frame
from tests.tiny_tokenizers import write_tokenizer

KEYS = {"custom_cls": {"path": "pkg://stages.loader.verl_dataset", "name": "MappedRLHFDataset"}}


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "é\u2028" + "x" * (i * 7 % 41)}]


PLAIN = [
    {
        "data_source": "openai/gsm8k",
        "prompt": chat(i),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train", "share": i / 3, "tools_kwargs": {"calc": {"n": i}}},
    }
    for i in range(60)
]
NO_EXTRA = [{"data_source": "s", "prompt": chat(i), "answer": i if i % 2 else i + 0.5} for i in range(9)]
RAGGED = [
    {"prompt": chat(i), "data_source": "s", "extra_info": {"index": i} if i % 2 else {"other": [i, "a"]}}
    | ({"late": i} if i > 3 else {})
    | ({"note": None if i % 3 else "n"})
    for i in range(9)
]
ODD = [
    {
        "prompt": [*chat(i), {"role": "assistant", "content": "y", "tool_calls": [{"id": i}]}][: 1 + i % 2],
        "when": f"2024-01-0{i}",
        "mixed": [1, "5", {"a": 0.1234567890123456}][i % 3],
        "empty": {},
        "none": None,
        "nested": {"list": [[i], []], "flag": bool(i % 2)},
        "large": 2**62 + i,
    }
    for i in range(1, 9)
]
SETS = {"plain": PLAIN, "no extra": NO_EXTRA, "ragged": RAGGED, "odd": ODD}


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """As verl's examples write them: what `datasets` makes of the rows."""
    import datasets

    datasets.Dataset.from_list(list(rows), on_mixed_types="use_json").to_parquet(path, batch_size=7)
    return path


Write = Callable[[Path, Sequence[dict[str, Any]]], Path]
WRITERS = [pytest.param(jsonl, id="jsonl"), pytest.param(parquet, id="parquet")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte is a token, and a message has one more for its role."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def build(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """`build(file or files, max_samples=-1, processor=None, **config)`: verl's dataset and ours, by verl's own hand."""
    from datasets import config as settings
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import create_rl_dataset

    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", tmp_path / "cache")

    def both(files: Any, *, max_samples: int = -1, processor: Any = None, **config: Any) -> tuple[Any, Any]:
        base = {"cache_dir": str(tmp_path), "max_prompt_length": 40, "filter_overlong_prompts_workers": 1}
        given = [str(f) for f in files] if isinstance(files, list) else str(files)
        theirs, ours = (
            create_rl_dataset(given, OmegaConf.create(base | config | extra), tokenizer, processor, True, max_samples)
            for extra in ({}, KEYS)
        )
        assert [type(d).__name__ for d in (theirs, ours)] == ["RLHFDataset", "MappedRLHFDataset"]
        return theirs, ours

    return both


Build = Callable[..., tuple[Any, Any]]


def assert_same_value(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for k in theirs:
            assert_same_value(ours[k], theirs[k], f"{where}.{k}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_value(a, b, f"{where}[{i}]")
    elif hasattr(theirs, "tobytes"):  # a picture
        assert ours.tobytes() == theirs.tobytes()
    else:
        assert bool(ours == theirs), f"{where}: {ours!r} is not {theirs!r}"


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    assert len(theirs) > 0
    for i in range(len(theirs)):
        assert_same_value(ours[i], theirs[i], f"row {i}")


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("filtered", [True, False])
def test_every_field_of_every_row(build: Build, tmp_path: Path, write: Write, name: str, filtered: bool) -> None:
    path = write(tmp_path / f"a.{write.__name__}", SETS[name])
    theirs, ours = build(path, filter_overlong_prompts=filtered)
    assert_same(ours, theirs)
    assert (len(ours) < len(SETS[name])) is filtered


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sample_of_the_rows_is_the_same_sample(build: Build, tmp_path: Path, shuffle: bool) -> None:
    theirs, ours = build(jsonl(tmp_path / "a.jsonl", PLAIN), max_samples=20, shuffle=shuffle, seed=5)
    assert_same(ours, theirs)
    assert len(ours) < 20


def test_several_files_make_one_table(build: Build, tmp_path: Path) -> None:
    """Columns that a file lacks are None; an empty column takes the type it has elsewhere."""
    more = [{"prompt": chat(i), "data_source": "t", "reward_model": None, "images": None} for i in range(5)]
    files = [
        jsonl(tmp_path / "a.jsonl", PLAIN),
        jsonl(tmp_path / "b.json", more),
        parquet(tmp_path / "c.parquet", [{"prompt": chat(1), "data_source": "u", "images": None}] * 3),
    ]
    theirs, ours = build(files, filter_overlong_prompts=False)
    assert_same(ours, theirs)
    assert len(ours) == len(PLAIN) + 8
    with pytest.raises(ValueError, match="can't be aligned"):
        build([files[0], jsonl(tmp_path / "d.jsonl", [{"prompt": "text"}])])


def test_what_the_template_is_given_counts(build: Build, tmp_path: Path, tokenizer: Any) -> None:
    """Arguments of the chat template change a prompt's length, and are part of what is kept."""
    path = jsonl(tmp_path / "a.jsonl", PLAIN)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'y' * (more | default(0)) }}"
    lengths = set()
    for kwargs in ({}, {"more": 9}, {"chat_template": template, "more": 15}, {"truncation": True, "max_length": 20}):
        theirs, ours = build(path, apply_chat_template_kwargs=kwargs)
        assert_same(ours, theirs)
        lengths.add(len(ours))
    assert len(lengths) == 3


def test_prompts_that_the_template_refuses_are_left_out(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ raise_exception('no') if messages[0].content | length > 30 }}{{ messages[0].content }}"
    theirs, ours = build(jsonl(tmp_path / "a.jsonl", PLAIN), apply_chat_template_kwargs={"chat_template": template})
    assert_same(ours, theirs)
    refused = sum(len(r["prompt"][0]["content"]) > 30 for r in PLAIN)
    assert f"{refused} prompts are left out: the chat template refuses them" in capsys.readouterr().out


def test_pictures(build: Build, tmp_path: Path) -> None:
    """With a processor, verl's own filter looks at the rows, and its own code puts pictures into messages."""
    from PIL import Image

    rows = []
    for i in range(6):
        Image.new("RGB", (4, 3), (i, 0, 0)).save(png := io.BytesIO(), "PNG")
        content = "<image>what is it?" + "x" * 9 * i
        rows.append({"prompt": [{"role": "user", "content": content}], "images": [{"bytes": png.getvalue()}]})
    pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "a.parquet", row_group_size=4)
    theirs, ours = build(path, processor=Processor(), filter_overlong_prompts=False)
    assert_same(ours, theirs)
    texts = [{k: v for k, v in r.items() if k != "images"} for r in rows]
    pq.write_table(pa.Table.from_pylist(texts), path)
    theirs, ours = build(path, processor=Processor())
    assert_same(ours, theirs)
    assert len(ours) == 3


class Processor:
    """Renders the text and counts characters."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "".join(m["content"] for m in messages)

    def tokenizer(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}


def batches(dataset: Any, **settings: Any) -> list[dict[str, Any]]:
    """As verl's trainers load them."""
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.utils.dataset.rl_dataset import collate_fn

    given = {"batch_size": 8, "drop_last": True, "sampler": SequentialSampler(dataset), "collate_fn": collate_fn}
    return list(StatefulDataLoader(dataset, **given | settings))


@pytest.mark.parametrize(
    ("write", "workers"),
    [
        pytest.param(jsonl, {}, id="jsonl"),
        pytest.param(parquet, {}, id="parquet"),
        pytest.param(jsonl, {"num_workers": 2, "multiprocessing_context": "fork"}, id="jsonl-fork"),
        pytest.param(parquet, {"num_workers": 2, "multiprocessing_context": "fork"}, id="parquet-fork"),
        pytest.param(
            jsonl,
            {"num_workers": 1, "multiprocessing_context": "spawn"},
            id="jsonl-spawn",
            marks=pytest.mark.slow,  # the worker imports verl
        ),
    ],
)
def test_batches_of_workers(build: Build, tmp_path: Path, write: Write, workers: dict[str, Any]) -> None:
    theirs, ours = build(write(tmp_path / f"a.{write.__name__}", PLAIN))
    ours[0]  # its files are open before it is handed on
    expected, found = batches(theirs), batches(ours, **workers)
    assert len(found) == len(expected) > 2
    for a, b in zip(found, expected, strict=True):
        assert list(a) == list(b)
        for key in b:
            assert type(a[key]) is type(b[key])
            assert a[key].dtype == b[key].dtype
            assert_same_value(a[key].tolist(), b[key].tolist(), key)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_resumed_in_the_middle(build: Build, tmp_path: Path, workers: int) -> None:
    """From a data loader's saved state, with verl's sampler."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    path = jsonl(tmp_path / "a.jsonl", PLAIN)

    def load(dataset: Any) -> Any:
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 3}), dataset)
        return StatefulDataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate_fn, num_workers=workers)

    theirs, ours = build(path)
    expected = [b["index"].tolist() for b in load(theirs)]
    loader = load(ours)
    it = iter(loader)
    seen = [next(it)["index"].tolist() for _ in range(3)]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    _, again = build(path)
    resumed = load(again)
    resumed.load_state_dict(state)
    assert seen + [b["index"].tolist() for b in resumed] == expected


def test_pickled_it_opens_its_files_again(build: Build, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", PLAIN)
    theirs, ours = build(path)
    copy = pickle.loads(pickle.dumps(ours))
    assert_same(copy, theirs)
    copy.resume_dataset_state()
    assert_same(copy, theirs)
    copy = pickle.loads(pickle.dumps(ours))
    jsonl(path, PLAIN[::-1])
    with pytest.raises(DataError, match=f"{path} was changed"):
        copy[0]


def test_a_part_of_the_rows(build: Build, tmp_path: Path) -> None:
    theirs, ours = build(jsonl(tmp_path / "a.jsonl", PLAIN))
    for theirs_part, ours_part in zip(theirs.split(3), ours.split(3), strict=True):
        assert_same(ours_part, theirs_part)
    with pytest.raises(ValueError, match="positive integer"):
        ours.split(0)


def test_the_second_time_nothing_is_tokenised(
    build: Build, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the file read for its schema; another limit needs no other counts."""
    import datasets

    path = jsonl(tmp_path / "a.jsonl", PLAIN)
    theirs, ours = build(path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("done again")

    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "apply_chat_template", refuse)
        patch.setattr(datasets, "load_dataset", refuse)
        cls, config = type(ours), ours.config
        again = cls(str(path), tokenizer, config)
        assert_same(again, theirs)
        config.max_prompt_length = 30
        assert 0 < len(cls(str(path), tokenizer, config)) < len(again)
    assert {f.name.split("-")[0] for f in tmp_path.glob("a.jsonl.*")} == {
        "a.jsonl.hridx",
        "a.jsonl.hrlen",
        "a.jsonl.hrfeatures",
    }


def test_many_rows_are_counted_by_several_processes(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.loader import length_file, lengths

    monkeypatch.setattr(lengths, "_MANY", 1)
    rows = [{"prompt": [{"role": "user", "content": "x" * (i % 50)}]} for i in range(2 * length_file.BLOCK + 5)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    from stages.loader import verl_dataset

    started: list[int] = []
    start = lengths.FileLengths._work
    monkeypatch.setattr(lengths.FileLengths, "_work", lambda self, *args: started.append(args[2]) or start(self, *args))
    _, small = build(jsonl(tmp_path / "b.jsonl", rows[:100]), filter_overlong_prompts_workers=2)
    assert started == []
    ours = getattr(verl_dataset, verl_dataset.NAME)(str(path), small.tokenizer, small.config)
    assert started == [1]  # beside this one
    assert len(ours) == sum(i % 50 + 2 <= 40 for i in range(len(rows)))


def test_importing_it_loads_neither_verl_nor_torch(root: Path) -> None:
    script = (
        "import sys, stages.loader.verl_dataset as d;"
        "print([m for m in ('torch', 'verl', 'datasets', 'pyarrow', 'transformers') if m in sys.modules]);"
        "print(hasattr(d, 'Other'), d.NAME)"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "False MappedRLHFDataset"]


# -- rows beyond what the schema was taken from --------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"a": "x", "b": 1, "c": 2}', "key 'c' is none of the first rows' keys: a, b"),
        ('{"a": 5}', "key 'a' is not text, unlike in the first rows"),
        ('{"b": 1.5}', "key 'b' is not a whole number"),
        ('{"b": true}', "key 'b' is not a whole number"),
        ('{"a": ["x"]}', "key 'a' is not text"),
        ('["x"]', "is not an object"),
        ('{"a": "x"', "unexpected end of data"),
    ],
)
def test_a_row_that_does_not_fit_the_schema(line: str, told: str) -> None:
    from datasets import Features, Value

    convert = Converter(Features({"a": Value("string"), "b": Value("int64")}))
    assert convert(b'{"b": 7}') == {"a": None, "b": 7}
    with pytest.raises(BadRow) as e:
        convert(line.encode())
    assert told in str(e.value)


def test_the_place_of_such_a_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"a": "x"}] * 5)
    frame = open_frame([str(path)])
    rows = [{"a": "x"}] * 3 + [{"b": 1}] + [{"a": "x"}]
    jsonl(path, rows)
    late = open_frame([str(path)])
    late.files[0].set_features(frame.features)
    assert late[2] == {"a": "x"}
    with pytest.raises(DataError, match=rf"{path}:4 \(byte 33\): key 'b' is none of the first rows' keys: a"):
        late[3]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[{"a": 1}]')
    with pytest.raises(DataError, match="is one JSON list; one object a line is needed"):
        open_frame([str(tmp_path / "a.jsonl")])
    with pytest.raises(ValueError, match="Unsupported file format"):
        open_frame([str(tmp_path / "a.csv")])


def test_a_frame_selects_and_filters(tmp_path: Path) -> None:
    frame = open_frame([str(jsonl(tmp_path / f"{n}.jsonl", [{"a": i} for i in range(4)])) for n in "xy"])
    assert [r["a"] for r in (frame[i] for i in range(len(frame)))] == [0, 1, 2, 3] * 2
    some = frame.select([7, 0, 4]).select(np.array([0, 2]))
    assert [some[i]["a"] for i in range(2)] == [3, 0]
    assert [r["a"] for r in map(frame.filter(lambda r: r["a"] > 2).__getitem__, (0, 1))] == [3, 3]
    assert frame.column_names == ["a"]
