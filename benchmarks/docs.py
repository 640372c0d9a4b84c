"""Puts the tables of the last runs into docs/benchmarks.md: `python -m benchmarks.docs`.

Each `<!-- table: NAME -->` there is followed by a block of text, which is replaced by the table in
docs/benchmarks/NAME.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n```text\n).*?(```\n)", re.DOTALL)


def main() -> int:
    """Rewrites the page; a table that was never made stays as it is."""
    page = _DOCS / "benchmarks.md"
    page.write_text(_BLOCK.sub(_filled, page.read_text()))
    return 0


def _filled(found: re.Match[str]) -> str:
    made = _DOCS / "benchmarks" / f"{found[2]}.json"
    table = json.loads(made.read_text()).get("table") if made.exists() else None
    if table is None:
        return found[0]
    return f"{found[1]}{table.strip(chr(10))}\n{found[3]}"


if __name__ == "__main__":
    sys.exit(main())
