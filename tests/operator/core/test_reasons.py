"""Reasons of conditions and Events: the table, the pages and the code say the same."""

import ast
from pathlib import Path

import pytest

from encodepool_operator.core import reasons
from encodepool_operator.core.reasons import BY_NAME, TABLE, to_act_on

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "operator" / "encodepool_operator").rglob("*.py"))
CONDITIONS = ("Ready", "Available", "Progressing", "Degraded", "EndpointsPublished", "Stalled", "Reconciling")


def texts(node):
    return {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and leaf.value} - {True}


def in_code():
    """(where, reason) of every condition, trouble and notice that the code makes."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            match node.func.id:
                case "_Condition" if isinstance(node.args[0], ast.Constant):
                    chosen = node.args[2]
                    parts = [chosen.body, chosen.orelse] if isinstance(chosen, ast.IfExp) else [chosen]
                    kind = node.args[0].value
                    found |= {(kind, part.value) for part in parts if isinstance(part, ast.Constant)}
                case "Trouble":
                    found |= {("Stalled", reason) for reason in texts(node.args[0])}
                case "Notice":
                    found |= {("Event", reason) for reason in texts(node.args[1])}
    return found


def test_the_table_holds_the_reasons_of_the_code_and_no_others():
    assert in_code() == {(where, reason.name) for reason in TABLE for where in reason.where}
    assert {where for reason in TABLE for where in reason.where} == {*CONDITIONS, "Event"}


def test_every_reason_has_a_page_and_every_page_a_reason():
    pages = {path.stem for path in (ROOT / reasons.FOLDER).glob("*.md")} - {"README"}
    assert pages == set(BY_NAME)
    assert (ROOT / reasons.FOLDER / "README.md").read_text() == reasons.index() + "\n"


@pytest.mark.parametrize("reason", TABLE, ids=lambda reason: reason.name)
def test_a_page_says_what_it_means_and_what_to_do(reason):
    page = (ROOT / reason.page).read_text()
    assert page.startswith(f"# {reason.name}\n\nReason of ")
    meaning = " ".join(page.split("\n## ")[0].split())
    assert reason.meaning[1:] in meaning
    for where in reason.where:
        assert (f"`{where}`" if where != "Event" else "an Event") in meaning
    assert "## Do\n" in page
    assert ("## Look\n" in page) or not reason.act
    assert len(page.splitlines()) < 40


def test_links_between_pages_lead_somewhere():
    import re

    for path in (ROOT / reasons.FOLDER).glob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / target).is_file(), (path.name, target)


def test_only_what_somebody_must_do_is_pointed_at():
    conditions = [
        ("Ready", "Incomplete"),
        ("Available", "TooFew"),
        ("Stalled", "RestartsExhausted"),
        ("Degraded", "GroupsFailed"),
        ("Degraded", "NotOurs"),
        ("Ready", "GroupFailed"),
    ]
    assert [reason.name for reason in to_act_on(conditions)] == [
        "TooFew",
        "GroupsFailed",
        "RestartsExhausted",
    ]
