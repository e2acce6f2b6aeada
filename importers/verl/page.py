"""The table of `docs/verl.md`, made of the rules: `python -m importers.verl.page` writes it into the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from importers.verl.table import SECTIONS, Rule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl.md"
BEGIN, END = "<!-- made by python -m importers.verl.page -->", "<!-- end -->"
WIDTH = 135
SHORT = {"actor_rollout_ref.": "arr."}


def tables() -> str:
    """A table for each section. Neighbours without an equal, for the same reason, share a line where it has room."""
    out: list[str] = []
    for name, rules in SECTIONS:
        out += [f"### {name}", "", "| verl | here | to know |", "|---|---|---|", *_rows(rules), ""]
    return "\n".join(out)


def _rows(rules: Sequence[Rule]) -> Iterator[str]:
    keys: list[str] = []
    last: Rule | None = None
    for rule in rules:
        alike = last is not None and not last.here and not rule.here and last.note == rule.note
        if last is not None and not (alike and len(_row([*keys, rule.keys], last)) <= WIDTH):
            yield _row(keys, last)
            keys = []
        keys.append(rule.keys)
        last = rule
    if last is not None:
        yield _row(keys, last)


def _row(keys: Sequence[str], rule: Rule) -> str:
    here = ", ".join(f"`{h.removeprefix('/')}`" for h in rule.here) or "none"
    differs = f"differs: {rule.note}" if rule.here and rule.note else rule.note
    return f"| {', '.join(map(_short, keys))} | {here} | {'; '.join(filter(None, (rule.how, differs)))} |"


def _short(key: str) -> str:
    for long, short in SHORT.items():
        key = short + key.removeprefix(long) if key.startswith(long) else key
    return f"`{key}`"


def inserted(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(inserted(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
