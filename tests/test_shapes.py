"""Shapes and dtypes in annotations are true, and a false one is noticed."""

from tests import scripts


def test_shapes_hold_in_a_step_of_each_wrapper_and_exchange():
    printed = scripts.run(scripts.ROOT / "tests" / "shapes.py", JAX_PLATFORMS="cpu")
    assert printed.split()[1:] == ["wrappers"]
