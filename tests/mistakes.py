"""What users get wrong with `Workers`, and what is said: the page of it is made here.

`python -m tests.mistakes` writes the page, and `tests/test_mistakes.py` tries each row.
"""

from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState

import optx_sync as oxs

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"


class Mistake(NamedTuple):
    """A row of the table."""

    what: str
    code: str
    said: str  # an error's class and parts of its message, "..." between; or "Right: "


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
PODS = """
tx = oxs.diloco(oxs.cross_shard(optax.sgd(0.1), "chips"), "pods")
"""

TABLE = [
    Mistake(
        "The optimizer names another axis than `Workers`",
        'tx = oxs.local_sgd(optax.sgd(0.1), "replicas")\n' + WITH,
        "ValueError: No mapped axis is named 'replicas' here.",
    ),
    Mistake(
        "The mesh has no such axis",
        'oxs.Workers(8, "workers", mesh=jax.make_mesh((8,), ("data",)))',
        "ValueError: The mesh has no axis 'workers'; its axes are {'data': 8}.",
    ),
    Mistake(
        "The mesh has another number of positions",
        'oxs.Workers(4, "workers", mesh=jax.make_mesh((8,), ("workers",)))',
        "ValueError: Workers are 4, but the mesh has 8 positions along 'workers', and "
        "each is one worker. Make the two equal, or simulate",
    ),
    Mistake(
        "More workers than devices, with `mesh=True`",
        'oxs.Workers(16, "workers", mesh=True).start(params)',
        "ValueError: mesh=True makes a mesh of 16 devices ... there are 8. Simulate "
        "with mesh=None, pass a mesh of your own, or let CPU devices stand for others",
    ),
    Mistake(
        "A list of devices for a mesh",
        'oxs.Workers(8, "workers", mesh=jax.devices())',
        "TypeError: mesh of Workers is a jax.sharding.Mesh, True ... got list.",
    ),
    Mistake(
        "Two numbers and one axis",
        'oxs.Workers((2, 4), "workers")',
        "ValueError: Workers has 2 numbers and 1 axes ... "
        "oxs.Workers((2, 4), ('pods', 'chips')).",
    ),
    Mistake(
        "No workers, or half of one",
        'oxs.Workers(2.5, "workers")',
        "TypeError: n must be an integer, and not traced; got 2.5 of type float.",
    ),
    Mistake(
        "Pods and chips in another order than the optimizer's wrappers",
        PODS + 'workers = oxs.Workers((4, 2), ("chips", "pods"))\n' + WITH,
        "ValueError: train_step makes each worker's own of what workers share ... "
        "stand in the order of the optimizer's wrappers, the outermost first",
    ),
    Mistake(
        "The same on a mesh",
        PODS + 'workers = oxs.Workers((4, 2), ("chips", "pods"), mesh=True)\n' + WITH,
        "ValueError: train_step makes each worker's own of what workers share",
    ),
    Mistake(
        "Pods along explicit axes of a mesh",
        'names = ("pods", "chips")\n'
        "oxs.Workers((2, 4), names, mesh=jax.make_mesh((2, 4), names))",
        "ValueError: Along several axes of type Explicit JAX gathers ... or pass "
        "mesh=True.",
    ),
    Mistake(
        "One explicit axis",
        'workers = oxs.Workers(8, "workers", mesh=jax.make_mesh((8,), ("workers",)))\n'
        + WITH
        + 'assert params["w"].sharding.spec[0] == "workers"',
        "Right: explicit and `Auto` axes give the same program.",
    ),
    Mistake(
        "`start` forgotten",
        STEP + RUN,
        "ValueError: The state [0]['w'] of train_step with state=2 has shape (3, 1), "
        "and that of all workers begins with (8,). Start once, state = "
        "workers.start(state)",
    ),
    Mistake(
        "`start` of the parameters, but not of the optimizer's state",
        "params = workers.start(params)\n" + STEP + RUN,
        "ValueError: The state [1] ... has shape (), and that of all workers begins "
        "with (8,). Start once",
    ),
    Mistake(
        "`tx.init` of parameters that are stacked",
        "params = workers.start(params)\nopt_state = tx.init(params)\n" + STEP + RUN,
        "ValueError: The state [1] ... has shape (), and that of all workers begins "
        "with (8,). Start once",
    ),
    Mistake(
        "`start` of each alone",
        "params, opt_state = workers.start(params), workers.start(opt_state)\n"
        + STEP
        + RUN
        + "assert loss > 0",
        "Right: what is shared a state's class says wherever it stands.",
    ),
    Mistake(
        "Started twice",
        BEGIN + "workers.start((params, opt_state))",
        "ValueError: This state has been started already: it has the workers' axes in "
        "front. Go on with it as it is",
    ),
    Mistake(
        "The state of another optimizer",
        "opt_state = optax.adam(0.1).init(params)\n" + BEGIN + STEP + RUN,
        "ValueError: The state is not one of this transformation ... Start with "
        "tx.init(params)",
    ),
    Mistake(
        "The wrapper forgotten: each worker trains alone",
        "tx = optax.sgd(0.1)\n" + WITH + "workers.center((params, opt_state))",
        "UserWarning: All parameters differ from worker to worker, and this state "
        "holds no center. ... workers train alone and never meet.",
    ),
    Mistake(
        "The center asked of parameters alone",
        BEGIN + STEP + RUN + "workers.center(params)",
        "UserWarning: All parameters differ from worker to worker, and this state "
        "holds no center. Pass the optimizer's state with them",
    ),
    Mistake(
        "The center asked of the optimizer's state alone, or in front",
        BEGIN + "workers.center((opt_state, params))",
        "ValueError: Of the center's ['w'] there is no parameter in this state. Pass "
        "parameters and optimizer's state together, in this order",
    ),
    Mistake(
        "The center of replicas, which have none",
        'tx = oxs.cross_shard(optax.sgd(0.1), "workers")\n'
        + WITH
        + "center = workers.center((params, opt_state))\n"
        'assert (center["w"] == params["w"]).all()',
        "Right: their parameters, to the bit.",
    ),
    Mistake(
        "The center of a state that was not started",
        "workers.center((params, opt_state))",
        "ValueError: The state [0]['w'] of workers.center has shape (3, 1)",
    ),
    Mistake(
        "Metrics of an optimizer that has none",
        "workers.metrics(workers.start((params, optax.sgd(0.1).init(params))))",
        "ValueError: There are no metrics in this state",
    ),
    Mistake(
        "A raw random key in the state",
        'workers.start({"params": params, "key": jax.random.PRNGKey(0)})',
        "UserWarning: The state ['key'] looks like a raw random key, "
        "jax.random.PRNGKey: all workers would draw the same numbers. Take "
        "jax.random.key(0)",
    ),
    Mistake(
        "A raw random key for a batch",
        "step = workers.step(lambda total, key: total)\n"
        "step(workers.start(0.0), jax.random.PRNGKey(0))",
        "ValueError: The argument 1 ... It looks like a raw random key: pass "
        "jax.random.key(0)",
    ),
    Mistake(
        "One random key for all workers",
        "step = workers.step(lambda total, key: total + jax.random.uniform(key))\n"
        "drawn = step(workers.start(0.0), jax.random.key(0))\n"
        "assert len(np.unique(drawn)) == 8",
        "Right: each worker's has its number folded in.",
    ),
    Mistake(
        "`state=` too small",
        BEGIN + "step = workers.step(train_step, state=1)\n" + RUN,
        "ValueError: Argument 1 of train_step is no batch to split, but a state: "
        "CenterState. ... pass state=2.",
    ),
    Mistake(
        "`state=` too large",
        BEGIN + "step = workers.step(train_step, state=3)\n" + RUN,
        "ValueError: The state [2] of train_step with state=3 has shape (64, 3)",
    ),
    Mistake(
        "The state passed by keyword",
        BEGIN + STEP + "step(params=params, state=opt_state, inputs=inputs)",
        "TypeError: train_step has state=2, so its first 2 positional arguments are "
        "state; got 0.",
    ),
    Mistake(
        "The state not returned, or behind the loss",
        BEGIN + "step = workers.step(lambda params, state, x: (0.0, params), state=2)\n"
        "step(params, opt_state, inputs)",
        "ValueError: With state=2 <lambda> returns its state in front of other results",
    ),
    Mistake(
        "A step that changes NNX objects in place and returns nothing",
        "model = workers.start(Model())\n"
        "def step(model, x):\n"
        "    model.layer.bias[...] += 1.0\n"
        "assert workers.step(step)(model, inputs) is None\n"
        "assert (model.layer.bias[...] == 1.0).all()",
        "Right: the caller's objects change.",
    ),
    Mistake(
        "An NNX model where a batch belongs",
        "step = workers.step(lambda total, model, x: total)\n"
        "step(workers.start(0.0), workers.start(Model()), inputs)",
        "ValueError: Argument 1 of <lambda> is no batch to split, but a state: Model. "
        "... pass state=2.",
    ),
    Mistake(
        "An NNX variable made inside of the step",
        "def step(model, x):\n"
        "    model.extra = nnx.Param(jnp.zeros(3))\n"
        "workers.step(step)(workers.start(Model()), inputs)",
        "ValueError: With state=1 step returns its state ... In what it returned "
        "[0].extra is new.",
    ),
    Mistake(
        "An array of an NNX object that is no variable",
        "model = Model()\n"
        "model.scale = nnx.data(jnp.ones(3))\n"
        "workers.step(lambda model, x: None)(workers.start(model), inputs)",
        "ValueError: <lambda> cannot change [0].scale in place: it is an array of an "
        "NNX object, but no nnx.Variable.",
    ),
    Mistake(
        "Tied weights in NNX",
        "model = Model()\n"
        "model.again = model.layer\n"
        "model = workers.start(model)\n"
        "assert model.again.kernel is model.layer.kernel",
        "Right: they stay tied.",
    ),
    Mistake(
        "Functions, flags and settings in an Equinox module",
        "model = eqx.nn.MLP(3, 1, 4, 1, jax.nn.gelu, key=jax.random.key(0))\n"
        "model = workers.start((model, eqx.nn.Dropout(0.5)))\n"
        "assert model[0].activation is not None and model[1].p == 0.5",
        "Right: they are left alone.",
    ),
    Mistake(
        "Half precision that becomes float32 in the step",
        'state = workers.start({"w": jnp.zeros(3, jnp.bfloat16)})\n'
        'step = workers.step(lambda state, x: {"w": state["w"] + x.mean()})\n'
        "step(state, inputs)",
        "ValueError: <lambda> makes float32[3] of the state [0]['w'], which is "
        "bfloat16[3]. Return it in its own shape and dtype: x.astype(old.dtype).",
    ),
    Mistake(
        "Counters of Python, integers and `None` in the state",
        'state = workers.start({"step": 0, "ids": np.arange(3), "none": None})\n'
        'step = workers.step(lambda state, x: {**state, "step": state["step"] + 1})\n'
        'assert step(state, inputs)["step"].tolist() == [1] * 8',
        "Right: Python's numbers become arrays.",
    ),
    Mistake(
        "A batch that cannot be split evenly",
        BEGIN + STEP + "step(params, opt_state, inputs[:60], targets[:60])",
        "ValueError: The argument 2 of train_step has shape (60, 3), and 60 cannot be "
        "split evenly among 8 workers. Drop or pad the last ones.",
    ),
    Mistake(
        "`split=False` for a whole batch",
        BEGIN
        + "step = workers.step(train_step, state=2, split=False)\n"
        + RUN.replace("inputs", "inputs[:60]"),
        "ValueError: The argument 2 of train_step has shape (60, 3), and split=False "
        "says that it begins with (8,). A whole batch is split by split=True",
    ),
    Mistake(
        "The state that was handed to a step used again",
        BEGIN + STEP + "step(params, opt_state, inputs, targets)\n" * 2,
        "ValueError: train_step was given a state that an earlier step has used up: "
        "its buffers hold the newer one. Go on with what that step returned",
    ),
    Mistake(
        "One array as state and as batch",
        BEGIN + STEP + "step(params, opt_state, params['w'], targets)",
        "ValueError: train_step was given one array as argument 0['w'], which is "
        "state, and as argument 2. The state's memory becomes the new state's: pass",
    ),
    Mistake(
        "Predictions of examples among the results",
        "step = workers.step(lambda total, x: (total, x[:, 0]), average=False)\n"
        "_, own = step(workers.start(0.0), inputs)\n"
        "assert (own.reshape(64) == inputs[:, 0]).all()",
        "Right with `average=False`; otherwise they are averaged over the workers, as "
        "all results are.",
    ),
    Mistake(
        "A random key among the results",
        "step = workers.step(lambda total, key: (total, key))\n"
        "step(workers.start(0.0), jax.random.key(0))",
        "TypeError: The result [0] is a random key, which has no mean. Keep it in the "
        "state",
    ),
    Mistake(
        "Gradients averaged by hand, and reduced once more",
        'tx = oxs.cross_shard(optax.sgd(0.1), "workers")\n'
        "def train_step(params, state, inputs, targets):\n"
        "    grads = jax.grad(loss)(params, inputs, targets)\n"
        '    grads = jax.lax.pmean(grads, "workers")\n'
        "    return oxs.apply_gradients(tx, grads, state, params)\n"
        'loss = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)\n'
        "params, opt_state = mesh8.start((params, tx.init(params)))\n"
        "mesh8.step(train_step, state=2)(params, opt_state, inputs, targets)",
        "ValueError: The gradient at ['w'] does not vary over the mesh axis 'workers'",
    ),
    Mistake(
        "`jax.jit`, `nnx.jit` or `eqx.filter_jit` left around the step",
        BEGIN + STEP.replace("train_step,", "jax.jit(train_step),") + RUN,
        "Right: it is compiled once more inside, to the same.",
    ),
    Mistake(
        "`workers.step` of a step of all workers",
        "workers.step(workers.step(train_step, state=2), state=2)",
        "TypeError: train_step is a step of all workers already",
    ),
    Mistake(
        "`optax.MultiSteps` around a center rule",
        "tx = optax.MultiSteps(tx, 2).gradient_transformation()\n" + WITH,
        "ValueError: Optax's MultiSteps stands around a center rule ... Put it inside "
        "of the rule",
    ),
    Mistake(
        "`optax.MultiSteps` inside of it",
        "inner = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()\n"
        'tx = oxs.diloco(inner, "workers")\n' + WITH,
        "Right.",
    ),
    Mistake(
        "Something behind a center rule in `optax.chain`",
        "tx = optax.chain(tx, optax.clip(1.0))\n" + WITH,
        "ValueError: Link 0 of this chain of 2 has a CenterState ... Let it stand "
        "last, or put the other links inside",
    ),
    Mistake(
        "`restore` before `start`",
        SAVE + 'oxs.Workers(8, "workers").restore(manager)',
        "ValueError: restore needs to know what the checkpoint holds. Start first",
    ),
    Mistake(
        "`restore` where nothing was saved",
        BEGIN + "workers.restore(manager)",
        "ValueError: There is no checkpoint in",
    ),
    Mistake(
        "A step that was not saved",
        SAVE + "workers.restore(manager, 7)",
        "ValueError: There is no checkpoint of step 7 in ... there are those of [3].",
    ),
    Mistake(
        "The checkpoint of another optimizer",
        SAVE
        + 'tx = oxs.diloco(optax.adam(0.1), "workers")\n'
        + 'other = oxs.Workers(8, "workers")\n'
        "other.start((params, tx.init(params)))\n"
        "other.restore(manager)",
        "ValueError: The checkpoint of step 3 holds no 1.outer.0.trace.w: it is of "
        "another state or optimizer.",
    ),
    Mistake(
        "The checkpoint of another number of workers",
        SAVE + 'six = oxs.Workers(6, "workers")\n' + "six.start((params, opt_state))\n"
        'assert six.restore(manager)[0]["w"].shape == (6, 3, 1)',
        "Right: it is resized.",
    ),
    Mistake(
        "Another number of workers in the middle of a round",
        BEGIN + STEP + RUN + "workers.resize((params, opt_state), 6)",
        "UserWarning: resize in the middle of a round drops",
    ),
    Mistake(
        "More workers than the mesh has positions",
        'workers = oxs.Workers(8, "workers", mesh=jax.make_mesh((8,), ("workers",)))\n'
        + BEGIN
        + "workers.resize((params, opt_state), 12)",
        "ValueError: The mesh has not 12 positions along 'workers'.",
    ),
]


def page() -> str:
    """The page of the table."""
    rows = (f"| {row.what} | {_shown(row.said)} |" for row in TABLE)
    return "\n".join([HEAD, "| what was done | what is said |", "|---|---|", *rows, ""])


def _shown(said: str) -> str:
    kind, colon, text = said.partition(": ")
    if kind.startswith("Right"):
        return said
    # As code: a message has brackets and signs that Markdown would read.
    return f"`{kind}{colon}{text.strip()}`".replace("|", "\\|")


HEAD = """# Mistakes

What users of `oxs.Workers` get wrong first, and what is said to each. Each row is
tried in a test; a message goes on where it is cut off here, with what to do. What goes
wrong quietly elsewhere: [traps](traps.md).
"""


if __name__ == "__main__":
    PAGE.write_text(page())
