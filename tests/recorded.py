"""The runs recorded from the originals: `tests/golden/`, and its manifest."""

import json
import pathlib
from typing import Any

import numpy as np

import optx_sync as oxs

GOLDEN = pathlib.Path(__file__).parent / "golden"


def recorded(*groups) -> dict[str, Any]:
    """The recordings of some groups by their names."""
    cases = json.loads((GOLDEN / "manifest.json").read_text())["cases"]
    return {case["name"]: case for case in cases if case["group"] in groups}


def arrays_of(case) -> Any:
    """The arrays of a recording, and those of a prefix by the parameters' names."""
    with np.load(GOLDEN / case["file"]) as arrays:
        data = dict(arrays)

    def named(prefix):
        start = f"{prefix}_"
        return {
            k.removeprefix(start): x for k, x in data.items() if k.startswith(start)
        }

    return data, named


def inner_of(hyper):
    """The optimizer of a recording."""
    make, *names = {
        "MomentumOptimizer": (oxs.optimizers.momentum, "momentum", "use_nesterov"),
        "AdagradOptimizer": (oxs.optimizers.adagrad, "initial_accumulator_value"),
        "AdamOptimizer": (oxs.optimizers.adam, "beta1", "beta2", "epsilon"),
        "GradientDescentOptimizer": (oxs.optimizers.gradient_descent,),
    }[hyper["class"]]
    return make(hyper["learning_rate"], *(hyper[name] for name in names))
