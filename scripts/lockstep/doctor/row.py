"""One line of the report."""

from typing import NamedTuple


class Row(NamedTuple):
    """What one check has found, and what to do about it."""

    check: str
    state: str  # ok, limited, not ok or unknown; report.py says what they mean
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

    @classmethod
    def from_dict(cls, fields):
        """Return the row that as_dict has made this dict of."""
        own = {name: fields.pop(name) for name in ("check", "state", "text", "remedy")}
        return cls(**own, facts=fields)
