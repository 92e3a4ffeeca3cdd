"""Whatever is constructed before `jax.distributed.initialize` leaves JAX's backend."""

from tests import scripts

# Everything public that makes something, with options that could be tried on arrays.
SCRIPT = """
import inspect

import jax
import optax

import optx_sync as oxs
from tests.cases import OPTIMIZERS

ex, sgd, axis = oxs.exchange, optax.sgd(0.1, momentum=0.9), "workers"
scheduled = optax.sgd(optax.linear_schedule(0.1, 0.0, 100), momentum=0.5)
affine = oxs.CenterRule(lambda own, center, at: 0.5 * (own.params - own.taken))
exchanges = {
    "all_reduce": [ex.all_reduce(), ex.all_reduce("bfloat16")],
    "quantized": [ex.quantized(4)],
    "top_k": [ex.top_k(), ex.top_k(64, bits=2)],
    "power_sgd": [ex.power_sgd(2)],
    "error_feedback": [ex.error_feedback(ex.quantized(), 0.9)],
    "median": [ex.median()],
    "trimmed_mean": [ex.trimmed_mean(1)],
    "sign_majority": [ex.sign_majority()],
    "geometric_median": [ex.geometric_median()],
    "krum": [ex.krum(1)],
    "adasum": [ex.adasum()],
    "clipped": [ex.clipped("median"), ex.clipped(1.0, ex.quantized())],
}
every = [one for made in exchanges.values() for one in made]
graphs = {
    "ring": oxs.graphs.ring(),
    "exponential": oxs.graphs.exponential(),
    "random_pairs": oxs.graphs.random_pairs(),
    "grid": oxs.graphs.grid(2),
    "metropolis": oxs.graphs.metropolis([(0, 1)]),
}
catalogue = [case.make() for case in OPTIMIZERS]
catalogue += [case.make(optax.cosine_decay_schedule(0.1, 9)) for case in OPTIMIZERS]
delayed = oxs.delayed_nesterov(0.7, 0.9, 4)
centers = {
    "center_variable": lambda **more: oxs.center_variable(sgd, affine, axis, **more),
    "local_sgd": lambda **more: oxs.local_sgd(sgd, axis, **more),
    "diloco": lambda **more: oxs.diloco(sgd, axis, **more),
    "agn": lambda **more: oxs.agn(sgd, axis, outer=scheduled, **more),
    "elastic_average": lambda **more: oxs.elastic_average(
        sgd, axis, moving_rate=0.1, rho=0.5, **more
    ),
}
made = {name: [make()] for name, make in centers.items()}
for name, make in centers.items():
    options = {"inner_state": "average", "drop_nonfinite": True, "measure": True}
    made[name] += [make(**options), make(communication_period=oxs.qsr(0.1, 0.2))]
    made[name] += [make(exchange=one) for one in every]
    if name != "elastic_average":
        parts = {"fragments": 4, "delay": 1, "keep_local": 0.5}
        made[name] += [make(communication_period=8, **parts), make(shard_center=True)]
        made[name] += [make(communication_period=8, fragments=oxs.strided(4))]
made["diloco"] += [oxs.diloco(sgd, axis, outer=delayed, shard_center=True)]
made["agn"] += [oxs.agn(optax.adam(0.1), axis, shard_center=True)]
made["cross_shard"] = [
    oxs.cross_shard(sgd, axis, reduction="sum"),
    oxs.cross_shard(sgd, axis, grads="summed"),
    oxs.cross_shard(sgd, axis, group_assignment=[[0, 1], [2, 3]]),
    oxs.cross_shard(optax.adam(0.1), axis, shard_state=True),
    oxs.cross_shard(sgd, axis, measure=True),
    *(oxs.cross_shard(sgd, axis, exchange=one) for one in every),
]
made["all_reduce_grads"] = [oxs.all_reduce_grads(axis)]
made["sync_replicas"] = [
    oxs.sync_replicas(
        *(sgd, axis, 3),
        total_num_replicas=4,
        variable_averages=0.9,
        drop_nonfinite=True,
        measure=True,
    ),
    *(oxs.sync_replicas(sgd, axis, 3, exchange=one) for one in every),
]
made["gossip"] = [
    oxs.gossip(sgd, axis, graph=graph, outer=outer, drop_nonfinite=True)
    for graph in graphs.values()
    for outer in (None, optax.sgd(0.7, momentum=0.5), optax.adam(0.1))
]
made["noloco"] = [oxs.noloco(sgd, axis), oxs.noloco(sgd, axis, outer=scheduled)]
made["on_values"] = [oxs.on_values(optax.clip(1.0))]
made["rules"] = [
    oxs.agn_rule(sgd),
    oxs.diloco_rule(),
    oxs.elastic_rule(moving_rate=0.1, rho=0.0),
    oxs.local_sgd_rule(),
    oxs.optimizers.from_rule(
        oxs.optimizers.LeafRule(lambda grad, slots, param, at: (-grad, slots)), 0.1
    ),
]
made["functions"] = [
    oxs.map_workers(lambda x: x, axis),
    oxs.value_and_grad(lambda params: 0.0, axis_name=axis),
]
made["Workers"] = [oxs.Workers(8, axis, mesh=True), oxs.Workers(8, axis)]
made["nested"] = [oxs.local_sgd(oxs.cross_shard(sgd, "data"), axis)]
# What is public and not made above works on arrays, or is above by another name.
others = {
    *("CenterRule", "IndexedSlices", "agn_rule", "diloco_rule", "elastic_rule"),
    *("local_sgd_rule", "qsr", "strided", "delayed_nesterov", "exchange", "graphs"),
    *("map_workers", "value_and_grad", "audit", "elastic", "optimizers"),
    *("simulate", "next_batch_size"),
    *("apply_gradients", "averaged_params", "center_params", "due", "localize"),
    *("mean_params", "metrics", "reduce", "resize", "slot", "slot_names", "replicate"),
    *("start_workers", "state_axes", "state_shardings", "state_specs", "take"),
    *("first", "rules", "functions", "nested"),
}
assert {*made, *others} - {"rules", "functions", "nested"} == set(oxs.__all__)
assert set(exchanges) == set(ex.__all__) - {"Exchange", "Met"}
functions = filter(inspect.isfunction, vars(oxs.graphs).values())
own = {f.__name__ for f in functions if f.__module__ == oxs.graphs.__name__}
assert set(graphs) == {name for name in own if not name.startswith("_")}

# JAX refuses this once it has looked for its devices.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""


def test_nothing_that_is_constructed_starts_the_backend():
    scripts.run(SCRIPT, XLA_FLAGS="")
