"""The report, and one line of it."""

import json
from typing import NamedTuple


class Row(NamedTuple):
    """What one check has found, and what to do about it."""

    check: str
    state: str  # ok, limited, not ok or unknown; command.py says what they mean
    text: str
    remedy: str = ""
    facts: dict = None  # numbers and names, for programs that read the report as JSON

    def as_line(self):
        """Return the row as a line to read."""
        cure = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.check}: {self.text}{cure}"

    def as_dict(self):
        """Return the row as a dict for JSON, the facts beside the other fields."""
        fields = self._asdict()
        facts = fields.pop("facts") or {}
        return {**fields, **facts}


class Report:
    """The rows that were found: told at once, or as one JSON object at the end."""

    def __init__(self, as_json, rows=(), speaks=True):
        self.rows, self.as_json, self.speaks = [*rows], as_json, speaks

    def tell(self, rows):
        """Add rows, and print them."""
        for row in rows:
            self.rows.append(row)
            if self.speaks and not self.as_json:
                print(row.as_line(), flush=True)

    def end(self):
        """Print what is to be done, or all as JSON; return the exit code."""
        wrong, limited, unknown = map(self.named, ("not ok", "limited", "unknown"))
        last = "ok       all that is needed is here"
        if limited:
            last = f"limited  the course runs; look above for what does not: {'; '.join(limited)}"
        if unknown:
            last += f" (not known: {'; '.join(unknown)})"
        if wrong:
            last = f"not ok   {len(wrong)} to mend: {'; '.join(wrong)}"
        if self.as_json:
            last = json.dumps({"ok": not wrong, "checks": [row.as_dict() for row in self.rows]})
        if self.speaks:
            print(last, flush=True)
        return 1 if wrong else 0

    def named(self, state):
        """Return the names of the checks that ended so."""
        return [row.check for row in self.rows if row.state == state]
