"""Make sure that a Chromium is here for the tests of the inspection page; without one they are skipped.

Debian's package: it gets security updates and brings the libraries that it needs. A browser that Playwright or an npm
package would download does neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from environment import SetupError, Step, run

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium", "fonts-dejavu-core"]


def main(_: Sequence[str]) -> None:
    """Install a Chromium if there is none.

    Raises:
        SetupError: there is none, and it cannot be installed from here.
    """
    if any(map(shutil.which, NAMES)):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SetupError(f"There is no Chromium. On Debian, as root: {' '.join(INSTALL)}")
    with Step("installing Debian's chromium"):
        for command in (["apt-get", "update", "-q"], INSTALL):
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                raise SetupError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


if __name__ == "__main__":
    run(main, sys.argv[1:])
