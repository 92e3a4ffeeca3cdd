"""What users get wrong: the code of each row of the tables of `PAGE`.

A row says what is told: parts of a message, "..." between. It may have several mistakes
with "; " between. `tests/test_mistakes.py` tries each.
"""

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState

import optx_sync as oxs

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "messages.md"


def loss_of(params, inputs, targets):
    return jnp.mean((inputs @ params["w"] - targets) ** 2)


def step_of(tx):
    """One worker's."""

    def train_step(params, state, inputs, targets):
        loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
        params, state = oxs.apply_gradients(tx, grads, state, params)
        return params, state, loss

    return train_step


class Model(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def names(folder) -> dict[str, Any]:
    """What the code of a row finds."""
    inputs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    params = {"w": jnp.zeros((3, 1))}
    tx = oxs.local_sgd(optax.sgd(0.1), "workers", communication_period=2)
    modules: Any = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "oxs": oxs}
    modules |= {"nnx": nnx, "eqx": eqx, "ocp": ocp, "TrainState": TrainState}
    return modules | {
        "workers": oxs.Workers(8, "workers"),
        "mesh8": oxs.Workers(8, "workers", mesh=True),
        "tx": tx,
        "params": params,
        "opt_state": tx.init(params),
        "inputs": inputs,
        "targets": inputs.sum(1, keepdims=True),
        "train_step": step_of(tx),
        "step_of": step_of,
        "Model": Model,
        "folder": folder,
        "manager": ocp.CheckpointManager(folder),
    }


BEGIN = "params, opt_state = workers.start((params, opt_state))\n"
STEP = "step = workers.step(train_step, state=2)\n"
RUN = "params, opt_state, loss = step(params, opt_state, inputs, targets)\n"
WITH = "train_step, opt_state = step_of(tx), tx.init(params)\n" + BEGIN + STEP + RUN
SAVE = """
state = workers.start((params, opt_state))
manager.save(3, args=ocp.args.StandardSave(state))
manager.wait_until_finished()
"""
IN_PIECES = 'oxs.cross_shard({}, "data", shard_state=True).init(params)'
GIVEN = """
def train_step(params, state, inputs, targets):
    return oxs.apply_gradients(tx, params, state, params, {})
opt_state = tx.init(params)
params, opt_state = workers.start((params, opt_state))
workers.step(train_step, state=2)(params, opt_state, inputs, targets)
"""
OBJECTS = """
model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
model, optimizer = workers.start((model, optimizer))
loss_of = lambda model, x: jnp.mean(model(x) ** 2)
"""
RATE = """
sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
tx = oxs.local_sgd(sgd, "workers", communication_period=2)
opt_state = tx.init(params)
params, opt_state = workers.start((params, opt_state))
opt_state = optax.tree.set(opt_state, learning_rate={})
step = workers.step(step_of(tx), state=2)
params, opt_state, loss = step(params, opt_state, inputs, targets)
"""
LOOKAHEAD = """
tx = oxs.local_sgd(optax.lookahead(optax.sgd(0.1), 5, 0.5), "workers")
"""
PODS = """
tx = oxs.diloco(oxs.cross_shard(optax.sgd(0.1), "chips"), "pods")
"""
FSDP = """
mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
workers = oxs.Workers(2, "data", mesh=mesh)
tx = oxs.stacked(optax.lars(0.1), jax.NamedSharding(mesh, jax.P("fsdp")))
square = jnp.ones((3, 3))
"""
FAULT = """
def train(worker):
    while worker.local_step < 2:
        worker.step({"w": jnp.ones((3, 1))})
with oxs.testing.virtual_cluster() as cluster:
    oxs.runtime.run(FAULT, params, optax.sgd(0.1), oxs.rules.local_sgd(), num_workers=1)
"""
NAMED = 'oxs.testing.fault(train, "{}", worker={}, step={})'

CODE = {
    "The optimizer names another axis than `Workers`": (
        'tx = oxs.local_sgd(optax.sgd(0.1), "replicas")\n' + WITH
    ),
    "A collective over an axis that there is not": (
        "step = workers.step(lambda own, x: own + jax.lax.pmean(x[0, 0], 'worker'))\n"
        "step(workers.start(0.0), inputs)"
    ),
    "The mesh has no such axis": (
        'oxs.Workers(8, "workers", mesh=jax.make_mesh((8,), ("data",)))'
    ),
    "The mesh has another number of positions": (
        'oxs.Workers(4, "workers", mesh=jax.make_mesh((8,), ("workers",)))'
    ),
    "More workers than devices, with `mesh=True`": (
        'oxs.Workers(16, "workers", mesh=True).start(params)'
    ),
    "A list of devices for a mesh": 'oxs.Workers(8, "workers", mesh=jax.devices())',
    "Two numbers and one axis": 'oxs.Workers((2, 4), "workers")',
    "Half a worker": 'oxs.Workers(2.5, "workers")',
    "Pods and chips in another order than the wrappers": (
        PODS + 'workers = oxs.Workers((4, 2), ("chips", "pods"))\n' + WITH
    ),
    "the same on a mesh": (
        PODS + 'workers = oxs.Workers((4, 2), ("chips", "pods"), mesh=True)\n' + WITH
    ),
    "A wrapper for pods, and none for their chips": (
        'tx = oxs.diloco(optax.sgd(0.1), "pods")\n'
        'workers = oxs.Workers((2, 4), ("pods", "chips"))\n' + WITH
    ),
    "Pods along explicit axes": (
        'names = ("pods", "chips")\n'
        "oxs.Workers((2, 4), names, mesh=jax.make_mesh((2, 4), names))"
    ),
    "One explicit axis": (
        'workers = oxs.Workers(8, "workers", mesh=jax.make_mesh((8,), ("workers",)))\n'
        + WITH
        + 'assert params["w"].sharding.spec[0] == "workers"'
    ),
    "`start` forgotten": STEP + RUN,
    "`start` of the parameters alone": (
        "params = workers.start(params)\n" + STEP + RUN
    ),
    "`tx.init` of stacked parameters": (
        "params = workers.start(params)\nopt_state = tx.init(params)\n" + STEP + RUN
    ),
    "`start` of each alone": (
        "params, opt_state = workers.start(params), workers.start(opt_state)\n"
        + STEP
        + RUN
        + "assert loss > 0"
    ),
    "Pretrained parameters put in place after `tx.init`": (
        "params = {'w': jnp.ones((3, 1))}\n" + BEGIN
    ),
    "in a `TrainState`": (
        "state = TrainState.create(apply_fn=None, params=params, tx=tx)\n"
        "workers.start(state.replace(params={'w': jnp.ones((3, 1))}))"
    ),
    "in an NNX model": (
        "model = Model()\n"
        "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)\n"
        "nnx.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))\n"
        "workers.start((model, optimizer))"
    ),
    "An `nnx.Optimizer` of a center rule, split": (
        "model = Model()\n"
        "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)\n"
        "graph, state = nnx.split((model, optimizer))\n"
        "workers.start(state)"
    ),
    "its `nnx.state`, of shapes": (
        "def made():\n"
        "    model = Model()\n"
        "    return nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param))\n"
        "workers.expect(made)"
    ),
    "Parts of the state as several arguments": "workers.start(params, opt_state)",
    "A step of (state, params), started as (params, state)": BEGIN
    + (
        "step = workers.step(\n"
        "    lambda state, params, x: oxs.apply_gradients(tx, params, state, params),\n"
        "    state=2)\n"
        "step(params, opt_state, inputs)"
    ),
    "Optax's state and parameters in each other's place": (
        "opt_state = optax.sgd(0.1).init(params)\n"
        "oxs.apply_gradients(optax.sgd(0.1), params, params, opt_state)"
    ),
    "The number of states by position": "workers.step(train_step, 2)",
    "Shapes in place of arrays": (
        "workers.start(jax.eval_shape(lambda: (params, tx.init(params))))"
    ),
    "Started twice": BEGIN + "workers.start((params, opt_state))",
    "A number for a learning rate in a started state": RATE.format("0.5"),
    "A scalar array for it": RATE.format("jnp.float32(0.5)"),
    "A new learning rate in a started state, `jnp.full_like(old, 0.5)`": RATE.format(
        'jnp.full_like(optax.tree.get(opt_state, "learning_rate"), 0.5)'
    )
    + 'assert (optax.tree.get(opt_state, "learning_rate") == jnp.full(8, 0.5)).all()',
    "The state of another optimizer": (
        "opt_state = optax.adam(0.1).init(params)\n" + BEGIN + STEP + RUN
    ),
    "The wrapper forgotten": (
        "tx = optax.sgd(0.1)\n" + WITH + "workers.center((params, opt_state))"
    ),
    "the center asked of parameters alone": (
        BEGIN + STEP + RUN + "workers.center(params)"
    ),
    "The center asked of the optimizer's state in front": (
        BEGIN + "assert workers.center((opt_state, params))['w'].shape == (3, 1)"
    ),
    "The center asked of the optimizer's state without parameters": (
        BEGIN + "workers.center((opt_state,))"
    ),
    "of two networks, each behind its own optimizer's state": (
        "two = {'w': jnp.ones((2, 2))}\n"
        "state = params, opt_state, two, tx.init(two)\n"
        "first, second = workers.center(workers.start(state))\n"
        "assert (first['w'] == params['w']).all() and (second['w'] == two['w']).all()"
    ),
    "Two networks in one tree of parameters, each with an optimizer of its own": (
        "both = {'params': {'gen': params, 'disc': params},\n"
        "    'gen_opt': tx.init(params), 'disc_opt': tx.init(params)}\n"
        "workers.center(workers.start(both))"
    ),
    "The center of replicas, which have none": (
        'tx = oxs.cross_shard(optax.sgd(0.1), "workers")\n'
        + WITH
        + "center = workers.center((params, opt_state))\n"
        'assert (center["w"] == params["w"]).all()'
    ),
    "The center asked before the workers have met": (
        'tx = oxs.diloco(optax.sgd(0.1), "workers")\n'
        + WITH
        + "workers.center((params, opt_state))"
    ),
    "The center under `jax.transfer_guard`": WITH
    + RUN
    + 'with jax.transfer_guard("disallow"):\n'
    "    center = workers.center((params, opt_state))\n"
    'assert center["w"].shape == (3, 1)',
    "The center of parameters that are NaN": (
        'tx = oxs.cross_shard(optax.sgd(0.1), "workers")\n'
        + WITH.replace("inputs", "inputs * jnp.nan")
        + "workers.center((params, opt_state))"
    ),
    "`optax.flatten` around a center rule": (
        "tx = optax.flatten(tx)\nopt_state = tx.init(params)\n"
        + BEGIN
        + "workers.center((params, opt_state))"
    ),
    "`optax.flatten` inside of a center rule": (
        'tx = oxs.local_sgd(optax.flatten(optax.adam(0.1)), "workers",\n'
        "    communication_period=1)\n" + WITH + "workers.center((params, opt_state))"
    ),
    "The center of a state that was not started": (
        "workers.center((params, opt_state))"
    ),
    "Metrics of an optimizer that has none": (
        "workers.metrics(workers.start((params, optax.sgd(0.1).init(params))))"
    ),
    "The BibTeX of a state": "oxs.citation(opt_state)",
    "A raw random key in the state": (
        'workers.start({"params": params, "key": jax.random.PRNGKey(0)})'
    ),
    "A raw random key for a batch": (
        "step = workers.step(lambda total, key: total)\n"
        "step(workers.start(0.0), jax.random.PRNGKey(0))"
    ),
    "One random key for all workers": (
        "step = workers.step(lambda total, key: total + jax.random.uniform(key))\n"
        "drawn = step(workers.start(0.0), jax.random.key(0))\n"
        "assert len(np.unique(drawn)) == 8"
    ),
    "`state=` too small": BEGIN + "step = workers.step(train_step, state=1)\n" + RUN,
    "`state=` too large": BEGIN + "step = workers.step(train_step, state=3)\n" + RUN,
    "The state passed by keyword": (
        BEGIN + STEP + "step(params=params, state=opt_state, inputs=inputs)"
    ),
    "The state not returned, or behind the loss": (
        BEGIN + "step = workers.step(lambda params, state, x: (0.0, params), state=2)\n"
        "step(params, opt_state, inputs)"
    ),
    "NNX objects changed in place, and nothing returned": (
        "model = workers.start(Model())\n"
        "def step(model, x):\n"
        "    model.layer.bias[...] += 1.0\n"
        "assert workers.step(step)(model, inputs) is None\n"
        "assert (model.layer.bias[...] == 1.0).all()"
    ),
    "an NNX model where a batch belongs": (
        "step = workers.step(lambda total, model, x: total)\n"
        "step(workers.start(0.0), workers.start(Model()), inputs)"
    ),
    "An NNX variable made inside of the step": (
        "def step(model, x):\n"
        "    model.extra = nnx.Param(jnp.zeros(3))\n"
        "workers.step(step)(workers.start(Model()), inputs)"
    ),
    "An array of an NNX object that is no variable": (
        "model = Model()\n"
        "model.scale = nnx.data(jnp.ones(3))\n"
        "workers.step(lambda model, x: None)(workers.start(model), inputs)"
    ),
    "tied weights in NNX": (
        "model = Model()\n"
        "model.again = model.layer\n"
        "model = workers.start(model)\n"
        "assert model.again.kernel is model.layer.kernel"
    ),
    "functions and flags in an Equinox module": (
        "model = eqx.nn.MLP(3, 1, 4, 1, jax.nn.gelu, key=jax.random.key(0))\n"
        "model = workers.start((model, eqx.nn.Dropout(0.5)))\n"
        "assert model[0].activation is not None and model[1].p == 0.5"
    ),
    "Half precision that becomes float32": (
        'state = workers.start({"w": jnp.zeros(3, jnp.bfloat16)})\n'
        'step = workers.step(lambda state, x: {"w": state["w"] + x.mean()})\n'
        "step(state, inputs)"
    ),
    "Counters of Python, integers and `None` in the state": (
        'state = workers.start({"step": 0, "ids": np.arange(3), "none": None})\n'
        'step = workers.step(lambda state, x: {**state, "step": state["step"] + 1})\n'
        'assert step(state, inputs)["step"].tolist() == [1] * 8'
    ),
    "A batch that cannot be split evenly": (
        BEGIN + STEP + "step(params, opt_state, inputs[:60], targets[:60])"
    ),
    "Batches of unequal numbers of examples": (
        BEGIN + STEP + "step(params, opt_state, inputs, targets[:48])"
    ),
    "`split=False` for a whole batch": (
        BEGIN
        + "step = workers.step(train_step, state=2, split=False)\n"
        + RUN.replace("inputs", "inputs[:60]")
    ),
    "A list of numbers for a batch": (
        "step = workers.step(lambda total, x: total + jnp.sum(jnp.asarray(x)))\n"
        "step(workers.start(0.0), [1.0, 2.0, 3.0, 4.0])"
    ),
    "A state used again after a step": (
        BEGIN + STEP + "step(params, opt_state, inputs, targets)\n" * 2
    ),
    "One array as state and as batch": (
        BEGIN + STEP + "step(params, opt_state, params['w'], targets)"
    ),
    "Predictions of examples among the results": (
        "step = workers.step(lambda total, x: (total, x[:, 0]), average=False)\n"
        "_, own = step(workers.start(0.0), inputs)\n"
        "assert (own.reshape(64) == inputs[:, 0]).all()"
    ),
    "Predictions of examples among the results, averaged": (
        "step = workers.step(lambda total, x: (total, x[:, 0]))\n"
        "step(workers.start(0.0), inputs)"
    ),
    "A random key among the results": (
        "step = workers.step(lambda total, key: (total, key))\n"
        "step(workers.start(0.0), jax.random.key(0))"
    ),
    "Gradients averaged by hand as well": (
        'tx = oxs.cross_shard(optax.sgd(0.1), "workers")\n'
        "def train_step(params, state, inputs, targets):\n"
        "    grads = jax.grad(loss)(params, inputs, targets)\n"
        '    grads = jax.lax.pmean(grads, "workers")\n'
        "    return oxs.apply_gradients(tx, grads, state, params)\n"
        'loss = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)\n'
        "params, opt_state = mesh8.start((params, tx.init(params)))\n"
        "mesh8.step(train_step, state=2)(params, opt_state, inputs, targets)"
    ),
    "`jax.jit`, `nnx.jit` or `eqx.filter_jit` left around the step": (
        BEGIN + STEP.replace("train_step,", "jax.jit(train_step),") + RUN
    ),
    "`workers.step` of a step of all workers": (
        "workers.step(workers.step(train_step, state=2), state=2)"
    ),
    "`optax.MultiSteps` around a center rule": (
        "tx = optax.MultiSteps(tx, 2).gradient_transformation()\n" + WITH
    ),
    "`optax.MultiSteps` inside of a center rule": (
        "inner = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()\n"
        'tx = oxs.diloco(inner, "workers")\n' + WITH
    ),
    "A mask by `ndim` with `shard_state=True`": IN_PIECES.format(
        "optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))"
    ),
    "inside of `MultiSteps`": IN_PIECES.format(
        "optax.MultiSteps(optax.adamw(0.1, mask=lambda p: jax.tree.map("
        "lambda x: x.ndim > 1, p)), 4).gradient_transformation()"
    ),
    "Optax's clip by the global norm with `shard_state=True`": IN_PIECES.format(
        "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))"
    ),
    "behind `zero_nans` in `MultiSteps`": IN_PIECES.format(
        "optax.MultiSteps(optax.chain(optax.zero_nans(), optax.clip_by_global_norm("
        "1.0), optax.adam(0.1)), 4).gradient_transformation()"
    ),
    "The clip in an outer optimizer in pieces": (
        "outer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7))\n"
        'oxs.diloco(optax.sgd(0.1), "workers", outer=outer, shard_state=True)'
        ".init(params)"
    ),
    'The clip with `shard_state="leaves"`': (
        "inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))\n"
        "two = params | {'b': jnp.zeros(3)}\n"
        'oxs.cross_shard(inner, "data", shard_state="leaves").init(two)'
    ),
    "`optax.lookahead` inside of a wrapper": LOOKAHEAD + WITH,
    "`optax.lookahead` inside of `cross_shard`": (
        LOOKAHEAD.replace("local_sgd", "cross_shard") + WITH
    ),
    "`optax.lookahead` with `optax.LookaheadParams`": (
        LOOKAHEAD + "slow = optax.LookaheadParams(params, params)\n"
        "oxs.apply_gradients(tx, params, tx.init(slow), slow)"
    ),
    "Something behind a center rule in `optax.chain`": (
        "tx = optax.chain(tx, optax.clip(1.0))\n" + WITH
    ),
    "a wrapper that `copy.deepcopy` or `jax.tree.map` copied": (
        "import copy\n"
        "tx = jax.tree.map(lambda function: function, copy.deepcopy(tx))\n" + WITH
    ),
    "`restore` before `start`": SAVE + 'oxs.Workers(8, "workers").restore(manager)',
    "`restore` where nothing was saved": BEGIN + "workers.restore(manager)",
    "A step that was not saved": SAVE + "workers.restore(manager, 7)",
    "The checkpoint of a state that was not started": (
        "manager.save(3, args=ocp.args.StandardSave((params, opt_state)))\n"
        "manager.wait_until_finished()\n" + BEGIN + "workers.restore(manager)"
    ),
    "The checkpoint of another optimizer": (
        SAVE
        + 'tx = oxs.diloco(optax.adam(0.1), "workers")\n'
        + 'other = oxs.Workers(8, "workers")\n'
        "other.start((params, tx.init(params)))\n"
        "other.restore(manager)"
    ),
    "The checkpoint of another number of workers": (
        SAVE + 'six = oxs.Workers(6, "workers")\n' + "six.start((params, opt_state))\n"
        'assert six.restore(manager)[0]["w"].shape == (6, 3, 1)'
    ),
    "Another number of workers in the middle of a round": (
        BEGIN + STEP + RUN + "workers.resize((params, opt_state), 6)"
    ),
    "More workers, with a state of each worker's own that is no optimizer's, such as a"
    " replay buffer": (
        "state = workers.start((params, opt_state, jnp.zeros(5)))\n"
        "state = *state[:2], jnp.arange(40.0).reshape(8, 5)\n"
        "workers.resize(state, 10)"
    ),
    "A number for the outer optimizer": 'oxs.diloco(optax.sgd(0.1), "w", outer=0.7)',
    "A name of a room asked of `oxs`": "oxs.quantized(bits=4)",
    "A name in another spelling": "oxs.DiLoCo",
    "A weight with letters changed": GIVEN.format("weigth=2.0"),
    "a mask for it": GIVEN.format("mask=inputs[0]"),
    "`contributes=` of a center rule": GIVEN.format("contributes=True"),
    "`contributes=` with an axis of one": (
        'tx = oxs.sync_replicas(optax.sgd(0.1), "workers", 8)\n'
        + GIVEN.format("contributes=jnp.ones(1, bool)")
    ),
    "An integer of Python for a parameter": (
        'oxs.cross_shard(optax.adam(0.1), "workers").init({"w": 3})'
    ),
    "An integer for a parameter of a center": 'tx.init({"w": 3})',
    "A loss of one's own for a line search": (
        'tx = oxs.cross_shard(optax.lbfgs(), "workers")\n'
        + GIVEN.format("value=0.0, grad=params, value_fn=lambda params: 0.0")
    ),
    "A schedule of 0 steps": (
        'oxs.local_sgd(optax.sgd(0.1), "workers", communication_period=lambda _: 0)'
        ".init(params)"
    ),
    "A step that uses an NNX model from outside of its arguments": (
        OBJECTS + "def train_step(optimizer, x):\n"
        "    optimizer.update(model, nnx.grad(loss_of)(model, x))\n"
        "workers.step(train_step)(optimizer, inputs)"
    ),
    "A step of (model, optimizer) called with (optimizer, model)": (
        OBJECTS + "def train_step(model, optimizer, x):\n"
        "    grads = nnx.grad(loss_of)(model, x)\n"
        "    optimizer.update(model, grads)\n"
        "workers.step(train_step, state=2)(optimizer, model, inputs)"
    ),
    "The step in front of the optimizer in `due`": "oxs.by_hand.due(3, tx)",
    "A keyword that is not there": 'oxs.diloco(optax.sgd(0.1), "workers", H=100)',
    "A keyword with a letter missing": (
        'oxs.elastic_average(optax.sgd(0.1), "workers", num_worker=8, rho=0.0)'
    ),
    "Optimizer and axis changed places": 'oxs.diloco("workers", optax.adamw(0.1))',
    "The axis forgotten": "oxs.diloco(optax.adamw(0.1))",
    "An optimizer that was not called": 'oxs.diloco(optax.adamw, "workers")',
    "A period of one step, overlapped": (
        'oxs.local_sgd(optax.sgd(0.1), "workers",\n'
        "    communication_period=1, overlap=True)"
    ),
    "An exchange that was not called": (
        'oxs.diloco(optax.sgd(0.1), "workers", exchange=oxs.exchange.quantized)'
    ),
    "A dict of variables to average for a `FrozenDict`": (
        "from flax.core import FrozenDict\n"
        "average = {'variable_averages': 0.9, 'variables_to_average': {'w': True}}\n"
        'oxs.sync_replicas(optax.sgd(0.1), "data", 8, **average).init('
        "FrozenDict(params))"
    ),
    "TensorFlow's list of variables to average": (
        "average = {'variable_averages': 0.9, 'variables_to_average': ['w']}\n"
        'oxs.sync_replicas(optax.sgd(0.1), "data", 8, **average).init(params)'
    ),
    "A schedule among the numbers that `fingerprint` or a `Group` compares": (
        "rate = optax.constant_schedule(0.1)\n"
        "oxs.fingerprint(params, None, also={'rate': rate})"
    ),
    "A state of `stacked` on a mesh without its axes": (
        FSDP + "state = workers.start(({'a': square}, tx.init({'a': square})))\n"
        "oxs.Workers(2, 'data', mesh=jax.make_mesh((2,), ('data',))).resize(state)"
    ),
    "A state of `stacked` with other parameters": (
        FSDP + "state, params = tx.init({'a': square}), {'a': square, 'b': square}\n"
        "tx.update(params, state, params)"
    ),
    "A folder for the manager of checkpoints": BEGIN + "workers.restore(folder)",
    "with parts, one of which waits": (
        'tx = oxs.diloco(optax.sgd(0.1), "workers", communication_period=4,\n'
        "    fragments=2, overlap=True)\n"
        'params = {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1)}\n'
        "opt_state = tx.init(params)\n"
        + BEGIN
        + "workers.resize((params, opt_state), 6)"
    ),
    "An exchange of one's own that reduces a constant": (
        "def meet(tree, state, axis, *, weight=None):\n"
        '    number = oxs.reduce(jnp.ones(3), axis, reduction="sum")\n'
        "    return oxs.exchange.Met(oxs.reduce(tree, axis), number)\n"
        "mine = oxs.exchange.Exchange(lambda tree: (), meet, linear=True)\n"
        'tx = oxs.cross_shard(optax.sgd(0.1), "workers", exchange=mine)\n'
        + WITH.replace("workers.", "mesh8.")
    ),
    "Specs of all of Linen's variables": (
        'names = ("workers", "parts")\n'
        "mesh = jax.make_mesh((2, 4), names, (jax.sharding.AxisType.Auto,) * 2)\n"
        'specs = {"params": {"w": jax.P("parts")}}\n'
        'oxs.Workers(2, "workers", mesh=mesh, specs=specs).start((params, opt_state))'
    ),
    "Specs with other names than the parameters": (
        'names = ("workers", "parts")\n'
        "mesh = jax.make_mesh((2, 4), names, (jax.sharding.AxisType.Auto,) * 2)\n"
        'specs = {"weights": jax.P("parts")}\n'
        'workers = oxs.Workers(2, "workers", mesh=mesh, specs=specs)\n'
        'tx = oxs.local_sgd(optax.sgd(0.1), "workers",\n'
        "    exchange=oxs.exchange.quantized())\n" + WITH
    ),
    "Specs of Linen's boxed parameters, "
    '`nn.get_partition_spec(variables)["params"]`': (
        "import flax.linen as nn\n"
        'names = ("workers", "parts")\n'
        "mesh = jax.make_mesh((2, 4), names, (jax.sharding.AxisType.Auto,) * 2)\n"
        "begin = nn.with_partitioning(nn.initializers.ones, (None, 'parts'))\n"
        "variables = nn.Dense(4, kernel_init=begin).init(jax.random.key(0), inputs)\n"
        'specs = nn.get_partition_spec(variables)["params"]\n'
        'workers = oxs.Workers(2, "workers", mesh=mesh, specs=specs)\n'
        'for boxed in (variables["params"], nn.unbox(variables["params"])):\n'
        "    params, state = workers.start((boxed, tx.init(boxed)))\n"
        '    for one in (params["kernel"], state.center["kernel"]):\n'
        "        placed = nn.unbox(one).sharding.spec\n"
        '        assert "parts" in placed, placed'
    ),
    "Specs as variables, `nnx.get_partition_spec(nnx.state(model, nnx.Param))`": (
        'names = ("workers", "parts")\n'
        "mesh = jax.make_mesh((2, 4), names, (jax.sharding.AxisType.Auto,) * 2)\n"
        'specs = nnx.State({"w": nnx.Param(jax.P("parts"))})\n'
        'workers = oxs.Workers(2, "workers", mesh=mesh, specs=specs)\n'
        'placed = workers.start(({"w": jnp.zeros((4, 3))},))[0]["w"].sharding.spec\n'
        'assert placed == jax.P("workers", "parts")'
    ),
    "A metric object in the state, such as `nnx.MultiMetric`": (
        'seen = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))\n'
        "seen = workers.start(seen)\n"
        "workers.step(lambda seen, x: seen.update(loss=x.mean()))(seen, inputs)\n"
        'found = jnp.mean(seen.compute()["loss"])\n'
        "np.testing.assert_allclose(found, inputs.mean(), rtol=1e-5)"
    ),
    "More workers than the mesh has positions": (
        'workers = oxs.Workers(8, "workers", mesh=jax.make_mesh((8,), ("workers",)))\n'
        + BEGIN
        + "workers.resize((params, opt_state), 12)"
    ),
    "A fault of no known kind": NAMED.format("crash", 0, 1).replace("train", "print"),
    "A fault outside of a virtual cluster": (
        'oxs.testing.fault(print, "dies", worker=0, step=1)(None)'
    ),
    "A fault of a worker that is not there": (
        FAULT.replace("FAULT", NAMED.format("dies", 5, 1))
    ),
    "A fault after the last step": (
        FAULT.replace("FAULT", NAMED.format("freezes", 0, 9))
    ),
    "A worker of two processes in a virtual cluster": (
        FAULT.replace("FAULT", "train").replace("rs=1", "rs=1, processes_per_worker=2")
    ),
    "A program that waits by another clock, for ever": (
        "wait = lambda worker: [cluster.sleep(100.0) for _ in iter(int, 1)]"
        + FAULT.replace("FAULT", "wait")
    ),
}


def told() -> dict[str, str]:
    """What the page says to each mistake: an error's class, a ValueError where it names
    none, and its message; or why it is right.
    """
    found: dict[str, str] = {}
    tables = re.findall(
        r"^\| what was done \| (\S+).*\n\|---.*\n((?:\|.*\n)*)",
        PAGE.read_text(),
        re.MULTILINE,
    )
    for head, rows in tables:
        for row in rows.splitlines():
            what, said = row[2:-2].split(" | ", 1)
            said = said.strip("`")
            if head == "why":
                said = "Right: " + said
            elif not re.match(r"\w+(Error|Warning): ", said):
                said = "ValueError: " + said
            for one in what.split("; "):
                assert one not in found, one
                found[one] = said
    return found
