"""One line of the doctor's report."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Status(enum.Enum):
    """What a finding means: `NOTE` is worth knowing, only `PROBLEM` makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        section: heading under which it stands.
        name: what was looked at.
        value: what was found.
        status: what that means.
        reason: why it is no plain `OK`, or what to do about it.
    """

    section: str
    name: str
    value: str
    status: Status = Status.OK
    reason: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {**dataclasses.asdict(self), "status": self.status.name.lower()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Finding:
        """The finding that `as_dict` was made from."""
        return cls(**{**fields, "status": Status[fields["status"].upper()]})


def as_text(findings: list[Finding]) -> str:
    """The report for a person."""
    lines: list[str] = []
    width = max((len(finding.name) for finding in findings), default=0)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        line = f"  {finding.status.value:8}{finding.name:{width}}  {finding.value}"
        lines.append(f"{line} ({finding.reason})" if finding.reason else line.rstrip())
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    verdict = f"{problems} problem{'s' if problems > 1 else ''}" if problems else "all well"
    return "\n".join([*lines[1:], "", verdict])
