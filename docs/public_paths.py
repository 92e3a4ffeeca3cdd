"""An extension of Griffe: a package's function hides the file of the same name.

`optx_sync.exchange.quantized` is a function for Python: `exchange/__init__.py` imports
it from the file `exchange/quantized.py`. Griffe, which reads the files, has the file
there. With this, pages and their anchors have the paths that programs have.
"""

import contextlib
from typing import Any

import griffe


class PublicPaths(griffe.Extension):
    """Puts what packages import in the place of files of the same name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by Griffe once it has read a package."""
        # What leads through a file that will be hidden is followed before that.
        shown = []
        for module in _modules(pkg):
            for name, path in module.imports.items():
                if not path.startswith(f"{pkg.path}."):
                    continue
                target = pkg[path.removeprefix(f"{pkg.path}.")]
                with contextlib.suppress(griffe.AliasResolutionError):  # JAX's, say
                    target = target.final_target if target.is_alias else target
                    if target.path != f"{module.path}.{name}":
                        shown.append((module, name, target))
        for module, name, target in shown:
            module.members[name] = griffe.Alias(name, target, parent=module)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [one for one in module.modules.values() if not one.is_alias]
    return [module, *(found for one in inner for found in _modules(one))]
