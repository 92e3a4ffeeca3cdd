# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of arrays in annotations: `Float[Array, "workers values"]`.

These names are jaxtyping's where it has been imported already, as in a test whose
import hook checks them at each call. A user's program imports nothing for them and
checks nothing: there `Float[Array, ...]` is `Array`, as it is to type checkers.
"""

import sys
from typing import TYPE_CHECKING, Any

from jax import Array as Array

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Inexact
    from typing import Annotated as Int32
    from typing import Annotated as Key
    from typing import Annotated as Num
    from typing import Annotated as Shaped
    from typing import Annotated as UInt8
    from typing import Annotated as UInt32
elif "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Inexact, Int32, Key, Num, Shaped, UInt8, UInt32
else:

    class _Unchecked:
        """`Unchecked[kind, shape]` is `kind`."""

        def __getitem__(self, kind_and_shape: tuple[Any, str]) -> Any:
            return kind_and_shape[0]

    Bool = Float = Inexact = Int32 = Key = Num = Shaped = UInt8 = UInt32 = _Unchecked()
