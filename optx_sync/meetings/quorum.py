# SPDX-License-Identifier: Apache-2.0
"""When a meeting of workers and their center is full: `one` and `quorum`.

Pure functions of numbers, which the runtime's servers call with measured seconds and
the simulation with those of a virtual clock.
"""

import dataclasses
import math

from optx_sync.core.checks import integer, interval
from optx_sync.core.trees import brief, call_it
from optx_sync.exchange.contract import Exchange, check_exchange


@dataclasses.dataclass(frozen=True)
class Quorum:
    r"""How many contributions a meeting waits for, and how long for more: K of M.

    A meeting of a part of the parameters is opened by the first worker whose turn it
    is, which asks all others. Once `required` workers have contributed, it waits
    `grace_seconds` for more; then the center absorbs the mean of all that have come, in
    one step, and answers. A contribution that started from an older center of its part
    is late: it is dropped, and its worker takes the center.

    Made by `oxs.runtime.one` and `oxs.runtime.quorum`.

    Attributes:
        k: K, the contributions that a meeting needs.
        grace: gamma, the share of the time to spare that a meeting waits for more.
        cap: The longest time that it does, in seconds.
        merge: The `oxs.exchange` that merges the contributions; `None`: their weighted
            mean.
        patience: The seconds after which a meeting closes with fewer than K.

    Raises:
        TypeError: `k` is not an integer, `grace` or `cap` not a number, `merge` not an
            exchange.
        ValueError: `k` is below 1, `grace` or `cap` negative or NaN; there is `merge=`
            where nothing can be merged, since a meeting is of one, or it has a memory,
            or needs more than K contributions.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.runtime.Quorum(2, grace=0.5, cap=3.0).required(num_present=1)
        1

    References:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
        2026, arXiv 2604.21428.
    """

    k: int
    grace: float = 0.0
    cap: float = math.inf
    merge: Exchange | None = None
    patience: float = 300.0

    def __post_init__(self) -> None:
        integer("k", self.k, "It counts contributions: pass for example 2.")
        interval("[0, inf)", "It is a share: 0.5, or 0 for none.", grace=self.grace)
        mend = "It is in seconds."
        interval("[0, inf]", mend, cap=self.cap, patience=self.patience)
        if self.merge is None:
            return
        if check_exchange(self.merge).remembers:
            raise ValueError(
                "merge= combines what has come to the center, which remembers nothing "
                "of those that came. Pass an exchange without a memory, such as "
                "oxs.exchange.radial() or median()."
            )
        if self.merge.needs > self.k:
            raise ValueError(
                f"merge= needs {self.merge.needs} contributions or more, and a meeting "
                f"may close with k={self.k}. Pass quorum({self.merge.needs}, merge=...)"
                ", or a merge that needs fewer, such as oxs.exchange.median()."
            )
        if not self.shared:
            raise ValueError(
                "merge= combines the contributions of a meeting, and with k=1 and "
                "grace=0 there is one. Leave it out, or pass a larger k or grace."
            )

    @property
    def shared(self) -> bool:
        """Whether others are asked to join: a meeting may have more than one."""
        return self.k > 1 or self.grace > 0

    def required(self, num_present: int) -> int:
        """min(K, workers that have not left): what a meeting needs to be full."""
        return min(self.k, num_present)

    def is_full(self, num_come: int, num_present: int) -> bool:
        """Whether so many have come, of the workers that have not left; never of 0."""
        return num_come >= max(self.required(num_present), 1)

    def grace_seconds(
        self,
        step_seconds: float,
        delay: int,
        quorum_seconds: float,
        sync_seconds: float,
    ) -> float:
        r"""The seconds that a full meeting waits for more contributions.

        .. math::

            \text{clip}(\gamma\,(\tau \xi_\text{step} - \xi_\text{quorum}
                - \xi_\text{sync}),\; 0,\; \text{cap})

        Workers take the answer tau steps after they contributed, so what is left of
        these steps costs nobody anything.

        Args:
            step_seconds: xi_step, the seconds of a worker's step.
            delay: tau, the steps between a contribution and its answer.
            quorum_seconds: xi_quorum, from the opening until the meeting was full.
            sync_seconds: xi_sync, what merging and answering take.

        Example:
            Two steps of 3 s, of which waiting and answering have used up 4 s:

            >>> import optx_sync as oxs
            >>> oxs.runtime.quorum(2, grace=0.5).grace_seconds(3.0, 2, 3.5, 0.5)
            1.0
        """
        spare = delay * step_seconds - quorum_seconds - sync_seconds
        return min(max(self.grace * spare, 0.0), self.cap)


def one() -> Quorum:
    """Each contribution meets the center alone, when it comes: `quorum(1)`.

    Such a meeting is shared with nobody, so nobody is asked and nobody is late.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.runtime.one().shared
        False
    """
    return Quorum(1)


def quorum(
    k: int,
    grace: float = 0.0,
    cap: float = math.inf,
    merge: Exchange | None = None,
    patience: float = 300.0,
) -> Quorum:
    """A meeting closes when K workers have come, as in Decoupled DiLoCo.

    Args:
        k: K, the contributions that a meeting needs, or all workers that have not left
            where they are fewer. 1 without `grace` is `one()`.
        grace: gamma >= 0, the share of the time to spare that a full meeting waits for
            more, as `Quorum.grace_seconds` has it.
        cap: The longest that it waits, in seconds.
        merge: The `oxs.exchange` that merges the contributions: a median, radial, ...
            `None`: their mean by the weights of `weigh=`. One that needs more than have
            come (`krum`, where workers have left) merges nothing: all are dropped.
        patience: The seconds after which a meeting closes with those that have come,
            however few: the others may be stopped, or, after a server went back to a
            checkpoint, wait in another part. The run's history tells of it: "short".

    Returns:
        A `Quorum`.

    Raises:
        TypeError: `k` is not an integer, `grace` or `cap` not a number, `merge` not an
            exchange.
        ValueError: A number out of range; `merge=` where a meeting is of one, with a
            memory, or that needs more than K contributions.

    Example:
        >>> import optx_sync as oxs
        >>> oxs.runtime.quorum(3, grace=0.5).required(num_present=4)
        3

    References:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
        2026, arXiv 2604.21428.
    """
    return Quorum(k, grace, cap, merge, patience)


def check_meet(meet: object) -> Quorum:
    """`meet=` of a run, `one()` for `None`; a TypeError for anything else."""
    if meet is None:
        return one()
    if not isinstance(meet, Quorum):
        raise TypeError(
            f"meet must be oxs.runtime.one() or oxs.runtime.quorum(...); got "
            f"{brief(meet)}.{call_it(meet)}"
        )
    return meet
