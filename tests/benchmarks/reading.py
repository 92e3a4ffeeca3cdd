"""Finding things in what a script of `benchmarks/` wrote."""

from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def criterion(found, start):
    """The one criterion that starts so."""
    (one,) = (c for c in found["criteria"] if c["criterion"].startswith(start))
    return one


def table(found, start):
    """The one table whose title starts so."""
    (one,) = (t for t in found["tables"] if t["title"].startswith(start))
    return one
