"""Draws the tables and the diagram of states.md from the worker's own rules.

python docs/draw_states.py            rewrite docs/states.md
python docs/draw_states.py --check    exit 1 if it is not up to date
"""

import re
import sys
from pathlib import Path

from encodepool_worker.core.room import EVENTS, RULES, Go, RoomState, Verdict
from encodepool_worker.core.room_events import ANSWERS, OUTSIDE

PAGE = Path(__file__).parent / "states.md"
BLOCK = re.compile(r"(<!-- drawn: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = [state for state in RoomState if state is not RoomState.GONE]


def draw_states() -> str:
    lines = ["| state | means |", "|---|---|"]
    lines += [f"| {state.name} | {state.value} |" for state in RoomState]
    return "\n".join(lines)


def draw_table() -> str:
    lines = [
        "| in | " + " | ".join(event.__name__ for event in EVENTS) + " |",
        "|---" * (len(EVENTS) + 1) + "|",
    ]
    for state in SHOWN:
        cells = [_cell(state, RULES[state, event]) for event in EVENTS]
        lines.append(f"| {state.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(state: RoomState, rule: Go | Verdict) -> str:
    if rule is Verdict.BUG:
        return "bug"
    if rule is Verdict.IGNORE:
        return "-"
    assert isinstance(rule, Go)
    names = [to.name for to in RoomState if to in rule.to and to is not state]
    return " / ".join(["stay", *names] if state in rule.to else names)


def draw_diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    arrows: dict[tuple[RoomState, RoomState], list[str]] = {}
    for (state, event), rule in RULES.items():
        for to in rule.to if isinstance(rule, Go) else ():
            if to is not state:
                arrows.setdefault((state, to), []).append(event.__name__)
    arrows[RoomState.PARKED, RoomState.SHIPPING] = ["all receivers known"]
    order = list(RoomState)
    for state, to in sorted(arrows, key=lambda arrow: [order.index(end) for end in arrow]):
        label = ", ".join(arrows[state, to])
        lines.append(f"    {_end(state)} --> {_end(to)}: {label}")
    return "\n".join([*lines, "```"])


def _end(state: RoomState) -> str:
    return "[*]" if state in (RoomState.NEW, RoomState.GONE) else state.name


def draw_events() -> str:
    lines = ["| event | from | says |", "|---|---|---|"]
    for event in EVENTS:
        source = "outside" if event in OUTSIDE else "answer" if event in ANSWERS else "timer"
        says = (event.__doc__ or "").split("\n")[0].replace("``", "`")
        lines.append(f"| {event.__name__} | {source} | {says} |")
    return "\n".join(lines)


DRAWN = {"states": draw_states, "events": draw_events, "table": draw_table, "diagram": draw_diagram}


def drawn(text: str) -> str:
    """The page with every drawn block as the rules have it now."""
    return BLOCK.sub(lambda m: f"{m[1]}{DRAWN[m[2]]()}\n{m[3]}", text)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    if text == drawn(text):
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.name} is not up to date: run python docs/draw_states.py", file=sys.stderr)
        return 1
    PAGE.write_text(drawn(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
