# ruff: noqa: E501 # the texts of the package, as they stand there
"""Deliberate breaks of the library, each of which some test must notice.

    python tests/mutants.py                       # as `make mutants` does
    python tests/mutants.py --room center state   # as `make mutants ROOM="center state"`
    python tests/mutants.py --of ../other         # the same breaks in another checkout

Each is applied to a temporary copy of the package, never to the working tree, and the
tests of its room run there until one of them fails. Prints a line for each and who
survived. A test that never ends (a broken collective) is a test that fails.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 400  # for the tests of one of them


class Mutant(NamedTuple):
    """`old` stands exactly once in a file of the package, or in one of a folder's."""

    where: str  # below optx_sync
    old: str
    new: str
    tests: tuple[str, ...] = ()  # of its room, those to begin with


# Tests of each room, the quickest first.
CENTER = (
    "tests/center/test_arguments.py",
    "tests/center/test_landing.py",
    "tests/center/test_composition.py",
    "tests/center/test_laws.py",
    "tests/center/test_lockstep.py",
    "tests/center/test_communication.py",
)
SHARD = ("tests/replicas/test_cross_shard.py",)
REFUSED = (
    "tests/replicas/test_cross_shard.py::test_refused_at_construction",
    "tests/replicas/test_cross_shard.py::test_refused_at_the_call",
    "tests/replicas/test_cross_shard.py::test_no_gradient",
)
SYNC = ("tests/replicas/test_sync_replicas.py",)
EXCHANGE = ("tests/exchange/test_laws.py", "tests/exchange/test_few_bytes.py")
ROBUST = ("tests/exchange/test_robust.py",)
PIECES = ("tests/replicas/test_shard_state.py", "tests/center/test_shard_center.py")
CODED = ("tests/runtime/test_coded.py",)
GOSSIP = ("tests/peers/test_gossip.py",)
REFUSED_GOSSIP = ("tests/peers/test_gossip.py::test_refused",)
SIMULATED_GOSSIP = ("tests/test_simulate_gossip.py",)
COLLECTIVES = ("tests/test_collectives.py",)
ROWS = ("tests/test_rows.py",)
LAWS = ("tests/optimizers/test_laws.py",)
GOLDEN = ("tests/optimizers/test_golden.py",)
LOCKSTEP = ("tests/center/test_lockstep.py",)
LANDING = ("tests/center/test_landing.py",)
COMPOSITION = ("tests/center/test_composition.py",)
CENTER_LAWS = ("tests/center/test_laws.py",)
SIMULATED_CENTER = ("tests/test_simulate_asynchronous.py",)
SIMULATED_REPLICAS = ("tests/test_simulate_sync_replicas.py",)
SERVER = ("tests/runtime/test_server.py",)
AUDIT = ("tests/test_audit.py",)
HLO = ("tests/test_hlo.py", "tests/test_audit.py")
FRONT = ("tests/test_front_door.py",)
MISTAKES = ("tests/test_mistakes.py",)
FRONT_SAME = (f"{FRONT[0]}::test_it_is_the_program_of_map_workers",)
FRONT_NNX = (f"{FRONT[0]}::test_an_nnx_step_works_in_place",)
FRONT_EQUINOX = (f"{FRONT[0]}::test_an_equinox_module_keeps_what_is_no_array",)
FRONT_STATE = (f"{FRONT[0]}::test_a_train_state_with_a_key_and_statistics",)
FRONT_DICT = (f"{FRONT[0]}::test_half_precision_numbers_and_dicts",)
FRONT_SAVED = (f"{FRONT[0]}::test_a_checkpoint_of_another_number",)
FRONT_RESIZED = (
    f"{FRONT[0]}::test_workers_begin_at_the_center_in_the_middle_of_a_round",
)
FRONT_PIECES = (f"{FRONT[0]}::test_pieces_on_the_level_that_they_are_for",)
FRONT_NOISE = (f"{FRONT[0]}::test_chips_of_a_pod_draw_the_same_noise",)
FRONT_JOIN = (f"{FRONT[0]}::test_joiners_draw_keys_of_their_own_and_begin_as_others",)
TESTS: dict[str, tuple[str, ...]] = {
    "trees": (*ROWS, "tests/test_state.py", *CENTER, *SYNC),
    "checks": (*REFUSED, "tests/optimizers/test_arguments.py", *SHARD),
    "rows": (*ROWS, *LAWS),
    "comm": (*COLLECTIVES, *SHARD),
    "exchange": (*EXCHANGE, *SHARD, *CENTER),
    "robust": ROBUST,
    "pieces": (*PIECES, *CODED),
    "optimizers": ("tests/optimizers/test_arguments.py", *LAWS, *GOLDEN),
    "replicas": (*SHARD, *SYNC),
    "center": CENTER,
    "peers": (*GOSSIP, *SIMULATED_GOSSIP),
    "step": ("tests/test_step.py", *CENTER),
    "state": ("tests/test_state.py", "tests/test_slots.py"),
    "placement": ("tests/test_sharding.py", "tests/test_state.py", *CENTER, *SYNC),
    "simulate": (*SIMULATED_REPLICAS, *SIMULATED_CENTER),
    "runtime": (
        "tests/runtime/test_protocol.py",
        *SERVER,
        "tests/runtime/test_worker.py",
    ),
    "audit": HLO,
    "front": (*MISTAKES, *FRONT),
}

MUTANTS: dict[str, list[Mutant]] = {
    "trees": [
        Mutant("trees.py", "jnp.finfo(dtype).bits < 32", "jnp.finfo(dtype).bits < 16"),
        Mutant(
            "trees.py",
            "finite = finite & jnp.all(",
            "finite = jnp.all(",
            CENTER_LAWS,
        ),
        Mutant(
            "trees.py",
            "    plain = tree is None or isinstance(tree, dict | list | tuple)\n",
            "    plain = False\n",
            ("tests/replicas/test_sync_replicas.py",),
        ),
        Mutant(
            "trees.py",
            "(tree, is_leaf=is_gradient_leaf)\n    return [(path_name",
            "(tree)\n    return [(path_name",
            ("tests/replicas/test_cross_shard.py",),
        ),
        Mutant(
            "trees.py",
            "    if not is_floating(dtype):\n        raise ValueError(",
            "    if dtype is None:\n        raise ValueError(",
            ("tests/center/test_arguments.py",),
        ),
        Mutant(
            "trees.py",
            "    if not is_floating(dtype):\n        return jnp.dtype(dtype)\n",
            "",
        ),
        Mutant(
            "trees.py",
            "return x is None or isinstance(x, SlicesLeaf)",
            "return isinstance(x, SlicesLeaf)",
            SHARD,
        ),
    ],
    "checks": [
        Mutant("checks.py", "elif jnp.shape(grad) != jnp.shape(param):", "elif False:"),
        Mutant(
            "checks.py",
            "if not jnp.issubdtype(dtype, jnp.inexact):",
            "if False:",
        ),
        Mutant("checks.py", "signature.bind(*args, **kwargs)", "pass"),
        Mutant(
            "checks.py",
            'if not (hasattr(inner, "init") and hasattr(inner, "update")):',
            "if False:",
        ),
        Mutant(
            "checks.py",
            "            check_rows(grad, param, path)\n",
            "            pass\n",
        ),
        Mutant(
            "checks.py",
            "if (path in expected) != (path in found):",
            "if path not in expected:",
        ),
        Mutant(
            "checks.py",
            "jnp.zeros_like(param) if update is None and param is not None else update",
            "update",
        ),
    ],
    "rows": [
        Mutant(
            "rows/slices.py",
            "        values = self._values.astype(at_least_float32(self._values.dtype))\n",
            "        values = self._values\n",
        ),
        Mutant(
            "rows/slices.py",
            "    is_row = (indices >= 0) & (indices < FIRST_PADDING)\n",
            "    is_row = indices < FIRST_PADDING\n",
        ),
        Mutant(
            "rows/slices.py",
            "bad = (indices < 0) | ((indices >= rows) & (indices < FIRST_PADDING))",
            "bad = (indices >= rows) & (indices < FIRST_PADDING)",
        ),
        Mutant(
            "rows/slices.py",
            "dense = dense.at[self.indices].add(",
            "dense = dense.at[self.indices].set(",
        ),
        Mutant(
            "rows/slices.py",
            "if wide == table.dtype == at_least_float32(table.dtype):",
            "if True:",
        ),
        Mutant(
            "rows/slices.py",
            "summed = jnp.where(is_row, summed, jnp.zeros_like(summed))",
            "pass",
        ),
        Mutant(
            "rows/slices.py",
            "ordered[1:] != ordered[:-1]",
            "ordered[1:] == ordered[1:]",
        ),
        Mutant(
            "rows/slices.py",
            "    if jnp.can_cast(indices.dtype, jnp.int32):\n",
            "    if True:\n",
        ),
        Mutant(
            "rows/lookup.py",
            "missing = np.setdiff1d(known_ids, known_named)",
            "missing = known_ids[:0]",
        ),
        Mutant(
            "rows/lookup.py",
            "return jnp.where(in_range & ~found, not_a_number, rows)",
            "return rows",
        ),
        Mutant(
            "rows/lookup.py",
            "wide = self.values.astype(at_least_float32(self.dtype))",
            "wide = self.values",
        ),
        Mutant(
            "rows/lookup.py",
            "unique_indices(jnp.where(ids < size, ids, -1))",
            "unique_indices(ids)",
        ),
        Mutant("rows/on_values.py", "        _refuse_use(run, tables)\n", ""),
        Mutant("rows/on_values.py", "if leaf.ndim or not number:", "if not number:"),
    ],
    "comm": [
        Mutant(
            "comm/reduce.py",
            "divisor: Any = size if groups is None else groups.size",
            "divisor: Any = size",
        ),
        Mutant("comm/reduce.py", "fraction = own / divisor\n", "fraction = own\n"),
        Mutant(
            "comm/reduce.py",
            "narrow = any(jnp.finfo(x.dtype).bits < 32 for x in operands if is_inexact(x.dtype))",
            "narrow = False",
        ),
        Mutant(
            "comm/reduce.py",
            "values = weigh(values, fraction)",
            "values = mean(weigh(values, fraction))",
        ),
        Mutant(
            "comm/reduce.py",
            "indices = jnp.where(fraction == 0, jnp.full_like(indices, -1), indices)",
            "pass",
        ),
        Mutant(
            "comm/reduce.py",
            "return jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))",
            "return x * weight.astype(x.dtype)",
        ),
        Mutant(
            "comm/reduce.py",
            "return jnp.where(total == 0, jnp.ones_like(total), total)",
            "return total",
        ),
        Mutant(
            "comm/collectives.py",
            "index = index * axis_size(axis) + own",
            "index = index + 2 * own",
        ),
        Mutant(
            "comm/reduce.py",
            "padded = jnp.pad(x, (0, -x.size % groups.size))",
            "padded = x",
        ),
        Mutant(
            "comm/collectives.py", "for axis in reversed(axes):", "for axis in axes:"
        ),
        Mutant(
            "comm/reduce.py",
            "return x.astype(dtype or at_least_float32(x.dtype))",
            "return x.astype(dtype or x.dtype)",
        ),
        Mutant(
            "comm/reduce.py",
            "narrow = x.dtype.itemsize < 4",
            "narrow = False",
        ),
        Mutant(
            "comm/varying.py",
            "for axis, path, kind in _leaves_that(tree, axis_name, varies=False):",
            "for axis, path, kind in ():",
        ),
        Mutant(
            "comm/varying.py",
            "for axis, path, kind in _leaves_that(tree, axis_name, varies=True):",
            "for axis, path, kind in ():",
            SHARD,
        ),
        Mutant(
            "comm/varying.py",
            "return sum_over(failed, axes) == 0",
            "return flag",
            ("tests/center/test_sharded_workers.py",),
        ),
        Mutant(
            "comm/varying.py",
            "lambda path, x: vary(x, axes.get(path, ())), tree",
            "lambda path, x: x, tree",
        ),
        Mutant(
            "comm/reduce.py",
            "elif len(set(members)) < len(members):",
            "elif False:",
        ),
        Mutant(
            "comm/reduce.py",
            "elif len(set(sizes)) > 1:",
            "elif False:",
        ),
        Mutant(
            "comm/reduce.py",
            "    collectives.reducible(axes)\n    require_local",
            "    require_local",
        ),
        Mutant("comm/collectives.py", "if len(set(axes)) < len(axes):", "if False:"),
        Mutant(
            "comm/collectives.py",
            "self.native: bool = len(axes) == 1 and manual",
            "self.native: bool = manual",
        ),
        Mutant(
            "comm/reduce.py",
            "own = jnp.asarray(groups.own_group)[collectives.axis_index(axes)]",
            "own = collectives.axis_index(axes) // groups.size",
        ),
        Mutant(
            "comm/reduce.py",
            "keeps = array.dtype in (jnp.float32, jnp.float64)",
            "keeps = True",
        ),
    ],
    "exchange": [
        Mutant(
            "exchange/all_reduce.py",
            "            dtype=dtype,\n",
            "            dtype=None,\n",
        ),
        Mutant(
            "exchange/all_reduce.py",
            "            weight=weight,\n",
            "            weight=None,\n",
        ),
        Mutant(
            "exchange/all_reduce.py",
            "            group_assignment=group_assignment,\n",
            "",
        ),
        Mutant(
            "exchange/contract.py",
            "if not isinstance(exchange, Exchange):",
            "if False:",
        ),
        Mutant(
            "exchange/contract.py",
            "return bool(jax.tree.leaves(jax.eval_shape(exchange.init, example)))",
            "return False",
        ),
        Mutant(
            "replicas/cross_shard.py",
            "if not exchange.exact:\n            contract.require_dense(grads)",
            "if False:\n            contract.require_dense(grads)",
        ),
        Mutant(
            "replicas/cross_shard.py",
            "if not exchange.exact:\n            raise",
            "if False:\n            raise",
        ),
        Mutant("exchange/contract.py", "if not isinstance(met, Met):", "if False:"),
        Mutant(
            "exchange/quantized.py",
            "second.lost * total.astype(x.dtype)",
            "second.lost",
            EXCHANGE,
        ),
        Mutant(
            "exchange/quantized.py",
            "divisor = jnp.where(scales > 0, scales, 1.0)",
            "divisor = scales",
            EXCHANGE,
        ),
        Mutant(
            "exchange/quantized.py",
            "        divisor = or_one(total)\n",
            "        divisor = total\n",
            EXCHANGE,
        ),
        Mutant(
            "exchange/top_k.py",
            "lost.append(_add(x, positions[0], -values[0]).reshape(-1))",
            "lost.append(x.reshape(-1))",
            EXCHANGE,
        ),
        Mutant(
            "exchange/top_k.py",
            "(size > middle)",
            "(size > 1.5 * middle)",
            EXCHANGE,
        ),
        Mutant(
            "exchange/error_feedback.py",
            "owed = owed / jnp.asarray(share, error.dtype)",
            "pass",
            EXCHANGE,
        ),
        Mutant(
            "exchange/error_feedback.py",
            "new = jnp.where(takes_part, new, new + error)",
            "pass",
            EXCHANGE,
        ),
        Mutant(
            "exchange/error_feedback.py",
            "errors[place] = jnp.where(arrived, new, error)",
            "errors[place] = new",
            EXCHANGE,
        ),
        Mutant(
            "exchange/error_feedback.py",
            "owed = error * jnp.asarray(decay, error.dtype)",
            "owed = error",
            EXCHANGE,
        ),
    ],
    "optimizers": [
        Mutant("optimizers/adam.py", 'rows="all",', 'rows="touched",', GOLDEN),
        Mutant(
            "optimizers/adam.py", "(jnp.sqrt(v) + eps)", "jnp.sqrt(v + eps)", GOLDEN
        ),
        Mutant(
            "optimizers/rule.py",
            "jnp.sqrt(1.0 - beta2_power)",
            "(1.0 - beta2_power)",
            GOLDEN,
        ),
        Mutant(
            "optimizers/adagrad.py",
            "lax.rsqrt(accumulator)",
            "lax.rsqrt(slots.accumulator)",
            GOLDEN,
        ),
        Mutant(
            "optimizers/ftrl.py",
            "l2 = l2 + beta / (2.0 * jnp.maximum(lr, 1e-36))",
            "l2 = l2 + beta",
            GOLDEN,
        ),
        Mutant(
            "optimizers/ftrl.py",
            "is_root = known_power and learning_rate_power == -0.5",
            "is_root = True",
            GOLDEN,
        ),
        Mutant(
            "optimizers/momentum.py",
            "total * mu * at.learning_rate)",
            "total * at.learning_rate)",
            GOLDEN,
        ),
        Mutant(
            "optimizers/rmsprop.py",
            "root = jnp.sqrt(variance + eps)",
            "root = jnp.sqrt(variance) + eps",
            GOLDEN,
        ),
        Mutant("optimizers/rmsprop.py", "Slots(rms=1.0", "Slots(rms=0.0", GOLDEN),
        Mutant("optimizers/nadam.py", "slots.v * b2)", "slots.v)", LAWS),
        Mutant("optimizers/adagrad_da.py", "(at.count + 1)", "(at.count + 2)", GOLDEN),
        Mutant(
            "optimizers/proximal_adagrad.py", "(1.0 + l2 * rate)", "(1.0 + l2)", GOLDEN
        ),
        Mutant(
            "optimizers/rule.py",
            "in_table = indices < rows",
            "in_table = indices >= 0",
            LAWS,
        ),
        Mutant(
            "optimizers/rule.py",
            "if rule.decay is not None:\n        slots",
            "if False:\n        slots",
            LAWS,
        ),
        Mutant(
            "optimizers/rule.py",
            "update_count=jnp.asarray(optax.safe_increment(state.update_count)),",
            "update_count=state.update_count,",
            LAWS,
        ),
        Mutant(
            "optimizers/rule.py",
            "chosen = jnp.where(count >= 0, cast(rate), cast(count))",
            "chosen = cast(rate)",
            LAWS,
        ),
        Mutant("optimizers/rule.py", "    grad = grad.sum_duplicates()\n", "", LAWS),
        Mutant(
            "optimizers/rule.py",
            "jnp.full_like(p, value, dtype=slot_dtype(p))",
            "jnp.full_like(p, value)",
            LAWS,
        ),
        Mutant(
            "optimizers/rule.py",
            'above = number >= low if interval[0] == "[" else number > low',
            "above = number >= low",
        ),
        Mutant(
            "optimizers/rule.py",
            "power * jnp.asarray(base, dtype=power.dtype)",
            "power",
            GOLDEN,
        ),
        Mutant(
            "optimizers/rule.py",
            "return (None if known is None else jnp.zeros_like(known)), slots",
            "return None, slots",
            LAWS,
        ),
    ],
    "replicas": [
        Mutant("replicas/cross_shard.py", "else leaf / number", "else leaf"),
        Mutant(
            "replicas/cross_shard.py",
            "return leaf * number if",
            "return leaf if",
        ),
        Mutant("comm/reduce.py", "total: Any = divisor", "total: Any = size"),
        Mutant(
            "replicas/cross_shard.py",
            "inner = varying.vary_like(inner, before.inner)",
            "pass",
        ),
        Mutant(
            "replicas/cross_shard.py",
            "state = own(state) if grouped else state",
            "pass",
        ),
        Mutant(
            "replicas/cross_shard.py",
            "updates = checks.fill_missing(updates, params)",
            "pass",
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "fresh = gradient_step.astype(jnp.int32) >= state.global_step",
            "fresh = gradient_step.astype(jnp.int32) > state.global_step",
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "contributes & fresh & finite,",
            "contributes & fresh,",
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py", "tokens - state.accumulated,", "tokens,", SYNC
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "tokens = max(collectives.axis_size(self.axis_name), self.required)",
            "tokens = collectives.axis_size(self.axis_name)",
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "last = numbers < global_step % replicas",
            "last = numbers < 0",
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "(place <= tokens)",
            "(place <= tokens + 1)",
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py",
            '("nonfinite", ~finite),\n        ("stale", ~fresh),\n',
            '("stale", ~fresh),\n        ("nonfinite", ~finite),\n',
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py", "-0.0, leaf.dtype", "0.0, leaf.dtype", SYNC
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "self.decay, state.global_step\n",
            "self.decay, state.global_step - 1\n",
            SYNC,
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "if value.ndim:\n        raise ValueError(",
            "if False:\n        raise ValueError(",
            SYNC,
        ),
        Mutant(
            "replicas/accumulator.py",
            "jnp.where(accepted, old + weighed(grad, old.dtype), old)",
            "old + weighed(grad, old.dtype) * accepted.astype(old.dtype)",
            SYNC,
        ),
        Mutant(
            "replicas/accumulator.py",
            "indices = jnp.where(accepted, grad.indices, jnp.full_like(grad.indices, -1))",
            "indices = grad.indices",
            SYNC,
        ),
        Mutant(
            "replicas/accumulator.py",
            "in_range = (indices >= 0) & (indices < rows)",
            "in_range = indices >= 0",
            SYNC,
        ),
        Mutant(
            "replicas/accumulator.py",
            "size = min(len(weights), at_most * grad.values.shape[0])",
            "size = min(len(weights), grad.values.shape[0])",
            SYNC,
        ),
        Mutant("replicas/accumulator.py", "values / divisor)", "values)", SYNC),
        Mutant(
            "replicas/accumulator.py",
            "old.at[taken.indices].set(0, **DROP)",
            "jnp.zeros_like(old)",
            SYNC,
        ),
        Mutant(
            "replicas/averages.py",
            "rate = 1 - now.astype(jnp.float32)",
            "rate = now.astype(jnp.float32)",
            SYNC,
        ),
        Mutant("replicas/averages.py", "if not selected or not", "if not", SYNC),
        Mutant(
            "replicas/averages.py",
            "if not scalar or not 0 <= variable_averages <= 1:",
            "if not scalar:",
            SYNC,
        ),
    ],
    "center": [
        Mutant(
            "center/worker.py",
            "return steps >= communication_period",
            "return steps > communication_period",
            COMPOSITION,
        ),
        Mutant(
            "center/worker.py",
            "begin = local_step - (steps - 1)",
            "begin = local_step",
            LOCKSTEP,
        ),
        Mutant(
            "center/worker.py",
            "return ~(jnp.asarray(steps, jnp.float32) < period",
            "return ~(jnp.asarray(steps, jnp.float32) <= period",
            LOCKSTEP,
        ),
        Mutant(
            "center/worker.py",
            'grads if rule.accumulate == "gradients" else updates',
            "updates",
            CENTER_LAWS,
        ),
        Mutant(
            "trees.py",
            "return optax.apply_updates(params, updates)",
            "return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)",
            ("tests/test_step.py",),
        ),
        Mutant(
            "step.py",
            "rounded = round_to(target.astype(wide), param.dtype)",
            "rounded = target.astype(wide)",
            LANDING,
        ),
        Mutant(
            "trees.py",
            "return jnp.where(jnp.abs(x) < float(info.tiny), steps * smallest, rounded)",
            "return rounded",
            LANDING,
        ),
        Mutant(
            "center/worker.py",
            "return jnp.array(param, dtype=wide, copy=True)",
            "return jnp.asarray(param, dtype=wide)",
            LANDING,
        ),
        Mutant(
            "center/worker.py",
            "return round_to(total, grad.dtype).astype(grad.dtype)",
            "return total.astype(grad.dtype)",
            CENTER_LAWS,
        ),
        Mutant(
            "center/state.py",
            "taken=fields.SHARED",
            "taken=fields.OWN",
            ("tests/test_sharding.py",),
        ),
        Mutant(
            "center/worker.py",
            "return center if is_nothing(worker.taken) else worker.taken",
            "return center",
            LOCKSTEP,
        ),
        Mutant(
            "center/worker.py",
            "walked._replace(params=where(broken, worker.params, walked.params))",
            "walked",
            CENTER_LAWS,
        ),
        Mutant(
            "center/lockstep.py",
            "broken = broken | ~varying.everywhere(",
            "broken = ~varying.everywhere(",
            CENTER_LAWS,
        ),
        Mutant(
            "center/lockstep.py",
            "broken=() if broken is None else broken & ~due",
            "broken=() if broken is None else broken",
            CENTER_LAWS,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "lambda x: x * jnp.asarray(count, x.dtype)",
            "lambda x: x * jnp.asarray(step.num_workers, x.dtype)",
            CENTER_LAWS,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "where(pushed > 0, after, before)",
            "where(pushed >= 0, after, before)",
            CENTER_LAWS,
        ),
        Mutant(
            "center/worker.py",
            "    params = where(well, worker.params, round_like(center, worker.params))\n",
            "    params = worker.params\n",
            CENTER_LAWS,
        ),
        Mutant(
            "center/worker.py",
            "inner=where(well, worker.inner, inner.init(params)),",
            "inner=worker.inner,",
            CENTER_LAWS,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "dropped + (~now.well).astype(jnp.int32)",
            "dropped + now.well.astype(jnp.int32)",
            CENTER_LAWS,
        ),
        Mutant(
            "center/worker.py",
            "taken = after if formula is None else before",
            "taken = after",
            LOCKSTEP,
        ),
        Mutant(
            "center/worker.py",
            "return worker._replace(accumulated=zeros_like(worker.accumulated)), contribution",
            "return worker, contribution",
            CENTER_LAWS,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "_average(worker.inner, self.axis_name, now.weight)",
            "_average(worker.inner, self.axis_name, None)",
            LOCKSTEP,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "worker = worker._replace(inner=self.inner.init(worker.params))",
            "pass",
            LOCKSTEP,
        ),
        Mutant(
            "center/lockstep.py",
            "steps_since_round=jnp.where(due, jnp.zeros_like(step.steps), step.steps),",
            "steps_since_round=step.steps,",
            COMPOSITION,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "well = localize(now.well & finite, self.axis_name)",
            "well = localize(finite, self.axis_name)",
            CENTER_LAWS,
        ),
        Mutant(
            "center/rounds/meeting.py",
            "    if isinstance(due, bool):\n",
            "    if isinstance(due, str):\n",
            ("tests/test_step.py",),
        ),
        Mutant(
            "center/state.py",
            "c = jnp.expand_dims(c, range(p.ndim - c.ndim))",
            "c = jnp.expand_dims(c, range(0))",
            ("tests/test_state.py",),
        ),
        Mutant(
            "center/state.py",
            "jnp.array(c, p.dtype, copy=True)",
            "jnp.asarray(c, p.dtype)",
            ("tests/test_state.py",),
        ),
        Mutant(
            "center/checks.py",
            '    require_varying(state.center, params, axis_name, "center")\n',
            "",
        ),
        Mutant(
            "center/rules/agn.py",
            "own.accumulated / at.steps.astype(own.accumulated.dtype)",
            "own.accumulated",
            LOCKSTEP,
        ),
        Mutant(
            "center/rules/agn.py",
            'mean_over="pushed" if reduction == "mean" else None',
            'mean_over="pushed"',
            CENTER_LAWS,
        ),
        Mutant(
            "center/rules/elastic_average.py",
            "return 0.9 / at.communication_period / at.num_workers",
            "return 0.9 / at.communication_period",
            LOCKSTEP,
        ),
        Mutant(
            "center/rules/elastic_average.py",
            "x - _times(rate(at), x - before)",
            "x - _times(rate(at), x - after)",
            CENTER_LAWS,
        ),
        Mutant(
            "center/rules/elastic_average.py",
            "apart = own.params - own.taken",
            "apart = own.params",
            LOCKSTEP,
        ),
    ],
    "peers": [
        Mutant(
            "peers/graphs.py",
            "share = 1 / (1 + len(others))",
            "share = 1 / (2 + len(others))",
        ),
        Mutant(
            "peers/graphs.py",
            "        if m**dimensions != n:\n",
            "        if False:\n",
            REFUSED_GOSSIP,
        ),
        Mutant("peers/graphs.py", "            own -= weights\n", ""),
        Mutant(
            "peers/graphs.py",
            "        if len(reached) < n:\n",
            "        if not reached:\n",
            REFUSED_GOSSIP,
        ),
        Mutant("peers/mixing.py", "*(weigh(x, weight) for x in sent)", "*sent"),
        Mutant(
            "peers/mixing.py",
            "mean = where(mass > 0, mean, center)",
            "pass",
        ),
        Mutant(
            "center/rounds/meeting.py",
            "worker = work.mend(self.inner, worker, center, now.well)",
            "pass",
        ),
        Mutant(
            "peers/mixing.py", "return global_step % rounds", "return global_step % 1"
        ),
        Mutant(
            "peers/mixing.py",
            "jax.random.randint(jax.random.fold_in(key, global_step), (), 0, rounds)",
            "jax.random.randint(jax.random.fold_in(key, global_step), (), 0, 1)",
        ),
        Mutant(
            "center/rules/diloco.py",
            "own.taken - own.params",
            "own.params - own.taken",
        ),
        Mutant(
            "peers/mixing.py",
            "        if all(r.groups is not None and len(r.groups) == 1 for r in rounds):\n",
            "        if False:\n",
        ),
        Mutant(
            "peers/stability.py",
            "if growth > 1 + 1e-3:",
            "if growth > 1.2:",
            REFUSED_GOSSIP,
        ),
        Mutant(
            "peers/gossip.py",
            "if dtype is not None and at_least_float32(dtype) != dtype:",
            "if False:",
            REFUSED_GOSSIP,
        ),
        Mutant(
            "center/lockstep.py", "        check_params(params)\n", "", REFUSED_GOSSIP
        ),
        Mutant(
            "peers/mixing.py",
            "    kind = joinable()\n",
            "    kind = id\n",
        ),
        Mutant(
            "center/checks.py",
            "    check_one_worker(state.local_step, center, params)\n",
            "",
            REFUSED_GOSSIP,
        ),
        Mutant(
            "simulate/gossip.py",
            "meets = due & (mate != place)",
            "meets = due",
            SIMULATED_GOSSIP,
        ),
        Mutant(
            "simulate/gossip.py",
            "            read=x,\n",
            "            read=own.read,\n",
            SIMULATED_GOSSIP,
        ),
        Mutant(
            "simulate/gossip.py",
            "(place == worker) & (mate == partner)",
            "(place == worker)",
            SIMULATED_GOSSIP,
        ),
    ],
    "pieces": [
        Mutant(
            "exchange/pieces.py",
            "return total / jnp.asarray(divisor, wide)",
            "return total",
        ),
        Mutant(
            "elementwise.py",
            "if not np.allclose(one, two, rtol=1e-4, atol=1e-12, equal_nan=True):",
            "if False:",
        ),
        Mutant(
            "center/rounds/in_pieces.py",
            "mean = scatter(sent, meeting.axis_name, weight=weight)",
            "mean = scatter(sent, meeting.axis_name)",
            PIECES[1:],
        ),
        Mutant(
            "placement/resize.py",
            "x.reshape(-1)[: self.one.size] if self.cut else x",
            "x.reshape(-1)[-self.one.size :] if self.cut else x",
            PIECES[1:],
        ),
        Mutant(
            "runtime/agreements/center.py",
            "self.sent[part] = age, summed, codes\n",
            "self.sent[part] = age, summed, codes\n        self.codes[part] = codes\n",
            CODED,
        ),
    ],
    "robust": [
        Mutant(
            "exchange/robust",
            "low, high = jnp.maximum(n - 1, 0) // 2, n // 2",
            "low, high = n // 2, n // 2",
        ),
        Mutant(
            "exchange/robust",
            "cut = jnp.minimum(f, jnp.maximum(n - 1, 0) // 2)",
            "cut = f",
        ),
        Mutant(
            "exchange/robust",
            "nearest = jnp.arange(replicas) < n - wrong - 2",
            "nearest = jnp.arange(replicas) < n - wrong - 1",
        ),
        Mutant("exchange/robust", "last = last * (1 + _EQUAL)", "last = last * 2"),
        Mutant("exchange/robust", "fori_loop(1, steps, step", "fori_loop(1, 1, step"),
        Mutant(
            "exchange/robust",
            "finite = everyone.counts & jnp.isfinite(sizes)",
            "finite = everyone.counts",
        ),
        Mutant(
            "exchange/robust", "return jnp.clip(apart, -_FAR, _FAR)", "return apart"
        ),
        Mutant(
            "exchange/robust",
            "limit = norms.median_over(norm, weight, axis_name)",
            "limit = norms.median_over(norm, None, axis_name)",
        ),
        Mutant("exchange/robust", "_OUTLYING = 3.0", "_OUTLYING = 1000.0"),
        Mutant(
            "exchange/robust",
            "return norms.counted(agreed < 0, weight)",
            "return norms.counted(agreed > 0, weight)",
        ),
        Mutant(
            "exchange/robust",
            "return flag if weight is None else flag & flag_of(weight)",
            "return flag",
        ),
        Mutant(
            "exchange/robust",
            "    def outlier(tree, mean, axis_name, weight):\n        axes = axes_of_shards(tree, axis_name)\n        if",
            "    def outlier(tree, mean, axis_name, weight):\n        axes = ()\n        if",
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "            contributed=trees.zeros_like(state.contributed),\n",
            "",
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "or_one(state.contributed), state.contributed > 0",
            "or_one(state.contributed), state.contributed >= 0",
        ),
        Mutant(
            "replicas/sync_replicas.py",
            "weight = state.contributed if exchange.takes_weights else votes",
            "weight = votes.astype(some.dtype) if exchange.takes_weights else votes",
        ),
        Mutant(
            "replicas/cross_shard.py",
            "    if exchange is not None:\n        _require_own",
            "    if exchange is all_reduce:\n        _require_own",
        ),
    ],
    "step": [
        Mutant(
            "step.py",
            "return (step + 1) % int(period) == 0",
            "return step % int(period) == 0",
        ),
        Mutant(
            "step.py",
            "while (after := begins[-1] + _steps(period, begins[-1])) <= step:",
            "while (after := begins[-1] + _steps(period, begins[-1])) < step:",
        ),
        Mutant("step.py", "np.ceil(length)", "np.floor(length)"),
        Mutant(
            "step.py",
            "    if isinstance(tx, _DirectTransformation):\n        return",
            "    if False:\n        return",
        ),
        Mutant("step.py", "if not callable(period):", "if False:"),
    ],
    "state": [
        Mutant(
            "metrics.py",
            "    if not found:\n        raise",
            "    if False:\n        raise",
        ),
        Mutant("metrics.py", 'if not str(name).startswith("hyperparams"):', "if True:"),
        Mutant(
            "metrics.py",
            "return end in (path[-len(end) :], _words(path)[-len(end) :])",
            "return end == path[-len(end) :]",
        ),
        Mutant("metrics.py", 'elif hasattr(type(node), "named_slots"):', "elif False:"),
        Mutant(
            "metrics.py",
            "for candidate in (_words(path), path):",
            "for candidate in (path,):",
        ),
    ],
    "placement": [
        Mutant(
            "placement/axes.py",
            "shared = replicated if around is None else around",
            "shared = bool(around)",
            SYNC,
        ),
        Mutant(
            "placement/axes.py",
            '{"level", "params"} if replicated else',
            '{"level", "params"} if False else',
            SYNC,
        ),
        Mutant(
            "placement/axes.py",
            "bool(around) or kind.whose in equal",
            "kind.whose in equal",
            ("tests/center/test_nested.py",),
        ),
        Mutant(
            "placement/axes.py",
            "lambda spec, axis=axis: PartitionSpec(axis, *spec)",
            "lambda spec, axis=axis: PartitionSpec(axis)",
        ),
        Mutant("placement/workers.py", "shared=jnp.copy,", "shared=lambda x: x,"),
        Mutant("placement/workers.py", "if jnp.ndim(x) == 0:", "if False:"),
        Mutant(
            "placement/axes.py",
            "leaf if is_masked(leaf) else _spec_of_kept_axes(leaf, spec, param)",
            "_spec_of_kept_axes(leaf, spec, param)",
        ),
    ],
    "simulate": [
        Mutant(
            "simulate/asynchronous.py",
            "keeps_taken = rule.take is None or keeps_before(rule, self.period)",
            "keeps_taken = keeps_before(rule, self.period)",
            SIMULATED_CENTER,
        ),
        Mutant(
            "simulate/asynchronous.py",
            "pushed, codes = work.share_of_one(rule, pushed, at), now.exchange",
            "codes = now.exchange",
            SIMULATED_CENTER,
        ),
        Mutant(
            "simulate/asynchronous.py",
            "            place == worker,\n",
            "            place == place,\n",
            SIMULATED_CENTER,
        ),
        Mutant(
            "simulate/asynchronous.py",
            "worker = worker._replace(inner=_with_powers(worker.inner, after.outer))",
            "pass",
            SIMULATED_CENTER,
        ),
        Mutant(
            "simulate/asynchronous.py",
            "now = now._replace(worker=worker, exchange=codes, well=well)",
            "now = now._replace(exchange=codes, well=well)",
            SIMULATED_CENTER,
        ),
        Mutant(
            "simulate/sync_replicas.py",
            "token = machine.global_step - old.astype(jnp.int32)",
            "token = machine.global_step",
        ),
        Mutant(
            "simulate/sync_replicas.py",
            "old_tokens=machine.new_tokens,",
            "old_tokens=jnp.zeros_like(machine.new_tokens),",
        ),
        Mutant(
            "simulate/sync_replicas.py",
            "fresh = machine.local_step[place] >= machine.global_step",
            "fresh = machine.local_step[place] > machine.global_step",
        ),
        Mutant(
            "simulate/sync_replicas.py",
            "accepted = known & ~machine.blocked[place] & fresh",
            "accepted = known & fresh",
        ),
        Mutant(
            "simulate/sync_replicas.py",
            "tokens = max(self.total, self.required)",
            "tokens = self.required",
        ),
        Mutant(
            "simulate/replay.py",
            "if chunks * every < len(workers):",
            "if False:",
            SIMULATED_CENTER,
        ),
    ],
    "runtime": [
        Mutant(
            "runtime",
            "used = self.local_steps[worker] >= self.global_step",
            "used = self.local_steps[worker] > self.global_step",
            SERVER,
        ),
        Mutant("runtime", "self.tokens.clear()  #", "pass  #", SERVER),
        Mutant(
            "runtime",
            "if once and self.accepted_at[worker] == self.global_step:",
            "if False:",
            SERVER,
        ),
        Mutant(
            "runtime",
            "completes = self.count + 1 >= self.agreement",
            "completes = self.count >= self.agreement",
            SERVER,
        ),
        Mutant(
            "runtime",
            '        if problem:\n            return self._refuse(push, f"{problem} {_of(push)}"), None\n',
            "",
            SERVER,
        ),
        Mutant(
            "runtime",
            "if not finite:\n                    return None",
            "if False:\n                    return None",
            SERVER,
        ),
        Mutant("runtime", "if array.dtype != dtype:", "if False:", SERVER),
        Mutant(
            "runtime", "if arrays.keys() != self.leaves.keys():", "if False:", SERVER
        ),
        Mutant(
            "runtime",
            'return ("" if np.isfinite(size) else "holds a NaN or infinity."), size',
            'return "", size',
            SERVER,
        ),
        Mutant(
            "runtime",
            "self.waiting = [worker for worker in self.waiting if worker not in left]",
            "pass",
            SERVER,
        ),
        Mutant(
            "runtime",
            "key=lambda part: (full[part], filled[part])",
            "key=lambda part: full[part]",
        ),
        Mutant("runtime/protocol.py", "if place.last == name:", "if False:"),
        Mutant(
            "runtime/protocol.py",
            "max(line.used - max(place.used, line.base) - had, 0)",
            "max(line.used - max(place.used, line.base), 0)",
        ),
        Mutant(
            "runtime/protocol.py",
            "if request.epoch != book.epoch:",
            "if request.epoch > book.epoch:",
        ),
        Mutant(
            "runtime/server.py",
            "book = protocol.dropped(book, worker, request.part)",
            "pass",
            SERVER,
        ),
        Mutant("runtime/messages.py", "if number < least:", "if False:", SERVER),
        Mutant("runtime", "if wrong.size:", "if False:", SERVER),
        Mutant(
            "runtime/checkpoints.py",
            "fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "pass",
            SERVER,
        ),
        Mutant(
            "runtime/agreements/center.py",
            "self.ages[part] += age\n",
            "pass\n",
            ("tests/runtime/test_worker.py",),
        ),
        Mutant(
            "runtime/worker.py",
            "(due or self._own.steps >= self._delay)",
            "due",
            ("tests/center/test_four_drivers.py",),
        ),
        Mutant(
            "runtime",
            "names if name.isdecimal()))",
            "names if name.isdecimal()))[:1]",
            SERVER,
        ),
        Mutant(
            "runtime/shared.py",
            'if not os.readlink(path).startswith(f"/memfd:{name}"):',
            "if False:",
            ("tests/runtime/test_shared.py",),
        ),
        Mutant(
            "runtime/server.py",
            "if push.state:  # A copy",
            "if False:  # A copy",
            ("tests/runtime/test_worker.py",),
        ),
        Mutant(
            "runtime/server.py",
            "added = [new] * (self.num_workers - len(of_workers))",
            "added = []",
            SERVER,
        ),
        Mutant(
            "runtime/server.py",
            "self._heard[request.worker] = time.time()",
            "pass",
            SERVER,
        ),
        Mutant(
            "runtime/shared.py",
            "self._others is None or self._others[0] != address",
            "self._others is None",
            ("tests/runtime/test_shared.py",),
        ),
    ],
    "audit": [
        Mutant("audit.py", "conditional=name not in always,", "conditional=False,"),
        Mutant("audit.py", "return None if kind in inner else kind", "return kind"),
        Mutant(
            "audit.py",
            "overlapped=None if end is None else computes,",
            "overlapped=computes,",
        ),
        Mutant("audit.py", "        if at != pieces[0]:\n            continue\n", ""),
        Mutant("audit.py", "return max(position, other), hlo", "return position, hlo"),
        Mutant(
            "audit.py",
            'if instruction.opcode in ("dot", "convolution", "while"):',
            "if False:",
        ),
        Mutant(
            "hlo.py",
            '                if branches == "none":\n                    found = []\n                elif',
            "                if",
        ),
        Mutant(
            "hlo.py",
            '    found.sort(key=lambda pair: pair[0] == "true_computation")\n',
            "",
        ),
        Mutant("hlo.py", "else 8) + 7) // 8", "else 8)) // 8"),
        Mutant("hlo.py", "prod(_integers(match[1])[1:])", "_integers(match[1])[0]"),
        Mutant(
            "hlo.py",
            "devices = prod(map(int, counts))",
            "devices = max(map(int, counts))",
        ),
        Mutant("hlo.py", 'if instruction.opcode.endswith("-update"):', "if False:"),
        Mutant("hlo.py", 'if attribute != "control-predecessors"', "if True"),
        Mutant("hlo.py", 'if dtype in ("token", "opaque"):', "if False:"),
    ],
    "front": [
        Mutant("forms.py", "if id(leaf) in places:", "if False:", FRONT_NNX),
        Mutant(
            "forms.py",
            "isinstance(x, module) or is_variable(x)",
            "is_variable(x)",
            FRONT_EQUINOX,
        ),
        Mutant(
            "forms.py",
            "isinstance(x, int | float | complex) and not isinstance(x, bool)",
            "isinstance(x, int | float | complex)",
            FRONT_DICT,
        ),
        Mutant(
            "front/step.py",
            "static_argnums=0, donate_argnums=donated",
            "static_argnums=0",
            FRONT_SAME,
        ),
        Mutant(
            "front/step.py",
            "return list(map(strong, new)), {how: others}",
            "return new, {how: others}",
            FRONT_DICT,
        ),
        Mutant(
            "front/step.py",
            "return layout.of_all(*forms.split(x))[0], 0",
            "return x, None",
            MISTAKES,
        ),
        Mutant(
            "front/step.py", "if any(map(_is_used_up, arrays)):", "if False:", MISTAKES
        ),
        Mutant(
            "front/step.py", "old if forms.is_object(old) else new", "new", FRONT_NNX
        ),
        Mutant(
            "front/layout.py",
            "apart = x.astype(wide) - jnp.expand_dims(one, axis).astype(wide)",
            "apart = x.astype(wide) * 0",
            FRONT_STATE,
        ),
        Mutant(
            "front/layout.py",
            "tree = placing.stack(tree, self.sizes[level], axes, True, level)",
            "tree = placing.stack(tree, self.sizes[level], axes, True, 0)",
            FRONT_PIECES,
        ),
        Mutant(
            "front/layout.py",
            "return list(map(strong, form.pick(tree)))",
            "return form.pick(tree)",
            FRONT_STATE,
        ),
        Mutant(
            "front/held.py",
            'names = [x[:-1] if x[-1:] == ("value",) else x for x in names]',
            "names = list(names)",
            FRONT_SAVED,
        ),
        Mutant(
            "front/workers.py", "found[0].put(arrays, params)", "pass", FRONT_RESIZED
        ),
        Mutant(
            "placement/axes.py",
            "return own_keys(x, False, level=level - 1)",
            "return own_keys(x, True, level=level - 1)",
            FRONT_NOISE,
        ),
        Mutant(
            "placement/resize.py",
            "fields.map_fields(lambda _, kind, x: _begun(x, kind.begins), node)",
            "fields.map_fields(lambda _, kind, x: _begun(x), node)",
            FRONT_JOIN,
        ),
        Mutant(
            "placement/resize.py",
            "_new_state(how, tree, stacked, leaves, _begun(like), own=True)",
            "_new_state(how, tree, stacked, leaves, _begun(like), own=False)",
            FRONT_JOIN,
        ),
    ],
}


def target(package: Path, mutant: Mutant, anywhere: bool) -> Path:
    """The one file that holds the old text, once; `anywhere` in another checkout."""
    place = package if anywhere else package / mutant.where
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    holding = {f: f.read_text().count(mutant.old) for f in files if f.exists()}
    holding = {file: count for file, count in holding.items() if count}
    if sum(holding.values()) != 1:
        found = {str(file): count for file, count in holding.items()}
        raise LookupError(
            f"{mutant.where} must hold this text once; found in {found}:\n{mutant.old}"
        )
    return next(iter(holding))


def run_tests(tests: str, folder: Path, log: Path) -> str:
    """What became of a file of tests in a copy: "survived", or what failed first."""
    sys.stdout.flush()
    child = os.fork()  # JAX is imported already
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[:] = [str(folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
        import pytest

        code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", tests])
        os._exit(int(code))
    end = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "killed: it never ended"
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGABRT, -signal.SIGSEGV):  # XLA gives up
        return "killed: it was aborted"
    if code == 0:
        return "survived"
    said = log.read_text()
    if code not in (1, 2):  # 2: the package cannot even be imported
        raise RuntimeError(f"pytest ended with {code}:\n{said[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    return f"killed: {failed[1] if failed else 'not importable'}"


def main() -> None:
    """Apply all of them, or those of some rooms, and say who survived."""
    parser = argparse.ArgumentParser(description="Breaks that the tests must notice.")
    parser.add_argument("--room", nargs="*", choices=MUTANTS, default=[])
    parser.add_argument("--of", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--only", nargs="*", type=int, help="numbers in the table")
    parser.add_argument("--list", action="store_true", help="apply none, check texts")
    options = parser.parse_args()
    other = options.of.resolve() != ROOT
    every = [(room, mutant) for room, found in MUTANTS.items() for mutant in found]
    chosen = [
        (number, room, mutant)
        for number, (room, mutant) in enumerate(every)
        if (not options.room or room in options.room)
        and (not options.only or number in options.only)
    ]
    survivors, unknown = [], []
    sys.dont_write_bytecode = True  # which might be taken for that of the next one
    for name in ("numpy", "jax.numpy", "optax", "flax.nnx", "chex", "pytest"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "copy")
        kept = shutil.ignore_patterns(".*", "__pycache__", "site", "results*")
        shutil.copytree(options.of, folder, ignore=kept)
        for position, (number, room, mutant) in enumerate(chosen, 1):
            start = time.monotonic()
            label = f"[{position}/{len(chosen)}] #{number} {room}: " + " ".join(
                mutant.old.split()
            )
            try:
                file = target(folder / "optx_sync", mutant, other)
            except LookupError as error:
                unknown.append(label)
                print(f"#{number}: {error}", flush=True)
                continue
            if options.list:
                continue
            text = file.read_text()
            file.write_text(text.replace(mutant.old, mutant.new))
            tests = [*mutant.tests, *TESTS[room]]
            tests = [
                t for t in dict.fromkeys(tests) if (folder / t.split("::")[0]).exists()
            ]
            result = "survived"
            for some in tests:
                if result == "survived":
                    result = run_tests(some, folder, Path(temporary, "log"))
            file.write_text(text)
            seconds = time.monotonic() - start
            print(f"{label[:100]}: {result} ({seconds:.0f} s)", flush=True)
            if result == "survived":
                survivors.append(label)
    print(f"\n{len(chosen) - len(unknown)} mutants, {len(survivors)} survived")
    print("\n".join(survivors))
    if unknown:
        print(f"{len(unknown)} of the table are not in the package: mend the table")
    sys.exit(bool(survivors or unknown))


if __name__ == "__main__":
    main()
