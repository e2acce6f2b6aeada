"""`import.FROM=PATH` on a command line: what is asked, what is misspelt, and what cannot stand beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import importing
from pipeline.errors import PlanError
from pipeline.importing import asked, read, sources


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.sh").write_text("x")
    return tmp_path


def problems(*argv: str) -> list[str]:
    with pytest.raises(PlanError) as e:
        read(argv)
    return [str(p) for p in e.value.problems]


def test_sources_are_the_packages_of_importers() -> None:
    assert sources() == ["verl"]


@pytest.mark.parametrize(
    "text", ["import.verl=x", "import=verl", "import", "import.vrl=x", "+import.verl=x", "imports.verl=x"]
)
def test_an_import_is_seen_however_it_is_written(text: str) -> None:
    assert asked(["a=1", text])


@pytest.mark.parametrize(
    "text", ["rollout.n=4", "name=import.verl=x", "run.verl=1", "-m", "--config-dir", "rollout=verl"]
)
def test_other_overrides_are_none(text: str) -> None:
    assert not asked([text])


def test_the_name_is_that_of_the_file_or_as_given() -> None:
    assert read(["import.verl=start.sh"]).name == "start"
    request = read(["name=mine", "import.verl=start.sh"])
    assert (request.source, request.path, request.name) == ("verl", Path("start.sh"), "mine")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import=verl", "import: does not say what is imported\n    write import.FROM=PATH, where FROM is verl"),
        ("import", "import: does not say what is imported\n    write import.FROM=PATH, where FROM is verl"),
        ("import.vrl=start.sh", "import.vrl: nothing is known of 'vrl'\n    did you mean 'verl'? allowed: verl"),
        (
            "imprt.verl=start.sh",
            "imprt.verl: no such command\n    did you mean 'import.verl'? import.FROM=PATH, where FROM is verl",
        ),
        (
            "+import.verl=start.sh",
            "+import.verl: is a command and no setting\n    write it without '+': import.FROM=PATH, where FROM is verl",
        ),
        ("import.verl=", "import.verl: names no file\n    import.FROM=PATH, where FROM is verl"),
        ("import.verl=strat.sh", "import.verl: 'strat.sh' is not a file\n    did you mean 'start.sh'?"),
        ("import.verl=.", "import.verl: '.' is a folder\n    give a file"),
    ],
)
def test_what_is_misspelt(text: str, says: str) -> None:
    assert problems(text) == [says]


def test_what_cannot_stand_beside_it_is_told_with_all_else() -> None:
    found = problems("import.verl=nowhere", "-m", "seed=0,1", "import.verl=start.sh", "name=a/b")
    assert [f.partition(":")[0] for f in found] == ["import.verl", "import.verl", "name", "-m", "seed"]
    assert "only name=..., the recipe's name, goes with import.verl" in found[-1]
    assert "name=a-b" in found[2]


def test_a_recipe_is_never_written_over(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = here / "imported" / "experiment" / "start.yaml"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    [problem] = problems("import.verl=start.sh")
    assert "is there already" in problem
    assert "import.verl=start.sh name=start-2" in problem
    with pytest.raises(PlanError, match="is there already"):
        importing._write(there, "other")  # made by somebody else meanwhile
    assert there.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_a_problem(here: Path) -> None:
    (here / "imported").write_text("a file")
    with pytest.raises(PlanError, match="cannot be written"):
        importing._write(Path("imported/experiment/x.yaml"), "text")
