"""The plan as text for a terminal."""

from __future__ import annotations

from pipeline.plan import Plan, changed


def render(plan: Plan) -> str:
    """The graph, the backends with their changed settings, derived sizes, warnings."""
    rows = [("node", "backend", "takes", "gives", "settings that differ from default")]
    for name, node in plan.plain()["nodes"].items():
        takes = ", ".join(f"{p}={s}" for p, s in node["inputs"].items() if s)
        place = "" if node["placement"] == "local" else f" @{node['placement']}"
        gives = node["output"] or ""
        rows.append((name, node["backend"] + place, takes, gives, _settings(node["changed"])))
    held = {c.key: c for s in plan.nodes.values() for c in s.walk() if c.key not in plan.nodes}
    for key, spec in {**held, "runner": plan.runner, "tracker": plan.tracker}.items():
        rows.append((key, spec.cls.backend, "", "(component)", _settings(changed(spec.config))))
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    table = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[4]]).rstrip() for r in rows]
    sections = {
        "learn": list(plan.graph.learn),
        "publish": [f"{learner} -> {server}" for server, learner in plan.graph.publish.items()],
        "evaluate": list(plan.graph.evaluate),
    }
    lines = [f"forward   {' -> '.join(plan.graph.forward)}"]
    lines += [
        f"{name:<9} {(' -> ' if name == 'evaluate' else ', ').join(items)}" for name, items in sections.items() if items
    ]
    facts = ", ".join(f"{k} {v}" for k, v in plan.facts.items())
    return "\n".join([*lines, "", *table, "", f"sizes: {facts}", *(f"warning: {p}" for p in plan.problems)])


def _settings(changed: dict[str, object]) -> str:
    return ", ".join(f"{k}={v}" for k, v in changed.items())
