"""Tries the properties of tests/test_properties.py on new cases, until it is stopped.

    python -m tests.fuzz [--seconds N] [--seed N] [--only NAME]

Prints how many cases it tried, and of a property that does not hold the smallest case
that was found; then it ends with status 1.
"""

import argparse
import random
import sys
import time
import traceback
import warnings

import tests.conftest  # noqa: F401 # sets up JAX, before it starts

import hypothesis  # isort: skip
import jax  # isort: skip

from tests import test_properties as properties  # isort: skip


def main():
    """Rounds of all properties."""
    parser = argparse.ArgumentParser(description="Tries properties on new cases.")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=properties.PROPERTIES, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    warnings.simplefilter("error")
    start = time.monotonic()
    names = [options.only] if options.only else list(properties.PROPERTIES)
    name = ""
    try:
        while time.monotonic() - start < options.seconds:
            for name in names:
                # About as long for each: an answer takes three compilations.
                examples = 10 * properties.EXAMPLES[name]
                run = properties.case_of(name, max_examples=examples)
                hypothesis.seed(seed)(run)()
            jax.clear_caches()
            say(seed, start)
            seed += 1
    except KeyboardInterrupt:
        say(seed, start)
    except Exception:
        traceback.print_exc()
        say(seed, start)
        sys.exit(f"{name} does not hold; again: --only {name} --seed {seed}")


def say(seed, start):
    """Say how far it is."""
    tried = ", ".join(f"{n} {what}" for what, n in sorted(properties.TRIED.items()))
    print(f"seed {seed}, {time.monotonic() - start:.0f} s: {tried}", flush=True)


if __name__ == "__main__":
    main()
