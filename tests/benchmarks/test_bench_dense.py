"""Dense steps beside their peers, run as a user runs it, in its short form."""

import importlib.util
import math

import jax
import numpy as np
import pytest

from tests.cases import OPTIMIZERS

SCRIPT = "bench_dense"
# Bytes: parameter and gradient read, parameter written, each slot read and written.
# rmsprop has two slots, as in TensorFlow; a norm reads the gradient once more.
FLOORS = {"gradient_descent": 12, "rmsprop": 28, "normalized_sgd": 16, "adam": 28}
SMALL = {"gradient_descent": 12, "momentum": 20, "adagrad": 20, "adam": 28}
INSTALLED = {
    peer
    for peer, package in {"TensorFlow": "tensorflow", "torch": "torch"}.items()
    if importlib.util.find_spec(package)
}


@pytest.mark.slow
def test_both_kinds_of_leaves_have_a_picture(folder, page):
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {f"bench_dense_{kind}.png" for kind in ("large", "small")}
    assert ("Not installed" in page) == (len(INSTALLED) < 2)


@pytest.mark.slow
def test_every_side_is_timed_in_every_turn(found):
    for kind, floors in {"large": FLOORS, "small": SMALL}.items():
        results = found["data"][kind]
        assert list(results) == list(floors)
        for name, one in results.items():
            sides = {"ours", "triad"}
            if name != "normalized_sgd":
                sides |= {"Optax", "Optax again"} | INSTALLED
            assert set(one["times"]) == sides
            (turns,) = {len(times) for times in one["times"].values()}
            assert turns == (5 if kind == "large" else 21)
            assert all(t > 0 for times in one["times"].values() for t in times)
            assert set(one["builds"]) == sides & {"ours", "Optax"}
            assert all(s > 0 for turn in one["builds"]["ours"] for s in turn)


@pytest.mark.slow
def test_bytes_are_counted_and_no_less_than_the_floor(found):
    for kind, floors in {"large": FLOORS, "small": SMALL}.items():
        for name, one in found["data"][kind].items():
            assert one["floor"] == floors[name]
            # Scalars weigh in small leaves; a compiler may read a gradient thrice.
            assert one["floor"] <= one["bytes"]["ours"] <= 1.5 * one["floor"] + 1
            assert 1 <= one["loops"]["ours"] <= 4
    large = found["data"]["large"]["gradient_descent"]["bytes"]
    assert round(large["ours"], 1) == round(large["Optax"], 1) == 12


@pytest.mark.slow
def test_all_make_the_same_steps(found):
    for name, one in found["data"]["large"].items():
        assert one["apart"]["ours"] == 0
        # Adam adds epsilon before the bias correction, Optax after.
        limit = 1e-3 if name == "adam" else 1e-5
        assert one["apart"].get("Optax", 0) < limit, name
        assert one["apart"].get("TensorFlow", 0) < 1e-5, name
        assert one["apart"].get("TensorFlow", 1) > 0 or name == "gradient_descent"


@pytest.mark.slow
def test_criteria_say_what_was_found(found):
    criteria = {one["criterion"]: one for one in found["criteria"]}
    (floor,) = (one for what, one in criteria.items() if "the floor, large" in what)
    above = [
        name
        for name, one in found["data"]["large"].items()
        if one["bytes"]["ours"] > 1.01 * one["floor"]
    ]
    assert floor["met"] == (not above) and all(name in floor["found"] for name in above)
    for peer in INSTALLED:
        (one,) = (c for what, c in criteria.items() if f"1.25 of {peer}" in what)
        times = found["data"]["large"]["adam"]["times"]
        pairs = zip(times["ours"], times[peer], strict=True)
        assert one["met"] == (
            np.median([ours / other for ours, other in pairs]) <= 1.25
        )


def test_slower_is_told_from_noise(module):
    found_type = module("dense_steps").Found
    generator = np.random.default_rng(0)

    def found(factor, spread):
        noise = generator.lognormal(0, spread, (3, 41))
        sides = ("ours", "Optax", "Optax again")
        times = dict(zip(sides, noise * [[factor], [1.0], [1.0]], strict=True))
        return found_type(times, {}, {}, {}, {}, 12, 1)

    assert not found(1.0, 0.0).slower() and found(1.01, 0.0).slower()
    assert found(1.0, 0.0).noise() == 0
    assert not found(1.0, 0.01).slower() and found(1.05, 0.01).slower()
    assert 0 < found(1.0, 0.01).noise() < 0.02
    # Where the machine is too noisy to tell, 5 % at most are forgiven.
    noisy = found(1.1, 0.0)
    noisy.times["Optax again"][:] = 0.5
    assert noisy.noise() == 0.5 and noisy.slower()


def test_loops_over_leaves_are_counted(module):
    steps = module("dense_steps")
    peers, shapes = module("peers"), jax.ShapeDtypeStruct((512,), "float32")
    params = [shapes] * 3
    for name, loops in {"gradient_descent": 1, "adam": 3}.items():
        compiled, *seconds = steps.build(peers.OURS[name](), params)
        assert 1 <= steps.loops_of(compiled, 512, 3) <= loops
        assert min(seconds) > 0


def test_every_peer_has_one_of_ours(module):
    peers = module("peers")
    names = {name.partition(" ")[0].rstrip(",") for name in peers.OURS} - {"nesterov"}
    assert names == {case.name for case in OPTIMIZERS}
    for others in (peers.OPTAX, peers.KERNELS, peers.TORCH, peers.TORCH_ROWS):
        assert set(others) <= set(peers.OURS)
    assert math.isclose(peers.KERNELS["adam"].numbers["lr"], peers.RATE)
