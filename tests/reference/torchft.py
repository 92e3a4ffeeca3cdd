"""NumPy restatement of torchft's Streaming DiLoCo, of two parts; no JAX inside.

python -m tests.reference.torchft    # writes tests/golden/streaming_torchft.json
"""

import json
import pathlib

import numpy as np

FILE = pathlib.Path(__file__).parent.parent / "golden" / "streaming_torchft.json"
STEPS, PERIOD, PARTS, INNER_RATE, OUTER_RATE, GRADIENT = 15, 6, 2, 1, 2, 2
DELAYS = (0, 1)
SOURCE = (
    "meta-pytorch/torchft 7eb7087, test_fixtures/, the files of diloco_regression_test:"
    " DiLoCoMockedUpdateTest.test_diloco_mocked_updates_0 and _3 have recorded these "
    "histories. In its others a replica keeps a share of its own parameters."
)


def histories(delay):
    """Own and global parameters after 0 ... STEPS steps, each [STEPS + 1, PARTS].

    Each part has one weight that starts at 1. It sets out `delay` steps before the end
    of each `PERIOD / PARTS` steps, in turn, and arrives at the end, where a replica
    takes the global parameters. All replicas are equal.
    """
    own = np.ones(PARTS)
    center, own_of, center_of = own.copy(), [own.copy()], [own.copy()]
    between = PERIOD // PARTS
    sent = 0.0
    for step in range(1, STEPS + 1):
        own -= INNER_RATE * GRADIENT
        part = (step - 1) // between % PARTS
        if (step + delay) % between == 0:
            sent = center[part] - own[part]
        if step % between == 0:
            center[part] -= OUTER_RATE * sent
            own[part] = center[part]
        own_of.append(own.copy())
        center_of.append(center.copy())
    return np.stack(own_of), np.stack(center_of)


def write():
    """Write all cases down."""
    cases = []
    for delay in DELAYS:
        own, center = (x.tolist() for x in histories(delay))
        cases.append({"delay": delay, "params": own, "center": center})
    settings = {
        "steps": STEPS,
        "period": PERIOD,
        "parts": PARTS,
        "inner_rate": INNER_RATE,
        "outer_rate": OUTER_RATE,
        "gradient": GRADIENT,
    }
    lines = ",\n".join(f"  {json.dumps(case)}" for case in cases)
    head = json.dumps({"source": SOURCE, **settings}, indent=1)[:-2]
    FILE.write_text(f'{head},\n "cases": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    write()
