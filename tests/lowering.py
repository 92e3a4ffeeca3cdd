"""Programs are lowered and compiled without what JAX does anew for each of them.

It makes a context of MLIR for a program and takes it down again, which takes longer
than to lower a small one, and names the program for a cache on disk that nobody asked
for. There are ten thousand programs in these tests.
"""

import functools

import jax
from jax._src.interpreters import mlir


def share() -> None:
    """Let one context of MLIR serve all programs of this process; ask no cache."""
    if hasattr(mlir, "make_ir_context"):  # not a public name
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
    jax.config.update("jax_enable_compilation_cache", False)
