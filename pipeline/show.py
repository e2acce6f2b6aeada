"""The plan for a reader: text for a terminal, a Mermaid flowchart for a document, JSON for a program."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config import PlanFormat
from pipeline.graph import Graph
from pipeline.plan import HELD, Plan, changed
from pipeline.stage import has, ports

WIDTH = 100
"""Columns, where standard output is no terminal, or a wider one."""


def show(plan: Plan) -> str:
    """The plan in the format that `plan.format` names."""
    return {PlanFormat.text: render, PlanFormat.mermaid: mermaid, PlanFormat.json: as_json}[plan.root.plan.format](plan)


def as_json(plan: Plan) -> str:
    """What a run writes to `plan.json`."""
    return json.dumps(plan.plain(), indent=1)


def width() -> int:
    """Columns for text: those of the terminal, at most WIDTH and at least half of it."""
    columns = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    return min(max(columns, WIDTH // 2), WIDTH)


def render(plan: Plan, columns: int | None = None) -> str:
    """The graph, the backends with their changed settings, derived sizes, memory, warnings."""
    columns = columns or width()
    blocks = [
        _graph(plan, columns),
        "\n".join(_table(_nodes(plan), columns)),
        "\n".join(_settings(plan, columns)),
        "\n".join(_sizes(plan, columns)),
        "\n".join(_memory(plan, columns)),
        "\n".join(_wrapped(f"warning: {p}", columns, "    ") for p in plan.problems),
    ]
    return "\n\n".join(block for block in blocks if block)


# -- the graph -----------------------------------------------------------------------------------------------


def _graph(plan: Plan, columns: int) -> str:
    graph, every = plan.graph, plan.root.eval.every
    lines = [
        f"plan of '{plan.root.name}': {plan.root.run.steps} steps on {plan.estimates.device}",
        "",
        *tree(graph),
        "",
    ]
    said = [("then learn", ", ".join(graph.learn))] if graph.learn else []
    said += [("publish", f"{learner} -> {server}") for server, learner in graph.publish.items()]
    if graph.evaluate:
        said.append(("evaluate", " -> ".join(graph.evaluate)))
        said.append(("", "before the first and after the last step" + (f", and every {every}" if every else "")))
    return "\n".join([*lines, *(_wrapped(f"{head:<12} {text}", columns, " " * 13) for head, text in said)])


def tree(graph: Graph) -> list[str]:
    """The forward phase as lines of a tree: a node hangs under the last of its producers, and names the others."""
    order = list(graph.forward)
    parent = {n: max(feeds.values(), key=order.index, default=None) for n, feeds in graph.forward.items()}
    below: dict[str | None, list[str]] = {}
    for node in order:
        below.setdefault(parent[node], []).append(node)

    def lines(node: str, stem: str, branch: str) -> Iterator[str]:
        others = [p for p in dict.fromkeys(graph.forward[node].values()) if p != parent[node]]
        yield f"{stem}{branch}{node}" + (f"   (also from {', '.join(others)})" if others else "")
        inner = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        children = below.get(node, [])
        for child in children:
            yield from lines(child, inner, "└─ " if child == children[-1] else "├─ ")

    return [line for root in below.get(None, []) for line in lines(root, "", "")]


def mermaid(plan: Plan) -> str:
    """A flowchart (mermaid.js.org): forward edges with their records, learning dotted, weights thick."""
    graph, out = plan.graph, ["flowchart LR"]
    for node, spec in plan.nodes.items():
        place = plan.placement(node).value
        out.append(f'  {node}["{node}<br/>{spec.cls.backend}{"" if place == "local" else f" @{place}"}"]')
    for node, feeds in graph.forward.items():
        out += [f"  {p} -->|{_record(plan, p)}| {node}" for p in feeds.values()]
    for node, feeds in graph.learn.items():
        out.append(f'  {node}_learn(["{node}: learn"])')
        out += [f"  {p} -.-> {node}_learn" for p in feeds.values()]
    for server, learner in graph.publish.items():
        out.append(f"  {f'{learner}_learn' if learner in graph.learn else learner} ==>|weights| {server}")
    out += [f"  {a} -. evaluate .-> {b}" for a, b in zip(graph.evaluate, graph.evaluate[1:], strict=False)]
    return "\n".join(out)


def _record(plan: Plan, node: str) -> str:
    """The name of the record that a forward node makes."""
    made = ports(plan.nodes[node].cls, "run").output
    return made.__name__ if made else ""


# -- the tables ----------------------------------------------------------------------------------------------


def _nodes(plan: Plan) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("node", "backend", "takes", "gives")]
    for name, spec in plan.nodes.items():
        feeds, place = plan.graph.forward.get(name, {}), plan.placement(name).value
        takes = ", ".join(f"{port}={producer}" for port, producer in feeds.items())
        gives = _record(plan, name) if has(spec.cls, "run") else ""
        rows.append((name, spec.cls.backend + ("" if place == "local" else f" @{place}"), takes, gives))
    rows += [(key, spec.cls.backend, "", "(component)") for key, spec in plan.components().items()]
    return rows


def _table(rows: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    """Columns as wide as their widest cell; where they do not fit, the widest are made narrower and wrapped."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    while sum(widths) + 2 * (len(widths) - 1) > columns and max(widths) > 10:
        widths[widths.index(max(widths))] -= 1
    for row in rows:
        cells = [textwrap.wrap(cell, w, break_on_hyphens=False) or [""] for cell, w in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = [(c[i] if i < len(c) else "").ljust(w) for c, w in zip(cells, widths, strict=True)]
            yield "  ".join(line).rstrip()


def _settings(plan: Plan, columns: int) -> Iterator[str]:
    specs = {k: s for k, s in {**plan.nodes, **plan.components()}.items() if changed(s.config)}
    if specs:
        yield "settings that differ from their defaults"
    heads = _heads(specs)
    for key, spec in specs.items():
        text = ", ".join(f"{name}={_shown(value)}" for name, value in changed(spec.config).items())
        yield _wrapped(heads[key] + text, columns, " " * len(heads[key]))


def _sizes(plan: Plan, columns: int) -> Iterator[str]:
    sizes = {n: s for n, s in plan.estimates.sizes.items() if s}
    if sizes:
        yield "sizes"
    heads = _heads(sizes)
    for node, of_node in sizes.items():
        text = ", ".join(f"{name}: {_shown(value)}" for name, value in of_node.items())
        yield _wrapped(heads[node] + text, columns, " " * len(heads[node]))


def _heads(keys: Mapping[str, object]) -> dict[str, str]:
    longest = max(map(len, keys), default=0)
    return {key: f"  {key:<{longest}}  " for key in keys}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) and abs(value) > 9999 else str(value)


def _memory(plan: Plan, columns: int) -> Iterator[str]:
    """Bytes a node needs at its fullest, by kind; then the sum on each device against what is there."""
    estimates = plan.estimates
    there = dict.fromkeys(kind for parts in estimates.memory.values() for kind in parts)
    if not there:
        return
    kinds = sorted(there, key=lambda kind: HELD.index(kind) if kind in HELD else len(HELD))
    rows: list[Sequence[str]] = [("memory, estimated", *(k.replace("_", " ") for k in kinds), "together")]
    for node, parts in estimates.memory.items():
        cells = (size_of(parts[k]) if k in parts else "" for k in kinds)
        rows.append((f"  {node}", *cells, size_of(sum(parts.values()))))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    if sum(widths) + 2 * (len(widths) - 1) <= columns:
        for row in rows:
            yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
    else:
        yield rows[0][0]
        for row in rows[1:]:
            cells = (f"{kind} {cell}" for kind, cell in zip(rows[0][1:], row[1:], strict=True) if cell)
            yield _wrapped(f"{row[0].ljust(widths[0])} {', '.join(cells)}", columns, " " * (widths[0] + 1))
    for device, of_nodes in estimates.needed().items():
        memory = estimates.there.get(device)
        has = (
            f"{size_of(memory.free)} of {size_of(memory.total)} are free here"
            if memory
            else "what is there is not known here"
        )
        yield _wrapped(f"  all on {device}: {size_of(sum(of_nodes.values()))} at most; {has}", columns, "    ")


def size_of(count: int) -> str:
    """Bytes in decimal units, three digits: `12.3 MB`."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            number = count / scale
            return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {unit}"
    return f"{count} B"


def _wrapped(text: str, columns: int, indent: str) -> str:
    """Each line of the text in lines of so many columns, words whole."""
    lines = text.split("\n")
    options = {"width": columns, "break_long_words": False, "break_on_hyphens": False}
    first = textwrap.fill(lines[0], subsequent_indent=indent, **options)
    return "\n".join([first, *(textwrap.fill(x, subsequent_indent=indent, **options) for x in lines[1:])])
