# SPDX-License-Identifier: Apache-2.0
"""How large the elements of an array are at most, in one pass."""

import numpy as np


def bound(array: np.ndarray) -> float:
    """An upper bound of |x|, not finite if any element is not finite.

    One pass without a temporary array: a sum of squares is finite only if its terms
    are.
    """
    if array.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            flat = array.reshape(-1)
            squares = float(np.dot(flat, flat))
        if np.isfinite(squares):
            # Rounding may make the sum of squares a little too small.
            return 1.001 * squares**0.5
    # Squares of finite terms may overflow.
    return float(np.abs(array).max(initial=0))
