# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of arrays in annotations: `Float[Array, "workers values"]`.

They are jaxtyping's where it has been imported already, as in the tests, whose import
hook checks them at each call. A user's program imports nothing for them and checks
nothing: there `Float[Array, ...]` is `Array`.
"""

import sys
from typing import TYPE_CHECKING, Any

from jax import Array as Array

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Inexact as Inexact
    from jaxtyping import Int as Int
    from jaxtyping import Int32 as Int32
    from jaxtyping import Key as Key
    from jaxtyping import Num as Num
    from jaxtyping import Shaped as Shaped
    from jaxtyping import UInt as UInt
    from jaxtyping import UInt8 as UInt8
else:

    class _Unchecked:
        """`Unchecked[kind, shape]` is `kind`."""

        def __getitem__(self, kind_and_shape: tuple[Any, str]) -> Any:
            return kind_and_shape[0]

    Bool = Float = Inexact = Int = Int32 = _Unchecked()
    Key = Num = Shaped = UInt = UInt8 = _Unchecked()
