"""What is told of the runs of a comparison: in the terminal, in compare.json and on the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.compare import page, report, table
from pipeline.compare.cells import cells
from pipeline.compare.report import Outcome, Report
from pipeline.config import CompareSettings

OPTIONS = ["one", "two <b>&\"'</b>", "three"]
STEP_S = {0: [[9.0, 1.0, 2.0, 3.0], [9.0, 2.0, 2.0, 3.0]], 1: [[9.0, 0.4, 0.5, 0.6], [9.0, 0.4, 0.5, 0.6]]}
"""Cell -> run -> seconds of steps 1 to 4, of which the first is not counted."""
BROKEN = "step 0/4\nTraceback ...\nstage 'x' failed in step 0: ValueError: <no>\nThe traceback is in run.log\n"


def write_run(folder: Path, seconds: Sequence[float], *, state: str = "done", code: int = 0, log: str = "") -> None:
    """A run directory as `python run.py` leaves it."""
    folder.mkdir(parents=True)
    record = {"job": 0, "state": state, "exit": code, "seconds": 10.0 + len(folder.name), "started": 1.0}
    (folder / "job.json").write_text(json.dumps(record))
    (folder / "job.log").write_text(log)
    rows = [{"step": 0, "memory/peak_gb": 1.0}]
    rows += [
        {"step": i, "time/step_s": s, "memory/peak_gb": 1.0 + i, "x/wait_s": 0.0} for i, s in enumerate(seconds, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = folder / "records" / "1"
    kept.mkdir(parents=True)
    tokens, offsets = np.arange(4, dtype=np.int32), np.array([0, 2, 4])
    columns = {"response_ids": tokens, "log_probs": np.full(4, -len(seconds), np.float32), "prompt_ids": tokens}
    flat = {f"{name}.values": column for name, column in columns.items()}
    flat |= {f"{name}.offsets": offsets for name in columns}
    np.savez(kept / "rollout.npz", row_id=np.array([0, 1]), **flat)


@pytest.fixture
def made(tmp_path: Path) -> Report:
    """Three cells of two runs: the second is quicker, the third broke in its second run."""
    settings = CompareSettings(axis="x.y", options=OPTIONS, repeats=2, warmup=1)
    outcomes = [Outcome(cell, (*cell.overrides, "seed=3"), [], 1) for cell in cells(settings)]
    for outcome in outcomes:
        for repeat in (1, 2):
            folder = tmp_path / "runs" / f"{outcome.cell.number}-{repeat}"
            if outcome.cell.number == 2 and repeat == 2:
                write_run(folder, [], state="failed", code=1, log=BROKEN)
            else:
                write_run(folder, STEP_S.get(outcome.cell.number, STEP_S[1])[repeat - 1])
            run = report.read(repeat, folder, others=0.01 * repeat)
            assert run is not None
            outcome.runs.append(run)
    return Report(
        settings, 4, outcomes, ["0-1", "1-1"], {"python": "3", "packages": {"a": "<1>"}, "command": ["p", "&"]}
    )


def test_values_of_all_repeats_are_pooled_and_the_first_is_what_others_are_compared_with(made: Report) -> None:
    first, second, _ = made.outcomes
    assert first.values["time/step_s"] == [[1.0, 2.0, 3.0], [2.0, 2.0, 3.0]]
    assert (first.summaries["time/step_s"].median, second.summaries["time/step_s"].median) == (2.0, 0.5)
    found = made.against("time/step_s", second)
    assert found is not None
    assert (found.change, found.verdict) == (0.25, "better")
    assert made.against("time/step_s", first) is None
    assert first.values["memory/peak_gb"] == [[5.0], [5.0]]
    assert first.values["run/seconds"] == [[13.0], [13.0]]


def test_a_cell_with_a_broken_run_is_failed_and_keeps_the_numbers_of_the_others(made: Report) -> None:
    broken = made.outcomes[2]
    assert [o.state for o in made.outcomes] == ["done", "done", "failed"]
    assert not made.well
    assert broken.summaries["time/step_s"].count == 3
    [run] = broken.failed
    assert run.failure == "ended with exit status 1: stage 'x' failed in step 0: ValueError: <no>"
    assert list(table.failures(made)) == [
        f"three: run 2 of 2 failed, {run.failure}",
        f"    its log is {run.folder}/job.log",
    ]


def test_without_a_baseline_nothing_is_compared(
    made: Report, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for number, run in enumerate(made.baseline.runs):
        made.baseline.runs[number] = report.Run(
            run.repeat, run.folder, {**run.record, "state": "failed", "exit": -9}, [], 0.0
        )
    assert made.against("time/step_s", made.outcomes[1]) is None
    assert made.drift(made.outcomes[1]) is None
    table.show(made, tmp_path)
    shown = capsys.readouterr().out
    assert "one: run 1 of 2 failed, ended by SIGKILL: it printed nothing" in shown
    assert "x better" not in shown
    assert "0.500" in shown
    assert 'class="value alike">failed</div>' in page.html(made)


def test_drift_is_of_first_runs_and_of_the_first_between_its_own(made: Report) -> None:
    found = [made.drift(outcome) for outcome in made.outcomes]
    assert [d and (d.mean, d.tokens, d.equal, d.rows) for d in found] == [(0.0, 4, 2, 2)] * 3


def test_the_file_holds_every_value(made: Report, tmp_path: Path) -> None:
    report.write(made, tmp_path)
    found = json.loads((tmp_path / "compare.json").read_text())
    first, second, broken = found["cells"]
    assert (found["axes"], found["baseline"]) == ([{"axis": "x.y", "options": OPTIONS}], "one")
    measured = second["measures"]["time/step_s"]
    assert (measured.pop("low"), measured.pop("high")) == pytest.approx((0.425, 0.575))
    assert measured == {
        "title": "time of a step",
        "unit": "s",
        "better": "lower",
        "by": "ratio",
        "count": 6,
        "median": 0.5,
        "change": 0.25,
        "verdict": "better",
        "values": [[0.4, 0.5, 0.6], [0.4, 0.5, 0.6]],
    }
    assert first["measures"]["time/step_s"]["change"] is None
    assert first["command"] == "python run.py x.y=one seed=3"
    assert [run["metrics"][-1]["time/step_s"] for run in first["runs"]] == [3.0, 3.0]
    assert broken["state"] == "failed"
    assert broken["failures"] == [{"repeat": 2, "reason": made.outcomes[2].failed[0].failure, "log": "2-2/job.log"}]
    assert found["environment"]["packages"] == {"a": "<1>"}
    assert second["drift"]["mean"] == 0.0


def test_a_narrow_terminal_shows_the_columns_below_each_other(
    made: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heads = {}
    for width in (200, 125):
        monkeypatch.setenv("COLUMNS", str(width))
        table.show(made, tmp_path)
        shown = capsys.readouterr().out
        heads[width] = shown.count("time of a step, s ↓")
        assert all(len(line) <= width for line in shown.splitlines() if line.startswith(("│", "┃")))
        assert "0.500 (0.425 to 0.575)  0.25x better" in shown
        assert "2.000 (2.000 to 2.750)" in shown
    assert heads == {200: 1, 125: 2}
    assert "2 runs of each, 3 steps a run after 1 that is not counted" in shown


def test_a_busy_machine_is_told(made: Report, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "machine was busy" not in page.html(made)
    first, *rest = made.baseline.runs
    made.baseline.runs[:] = [replace(first, others=1.0 * (os.cpu_count() or 1)), *rest]
    warning = f"other programs took up to {os.cpu_count():.1f} of {os.cpu_count()} CPUs in a run"
    table.show(made, tmp_path)
    assert warning in capsys.readouterr().out
    assert warning in Reader(page.html(made)).text
    assert made.plain()["cells"][0]["runs"][0]["others"] == os.cpu_count()


# -- the page ----------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Elements in order, as (tag, attributes), and all text; an element that is closed wrongly raises."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def bars(elements: Sequence[tuple[str, dict[str, str]]]) -> dict[str, list[tuple[float, float]]]:
    """Metric -> (value, width in percent) of each bar."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _, attributes in elements:
        if metric := attributes.get("data-metric"):
            found[metric] = []
        elif "data-value" in attributes:
            width = re.search(r"width:([\d.]+)%", attributes["style"])
            assert width
            found[[*found][-1]].append((float(attributes["data-value"]), float(width[1])))
    return found


def test_the_page_needs_nothing_from_elsewhere_and_is_well_formed(made: Report) -> None:
    text = page.html(made)
    read = Reader(text)
    tags = {tag for tag, _ in read.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "b"}, "also no tag from the name of an option"
    assert not [a for _, attributes in read.elements for a in attributes if a in ("src", "href") or a.startswith("on")]
    assert not re.search(r"https?:|//|@import|url\(", text)
    assert {"content": "default-src 'none'; style-src 'unsafe-inline'"}.items() <= next(
        attributes.items()
        for _, attributes in read.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    for shown in (*OPTIONS, "<no>", "a <1>", "0.25x better", "2.000 (2.000 to 2.750)", "seed=3"):
        assert shown in read.text, shown
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_bars_are_as_long_as_their_values(made: Report) -> None:
    found = bars(Reader(page.html(made)).elements)
    assert {"time/step_s", "memory/peak_gb", "run/seconds", "run/others", "x/wait_s"} == set(found)
    assert [value for value, _ in found["time/step_s"]] == [2.0, 0.5, 0.5]
    for metric, lengths in found.items():
        scale = max(width / value for value, width in lengths if value) if any(v for v, _ in lengths) else 0
        for value, width in lengths:
            assert width == pytest.approx(scale * value, abs=1e-3), metric
            assert 0 <= width <= 100
    assert max(w for _, w in found["memory/peak_gb"]) == pytest.approx(100)


def test_values_below_zero_go_the_other_way(made: Report) -> None:
    scale = page._Scale([report.summary([-1.0]), report.summary([3.0])])
    assert scale.span(0.0, -1.0) == "left:0.0000%;width:25.0000%"
    assert scale.span(0.0, 3.0) == "left:25.0000%;width:75.0000%"


BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
LOOK = """<script>
const box = e => e.getBoundingClientRect();
const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const texts = [...document.querySelectorAll("h1,h2,h3,p,.name,.value,td,th,pre")].filter(e => e.textContent.trim());
const found = {bars: {}, overlaps: [], cut: [], loaded: performance.getEntriesByType("resource").map(r => r.name),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth};
document.querySelectorAll("[data-metric]").forEach(c => found.bars[c.dataset.metric] =
  [...c.querySelectorAll("[data-value]")].map(b => [+b.dataset.value, box(b).width, box(b.parentNode).width]));
texts.forEach((a, i) => texts.slice(i + 1).forEach(b => { if (!a.contains(b) && over(box(a), box(b)))
  found.overlaps.push([a.textContent, b.textContent]); }));
texts.forEach(e => { if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth) found.cut.push(e.textContent); });
document.title = JSON.stringify(found);
</script></body>"""


def seen(text: str, folder: Path, width: int) -> dict[str, Any]:
    """The page in a browser without a network, with a script beside it that measures what was drawn."""
    assert BROWSER
    allowed = text.replace("style-src", "script-src 'unsafe-inline'; style-src").replace("</body>", LOOK)
    (folder / "page.html").write_text(allowed)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom")
    own = (f"--user-data-dir={folder}/browser", f"--window-size={width},1200", f"file://{folder}/page.html")
    run = subprocess.run([BROWSER, *flags, *own], capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*)</title>", run.stdout)
    assert title, run.stderr[-2000:]
    reader = Reader(f"<p>{title[1]}</p>")
    return json.loads(reader.text)


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None, reason="there is no Chromium here; the standard library's parser has read the page"
)
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_it_without_a_network(made: Report, tmp_path: Path, width: int) -> None:
    found = seen(page.html(made), tmp_path, width)
    assert found["loaded"] == []
    assert (found["overlaps"], found["cut"]) == ([], [])
    assert found["wide"] <= 0, "the page is wider than its window"
    assert [value for value, *_ in found["bars"]["time/step_s"]] == [2.0, 0.5, 0.5]
    [(value, drawn, track), *others] = found["bars"]["time/step_s"]
    assert drawn == pytest.approx(track * 2.0 / 2.75, abs=1)  # the upper quartile reaches the end
    for other, pixels, _ in others:
        assert pixels == pytest.approx(drawn * other / value, abs=1)
