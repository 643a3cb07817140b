"""Commands of this package: `python -m inductor_passes COMMAND`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# A module has `main(arguments)`, which returns the exit status, and SUMMARY, a line for the overview.
COMMANDS = {
    "doctor": "inductor_passes.doctor.command",
    "inspect": "inductor_passes.inspection.command",
}


def main(arguments: Sequence[str]) -> int:
    """Run a command; return the exit status."""
    if arguments and arguments[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
        return status
    asked = not arguments or arguments[0] in ("-h", "--help")
    out = sys.stdout if asked and arguments else sys.stderr
    if not asked:
        print(f"error: unknown command {arguments[0]!r}", file=out)
    print("usage: python -m inductor_passes COMMAND [--help] ...", file=out)
    for name, module in COMMANDS.items():
        print(f"  {name:<10}{importlib.import_module(module).SUMMARY}", file=out)
    return 0 if out is sys.stdout else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
