"""The result of one side, written whole each time, so that who reads it while the side runs never sees half of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class ResultFile:
    """A dictionary in a file; a call adds to it."""

    def __init__(self, path: Path) -> None:
        self.result: dict[str, Any] = {}
        self._path = path

    def __call__(self, **figures: Any) -> None:
        """Set these figures and write all."""
        self.result.update(figures)
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.result))
        part.replace(self._path)
        print("side:", *figures, file=sys.stderr, flush=True)
