"""The example of two levels, run as a user runs it, on a mesh and simulated."""

from pathlib import Path

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_hierarchy.py"


def run(*options):
    printed = scripts.run(EXAMPLE, "--steps", 60, *options)
    return [line.rstrip() for line in printed.splitlines()]


def test_the_mesh_and_its_simulation_end_alike():
    *sent, loss = run()
    assert sorted(sent) == [
        "over chips: 18,944 bytes",
        "over pods: 18,944 bytes in a round",
    ]
    (simulated,) = run("--simulate")
    values = [float(line.split()[-1]) for line in (loss, simulated)]
    # Untrained it is 2.3; between the two programs lies rounding.
    assert abs(values[0] - values[1]) < 1e-4 and values[0] < 0.3
