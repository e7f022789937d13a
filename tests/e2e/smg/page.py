"""The example's page as shell scripts: what stands between ```sh and ``` under a heading."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "epd-smg"


def scripts(heading: str) -> list[str]:
    """The scripts of one section, without those of the sections below it."""
    text = (EXAMPLE / "README.md").read_text()
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"the page has no section {heading!r}"
    return re.findall(r"^```sh\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
