"""The commands: `python -m inductor_passes COMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Name, then what it is for, and the module whose `main(arguments)` returns the exit status.
COMMANDS = {
    "doctor": ("check this environment, and show what a bug report should contain", "inductor_passes.doctor"),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command; the exit status is 2 if there is none of that name."""
    if arguments and arguments[0] in COMMANDS:
        _, module = COMMANDS[arguments[0]]
        status: int = importlib.import_module(module).main(arguments[1:])
        return status
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    lines = ["usage: python -m inductor_passes COMMAND [-h] ...", "", "commands:"]
    lines += [f"  {name:10}{purpose}" for name, (purpose, _) in COMMANDS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
