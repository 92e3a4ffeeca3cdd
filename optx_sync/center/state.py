# SPDX-License-Identifier: Apache-2.0
"""The state of a center rule: its fields, and the metrics read from it."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.checks import holds_center
from optx_sync.center.contract import CenterRule
from optx_sync.center.fragments import Outgoing
from optx_sync.metrics import SharedInfo, square_sum, told
from optx_sync.placement import fields, memory
from optx_sync.shapes import Array, Float, Int32
from optx_sync.trees import Tree, first_worker, is_masked, is_nothing


class CenterMetrics(NamedTuple):
    """Metrics of a center rule, `oxs.metrics`: a worker's own, nothing is sent.

    The shapes are for one worker; in a stacked state, what is a worker's own has the
    worker axis in front, [N].
    """

    rounds: Int32[Array, ""]  # so far, including those without this worker
    steps_since_round: Int32[Array, ""]  # 0 after the step in which the workers met
    # rounds that left this worker out; 0 without `drop_nonfinite`
    dropped: Int32[Array, ""]
    # |x - c| after the step, the norm over all leaves together; None where `metrics`
    # was not given the parameters
    distance: Float[Array, ""] | None
    # Of the last round, with `measure=True`; otherwise None. All but the distance are
    # equal on all workers.
    distance_before_round: Float[Array, ""] | None  # |x - c| before the exchange
    contribution_norm: Float[Array, ""] | None  # root of the mean square, undivided
    agreement: Float[Array, ""] | None  # the mean cosine of two contributions
    update_norm: Float[Array, ""] | None  # how far the center moved
    contributors: Float[Array, ""] | None  # workers that were not left out
    # With a robust exchange, the rounds in which its contribution lay far from the
    # others' (see `optx_sync.exchange.robust`); otherwise None.
    outliers: Int32[Array, ""] | None
    # With more than one fragment; otherwise None.
    last_fragment: Int32[Array, ""] | None  # the last one to meet; -1 before the first
    fragment_ages: Int32[Array, " parts"] | None  # steps since each one met


def _has_parts(state: "CenterState") -> bool:
    return not isinstance(state.ages, tuple)


def _is_decoded(state: "CenterState") -> bool:
    """Whether workers hold the decoded center, and owners the exact pieces."""
    return lies_in_pieces(state.center) and not is_nothing(state.taken)


def _kind_of_center(state: "CenterState") -> fields.Kind:
    if _is_decoded(state):
        return fields.SHARED
    # Most parts are mid-round, so `resize` keeps the workers' parameters.
    return fields.CENTER if _has_parts(state) else fields.TAKEN_CENTER


def _kind_of_center_on_host(state: "CenterState") -> fields.Kind:
    return _kind_of_center(state).on_host


def _kind_of_taken(state: "CenterState") -> fields.Kind:
    return fields.TAKEN_CENTER if _is_decoded(state) else fields.SHARED


def _kind_of_pending(state: "CenterState") -> fields.Kind:
    return (fields.ANEW if isinstance(state.pending, Outgoing) else fields.SHARED).told


def _kind_of_accumulated(state: "CenterState") -> fields.Kind:
    return fields.OWN_SUM if _has_parts(state) else fields.ANEW


@fields.declare(
    local_step=fields.COUNTER,
    steps_since_round=fields.COUNTER,
    global_step=fields.COUNTER,
    ages=fields.COUNTER,
    center=_kind_of_center,
    taken=_kind_of_taken,
    outer=fields.SHARED,
    pending=_kind_of_pending,
    accumulated=_kind_of_accumulated,
    broken=fields.ANEW,
    exchange=fields.OWN,
    info=fields.INFO,
    inner=fields.OWN,
)
class CenterState(NamedTuple):
    """State of `center_variable`, for a rule that takes the center and averages."""

    local_step: Int32[Array, ""]  # steps of a worker
    steps_since_round: Int32[Array, ""]
    global_step: Int32[Array, ""]  # rounds
    ages: Any  # int32[P], steps since each fragment met; () with a single fragment
    # Like the parameters, float32 for half precision; `InPieces` with `shard_center`.
    center: Tree
    # The center before the last round, or () where no formula reads it; with coded
    # pieces, the whole center as the workers have decoded it.
    taken: Tree
    # State of the rule's outer transformation, or (); a tuple, one for each fragment.
    outer: optax.OptState
    pending: Any  # with `delay`, what is on its way: `Pending` or `Outgoing`; or ()
    accumulated: Tree  # what the worker summed up since the last round, or ()
    broken: Any  # bool[], whether it met a NaN or infinity since the last round, or ()
    exchange: Tree  # what the exchange remembers, for each fragment, or ()
    info: SharedInfo
    inner: optax.OptState

    def center_params(self, params: Tree, of_all: bool | None = None) -> Tree:
        """The center in the structure and dtypes of `params`: `oxs.center_params`.

        `of_all` says whether they are all workers', where the caller knows.
        """
        center: Tree = memory.on_device(self.center)
        if lies_in_pieces(center):
            center = whole_center(center, params, of_all)
        else:
            for _ in range(jnp.ndim(self.local_step)):  # All workers hold the same one.
                center = jax.tree.map(first_worker, center)
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else jnp.array(c, p.dtype, copy=True),
            center,
            params,
            is_leaf=is_masked,
        )

    def is_older_than_training(self) -> bool:
        """Whether steps were made, and any part of the center has never met."""
        parts = self.ages.shape[-1] if _has_parts(self) else 1
        rounds, steps = (
            int(jnp.ravel(x)[0]) for x in (self.global_step, self.local_step)
        )
        return steps > 0 and rounds < parts

    def metrics(self, params: Tree | None) -> CenterMetrics:
        """A worker's counters, and with `params` its distance from the center."""
        distance = None
        if params is not None:
            stacked = jnp.ndim(self.info.dropped)  # worker axes in front

            def apart(c, p):
                if is_masked(c):
                    return c
                # A center that is one for all workers lacks the worker axes.
                c = jnp.expand_dims(c, range(p.ndim - c.ndim))
                return p.astype(c.dtype) - c

            center: Tree = memory.on_device(self.center)
            if lies_in_pieces(center):
                center = _whole_of_levels(center, params, stacked)
            distance = norm_of(
                jax.tree.map(apart, center, params, is_leaf=is_masked), stacked
            )
        names = "contribution_norm", "agreement", "update_norm", "contributors"
        found = {name: getattr(self.info.measured, name, ()) for name in names}
        found |= {
            "distance_before_round": self.info.distance,
            "outliers": self.info.outliers,
        }
        last = ages = None
        if _has_parts(self):
            ages = self.ages
            last = jnp.where(
                self.global_step > 0, (self.global_step - 1) % ages.shape[-1], -1
            )
        return CenterMetrics(
            self.global_step,
            self.steps_since_round,
            self.info.dropped,
            distance,
            last_fragment=last,
            fragment_ages=ages,
            **{name: told(x) for name, x in found.items()},
        )

    def lost_by_resize(self, fewer: bool) -> list[str]:
        """What a change of the number of workers loses in the middle of a round."""
        steps = int(jnp.ravel(self.steps_since_round)[0])
        if steps and holds_center(self.inner):
            raise ValueError(
                "There is a center rule inside of this one, and workers are not at "
                f"its center: {steps} step(s) since the last round. Resize right after "
                "a round of the outer rule."
            )
        lost = []
        state: Any = self  # the decorator has given its class a table of fields
        learned = fields.kind_of(state, "center").lands == "everyone"
        if _has_parts(self):
            if fewer:
                lost += ["what leaving workers have learned since their parts met"]
        elif steps and (learned or jax.tree.leaves(self.accumulated)):
            what = "have learned" if learned else "accumulated"
            lost += [f"what workers {what} in {steps} step(s) since their last round"]
        if isinstance(self.pending, Outgoing):
            lost += ["what workers contributed to the sum of the next step"]
        return lost


@fields.declare(exchange=fields.OF_SUMS)
class SummedCenterState(CenterState):
    """For a rule that takes the center and sums contributions: residuals are sums."""

    __slots__ = ()


@fields.declare(center=fields.CENTER)
class SoftCenterState(CenterState):
    """For a rule whose workers go part of the way to the center, and a mean."""

    __slots__ = ()


@fields.declare(exchange=fields.OF_SUMS)
class SoftSummedCenterState(SoftCenterState):
    """For a rule whose workers go part of the way, and a sum of contributions."""

    __slots__ = ()


@fields.declare(center=_kind_of_center_on_host, outer=fields.SHARED.on_host)
class HostCenterState(CenterState):
    """A `CenterState` whose center and outer state live in host memory."""

    __slots__ = ()


@fields.declare(center=_kind_of_center_on_host, outer=fields.SHARED.on_host)
class HostSummedCenterState(SummedCenterState):
    """A `SummedCenterState` whose center and outer state live in host memory."""

    __slots__ = ()


@fields.declare(center=fields.CENTER.on_host, outer=fields.SHARED.on_host)
class HostSoftCenterState(SoftCenterState):
    """A `SoftCenterState` whose center and outer state live in host memory."""

    __slots__ = ()


@fields.declare(center=fields.CENTER.on_host, outer=fields.SHARED.on_host)
class HostSoftSummedCenterState(SoftSummedCenterState):
    """A `SoftSummedCenterState` whose center and outer state live in host memory."""

    __slots__ = ()


@fields.declare(
    local_step=fields.LIKE_PARAMS.told,
    steps_since_round=fields.LIKE_PARAMS.told,
    global_step=fields.LIKE_PARAMS.told,
    ages=fields.LIKE_PARAMS.told,
    center=fields.OWN_CENTER,
    taken=fields.LIKE_PARAMS,
    outer=fields.LIKE_PARAMS,
    pending=fields.LIKE_PARAMS.told,
    accumulated=fields.LIKE_PARAMS,
    broken=fields.LIKE_PARAMS,
    exchange=fields.LIKE_PARAMS,
    info=fields.LIKE_PARAMS.told,
    inner=fields.LIKE_PARAMS,
)
class LoneCenterState(CenterState):
    """For one worker with a center of its own, `axis_name=None`: nothing is shared.

    It lies where the parameters lie: on each of the replicas around or inside of it.
    """

    __slots__ = ()

    def lost_by_resize(self, fewer: bool) -> list[str]:
        """Nothing: other workers are none of its own."""
        del fewer
        return []


@fields.declare(center=fields.OWN_CENTER.on_host, outer=fields.LIKE_PARAMS.on_host)
class HostLoneCenterState(LoneCenterState):
    """A `LoneCenterState` whose center and outer state live in host memory."""

    __slots__ = ()


_CLASSES: dict[tuple[bool, bool, bool], type[CenterState]] = {
    (False, False, False): CenterState,
    (False, True, False): SummedCenterState,
    (True, False, False): SoftCenterState,
    (True, True, False): SoftSummedCenterState,
    (False, False, True): HostCenterState,
    (False, True, True): HostSummedCenterState,
    (True, False, True): HostSoftCenterState,
    (True, True, True): HostSoftSummedCenterState,
}


def state_class(
    rule: CenterRule, on_host: bool = False, alone: bool = False
) -> type[CenterState]:
    """The state class for a rule, by which `resize` knows what the rule does."""
    if alone:
        return HostLoneCenterState if on_host else LoneCenterState
    return _CLASSES[rule.take is not None, rule.mean_over is None, on_host]


def norm_of(tree: Tree, stacked: int = 0, like: Tree = None) -> jax.Array:
    """float32, the norm over all leaves, one for each place along the worker axes."""
    return jnp.sqrt(square_sum(tree, like, stacked))


def lies_in_pieces(center: Tree) -> bool:
    """Whether each worker holds only pieces of the center."""
    return isinstance(center, fields.InPieces | fields.InParts)


def _whole_of_levels(center: Tree, params: Tree, stacked: int) -> Tree:
    """The whole center, with so many worker axes in front of the parameters.

    Without its own level, which is the first: each place inside has its own center.
    """
    if not stacked:
        return whole_center(center, params, None)
    whole = functools.partial(whole_center, of_all=True)
    for _ in range(stacked - 1):
        whole = jax.vmap(whole)

    def last(x):
        # (A number that is not cut lies along the inner levels alone.)
        return jnp.moveaxis(x, 0, stacked - 1) if x.ndim >= stacked else x

    return whole(*jax.tree.map(last, (center, params)))


def whole_center(center: Tree, params: Tree, of_all: bool | None) -> Tree:
    """The whole center, from the pieces of all workers or as `init` makes it.

    `params` are those of one worker, or of all workers with a worker axis in front.
    """
    if isinstance(center, fields.InParts):
        return center.whole()
    pairs = [
        (c, p)
        for c, p in zip(
            jax.tree.leaves(center.tree, is_leaf=is_masked),
            jax.tree.leaves(params, is_leaf=is_masked),
            strict=True,
        )
        if not is_masked(c)
    ]
    workers = max((c.shape[0] for c, _ in pairs if c.ndim > 1), default=0)

    def fits(shape, c):
        size = math.prod(shape)
        return c.size == size or (c.ndim > 1 and c.shape[1] == -(-size // workers))

    def may_have(axes):
        counts = {p.shape[:axes] for _, p in pairs if p.ndim >= axes}
        same = len(counts) <= 1 and (not axes or not workers or counts == {(workers,)})
        return same and all(
            p.ndim >= axes and fits(p.shape[axes:], c) for c, p in pairs
        )

    known = ((1, 0) if workers else (0, 1)) if of_all is None else (int(of_all),)
    found = [axes for axes in known if may_have(axes)]
    if not found:
        raise ValueError(fields.ONE_PIECE)
    if workers > 1 and len(found) > 1:
        raise ValueError(
            f"The parameters' shapes do not tell whether they are one worker's or all "
            f"{workers} workers'. Pass oxs.first(params) if they are all workers', and "
            f"oxs.replicate(params, {workers}) if they are one's; or take the center "
            "by oxs.Workers."
        )

    def join(c, p):
        if is_masked(c):
            return c
        shape = p.shape[found[0] :]
        return c.reshape(-1)[: math.prod(shape)].reshape(shape)

    return jax.tree.map(join, center.tree, params, is_leaf=is_masked)
