"""Run by `tools/check_package.py` in an environment that has the wheel: what a user relies on after `pip install`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PUBLIC = ("mamba_ops", "mamba_ops.ops", "inductor_passes", "inductor_passes.doctor", "inductor_passes.vllm")
SITE = Path(sysconfig.get_path("purelib"))


class WithoutExtras(PathFinder):
    """Finds what Python finds on its path, but for packages that only extras bring."""

    absent = frozenset(
        [
            "build",
            "depyf",
            "grandalf",
            "hypothesis",
            "matplotlib",
            "mypy",
            "playwright",
            "prometheus_client",
            "pytest",
            "rich",
            "tqdm",
            "transformers",
        ]
    )

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in cls.absent else super().find_spec(fullname, path, target)


def main() -> None:
    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
    for name in PUBLIC:
        module = importlib.import_module(name)
        assert module.__file__ is not None
        assert SITE in Path(module.__file__).parents, f"{name} is not the installed one: {module.__file__}"
        assert sorted(module.__all__) == module.__all__
        for public in module.__all__:
            assert getattr(module, public) is not None
        found = {public for public in vars(module) if not public.startswith("_")}
        others = found - set(module.__all__)
        submodules = {other for other in others if importlib.util.find_spec(f"{name}.{other}")}
        private = {"annotations", "TYPE_CHECKING", "importlib", "read_before_write"}
        assert others <= submodules | private, f"{name} shows {others - submodules - private}, but not in __all__"
    for package in ("mamba_ops", "inductor_passes"):
        assert (SITE / package / "py.typed").exists(), f"{package} has no py.typed"

    (point,) = [
        point for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.name == "mamba_ops"
    ]
    assert point.load() is importlib.import_module("inductor_passes.vllm").register
    extras = importlib.metadata.metadata("mamba-ops").get_all("Provides-Extra")
    print(f"imported {', '.join(PUBLIC)} without any of the extras: {', '.join(sorted(extras or ()))}")


if __name__ == "__main__":
    main()
