import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import audit
from optx_sync.audit import Collective, programs
from optx_sync.audit.hlo import read
from tests.meshes import mesh_of
from tests.refusals import all_refused

EVERYONE = (tuple(range(8)),)


def on_mesh(fn, mesh):
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def hlo(text):
    return audit.parse(textwrap.dedent(text))


def test_psum_of_a_tree_is_one_all_reduce():
    step = on_mesh(lambda tree: lax.psum(tree, "d"), mesh_of({"d": 8}))
    tree = {"a": jnp.ones(5), "b": [jnp.ones((2, 3)), jnp.ones(())]}
    expected = [Collective("all-reduce", 4 * (5 + 6 + 1), 3, EVERYONE, False)]
    assert audit.collectives(step, tree) == expected
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    assert audit.collectives(lambda tree: step(tree), tree=abstract) == expected


def test_a_program_at_any_stage():
    step = jax.jit(
        on_mesh(lambda x: lax.psum(x, "d"), mesh_of({"d": 8})),
    )
    x = jnp.ones(3)
    expected = [Collective("all-reduce", 12, 1, EVERYONE, False)]
    assert audit.collectives(step.trace(x)) == expected
    assert audit.collectives(step.lower(x)) == expected
    compiled = step.lower(x).compile()
    assert audit.collectives(compiled) == expected
    with pytest.raises(TypeError, match="compiled already"):
        audit.collectives(compiled, x)
    with pytest.raises(TypeError, match="got 3"):
        audit.collectives(3)


def test_every_kind():
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def step(x):
        return (
            lax.all_gather(x, "d", tiled=True),
            lax.psum_scatter(x * 2, "d", tiled=True),
            lax.ppermute(x * 3, "d", ring),
            lax.all_to_all(x * 5, "d", 0, 0, tiled=True),
        )

    rows = audit.collectives(on_mesh(step, mesh_of({"d": 8})), jnp.ones(16))
    by_kind = {row.kind: row for row in rows}
    assert len(rows) == len(by_kind) == 4
    assert by_kind["all-gather"][1:5] == (64, 1, EVERYONE, False)
    assert by_kind["reduce-scatter"][1:5] == (64, 1, EVERYONE, False)
    assert by_kind["collective-permute"][1:5] == (64, 1, tuple(ring), False)
    # XLA:CPU splits the operand into one array per device.
    assert by_kind["all-to-all"].bytes == 64
    assert by_kind["all-to-all"].groups == EVERYONE


def loop(x):
    return lax.fori_loop(0, 3, lambda i, x: lax.psum(x * 2, "d"), x)


def scanned(f, x, length):
    return lax.scan(lambda x, _: (f(x), None), x, length=length)[0]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_says_how_often_the_loops_around_it_run_it(compiled):
    """Also as JAX gives it to XLA; in a branch, the loops inside of it alone."""

    def summed(x):
        return lax.psum(x * 2, "d")

    def step(flag, x):
        nested = scanned(summed, scanned(lambda x: scanned(summed, x, 4), x, 6), 5)
        maybe = scanned(lambda x: branch(flag, x, loop), nested[:2], 7)
        # How often this runs depends on the numbers.
        until = lax.while_loop(lambda x: x.sum() < 9, summed, nested[:1])
        return lax.psum(maybe, "d"), until

    step = jax.jit(on_mesh(step, mesh_of({"d": 8})))
    lowered = step.lower(jnp.array(True), jnp.ones(3))
    as_given = programs._rows_to_be(read(lowered.as_text("hlo")))
    rows = audit.collectives(lowered) if compiled else as_given
    found = [(row.bytes, row.conditional, row.times) for row in rows]
    expected = {(12, False, 24), (12, False, 5), (8, True, 3), (8, False, 1)}
    assert {*found} == expected | {(4, False, None)} and len(found) == 5
    text = audit.table(rows).splitlines()
    in_all = 12 * (24 + 5) + 8 * (3 + 1) + 4, 24 + 5 + 3 + 1 + 1
    assert text[-1].split()[:3] == ["total", *map(str, in_all)]
    assert text[0].split()[3] == "times" and "not said" in "".join(text)


def test_what_runs_five_times_is_sent_five_times():
    once = Collective("all-reduce", 4096, 1, EVERYONE, False)
    often, link = once._replace(times=5), {"gbits": 1.0, "step_seconds": 1.0}
    assert often.sent == 5 * once.sent > 0
    assert audit.time([often], **link).sent == 5 * audit.time([once], **link).sent
    assert once._replace(times=None).sent == once.sent


@pytest.mark.parametrize(
    ("begin", "step", "direction", "times"),
    [(0, 1, "LT", 6), (1, 1, "LT", None), (0, 2, "LT", None), (0, 1, "LE", None)],
)
def test_a_loop_is_counted_only_where_it_goes_from_0_by_1(
    begin, step, direction, times
):
    program = read(f"""
    HloModule jit_step, num_partitions=8
    body {{
      p = (s32[], f32[3]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      one = s32[] constant({step})
      next = s32[] add(i, one)
      x = f32[3] get-tuple-element(p), index=1
      sum = f32[3] all-reduce(x), replica_groups={{}}
      ROOT r = (s32[], f32[3]) tuple(next, sum)
    }}
    condition {{
      p = (s32[], f32[3]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      last = s32[] constant(6)
      ROOT r = pred[] compare(i, last), direction={direction}
    }}
    ENTRY main {{
      x = f32[3] parameter(0)
      i = s32[] constant({begin})
      t = (s32[], f32[3]) tuple(i, x)
      ROOT r = (s32[], f32[3]) while(t), condition=condition, body=body
    }}
    """)
    (row,) = programs._rows_to_be(program)
    assert row.times == times


CODES = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=8))
SENDS = {
    "cross_shard": oxs.cross_shard(optax.sgd(0.1, 0.9), "d"),
    "cross_shard, in pieces": oxs.cross_shard(
        optax.sgd(0.1, 0.9), "d", shard_state=True
    ),
    "cross_shard, codes": oxs.cross_shard(optax.sgd(0.1), "d", exchange=CODES),
    "diloco, in pieces": oxs.diloco(
        optax.sgd(0.1), "d", communication_period=2, shard_state=True
    ),
    "gossip": oxs.gossip(optax.sgd(0.1), "d", communication_period=2),
    "noloco": oxs.noloco(optax.sgd(0.1), "d", communication_period=2),
}


@pytest.mark.parametrize("name", SENDS)
def test_a_profile_names_what_is_sent_and_the_step(name):
    def train(params, state):
        return oxs.apply_gradients(SENDS[name], params, state, params)

    workers, params = oxs.Workers(8, "d", mesh=True), jnp.ones(16)
    step = workers.step(train, state=2)
    now = workers.start((params, SENDS[name].init(params)))
    kinds, sent = step.lower_kinds(*now), 0
    for kind, lowered in kinds.items():
        text = lowered.compile().as_text()
        says = {(): "", (-1,): "_quiet", (0,): "_meets"}[kind]
        assert f"HloModule jit_train{says}," in text
        for row in read(text).computations.values():
            for one in row:
                if one.opcode in programs._KINDS:
                    sent += 1
                    assert "/oxs.meet/" in one.quoted["op_name"], one
    assert sent


def branch(flag, x, taken=loop):
    return lax.cond(flag, taken, lambda x: x, x)


@pytest.mark.parametrize(
    ("step", "conditional"),
    [
        (branch, [True]),
        (lambda flag, x: loop(branch(flag, x, lambda x: lax.psum(x, "d"))), [0, 1]),
        (lambda flag, x: jnp.where(flag, lax.psum(x, "d"), x), [False]),
    ],
)
def test_branches_are_conditional_and_loops_and_selects_are_not(step, conditional):
    step = on_mesh(step, mesh_of({"d": 8}))
    rows = audit.collectives(step, jnp.array(True), jnp.ones(3))
    assert sorted(row.conditional for row in rows) == conditional
    assert {row.kind for row in rows} == {"all-reduce"}


def test_groups_are_those_of_a_mesh_axis_and_of_index_groups():
    groups = [[0, 3], [1, 2]]

    def step(x):
        of_axes = [lax.psum(x * i, axis) for i, axis in enumerate(("a", "b"), 1)]
        both, some = lax.psum(3 * x, ("a", "b")), {"axis_index_groups": groups}
        return *of_axes, both, lax.psum(5 * x, "a", **some)

    rows = audit.collectives(on_mesh(step, mesh_of({"a": 4, "b": 2})), jnp.ones(3))
    assert {row.groups for row in rows} == {
        ((0, 2, 4, 6), (1, 3, 5, 7)),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        EVERYONE,
        ((0, 6), (2, 4), (1, 7), (3, 5)),
    }


def test_islands_reduce_their_shard_over_the_worker_axis_in_the_branch():
    mesh = mesh_of({"w": 4, "fsdp": 2})

    def worker(count, x):
        x = lax.cond(count % 4 == 0, lambda x: lax.pmean(x, "w"), lambda x: x, x)
        return count + 1, x

    step = jax.vmap(
        worker, (None, 0), (None, 0), axis_name="w", spmd_axis_name="w", axis_size=4
    )
    x = jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P("w", "fsdp")))
    rows = audit.collectives(step, jnp.int32(0), x)
    workers = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert [row[:5] for row in rows] == [("all-reduce", 12, 1, workers, True)]


def scheduled(*lines, before=""):
    """A program of eight devices whose entry runs these instructions in this order."""
    return hlo(f"""
HloModule step, is_scheduled=true, num_partitions=8
{textwrap.dedent(before)}
ENTRY %main (p: bf16[16,4], t: token[]) -> f32[4] {{
  %p = bf16[16,4]{{1,0}} parameter(0)
  %t = token[] parameter(1)
  {
        '''
  '''.join(lines)
    }
  ROOT %last = f32[4] constant({{1,2,3,4}})
}}
""")


MATMUL = "%dot = f32[16,16] dot(%p, %p), lhs_contracting_dims={1}"
FUSION = "%fusion = bf16[16,4] fusion(%p), kind=kLoop, calls=%fused"
FUSED = """
%fused (p: bf16[16,4]) -> bf16[16,4] {
  %p = bf16[16,4] parameter(0)
  ROOT %n = bf16[16,4] negate(%p)
}
"""
RING = "{{0,1},{1,0}}"
# Kind, the lines that start it, those that wait for it, computations, groups.
PAIRS = {
    "own opcode": (
        "all-reduce",
        ["%s = bf16[16,4] all-reduce-start(%p), to_apply=%add"],
        ["%d = bf16[16,4] all-reduce-done(%s)"],
        "",
        EVERYONE,
    ),
    "operands with shapes": (
        "collective-permute",
        [
            "%s = (bf16[16,4], bf16[16,4], u32[], u32[]) collective-permute-start("
            f"bf16[16,4]{{1,0}} %p), source_target_pairs={RING}"
        ],
        [
            "%d = bf16[16,4] collective-permute-done("
            "(bf16[16,4], bf16[16,4], u32[], u32[]) %s)"
        ],
        "",
        ((0, 1), (1, 0)),
    ),
    "wrapped": (
        "reduce-scatter",
        ["%s = ((bf16[16,4]), bf16[2,4], s32[]) async-start(%p), calls=%wrapped"],
        [
            "%u = ((bf16[16,4]), bf16[2,4], s32[]) async-update(%s)",
            "%d = bf16[2,4] async-done(%u)",
        ],
        """
        %wrapped (p: bf16[16,4]) -> bf16[2,4] {
          %p = bf16[16,4] parameter(0)
          ROOT %r = bf16[2,4] reduce-scatter(%p), replica_groups={}, dimensions={0}
        }
        """,
        EVERYONE,
    ),
    "send and recv": (
        "send",
        [
            "%r = (bf16[16,4], u32[], token[]) recv(%t), channel_id=3",
            "%s = (bf16[16,4], u32[], token[]) send(%p, %t), channel_id=3, "
            f'frontend_attributes={{_xla_send_recv_source_target_pairs="{RING}"}}',
        ],
        [
            "%rd = (bf16[16,4], token[]) recv-done(%r), channel_id=3",
            "%sd = token[] send-done(%s), channel_id=3",
        ],
        "",
        ((0, 1), (1, 0)),
    ),
    "between slices": (
        "send",
        [
            "%s = (bf16[16,4], u32[], token[]) send(%p, %t), channel_id=2, "
            "is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous"
            '="all-reduce_0",_xla_megascale_target="{1,2}x{0:7}"}',
            "%r = (bf16[16,4], u32[], token[]) recv(%t), channel_id=1, "
            "is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous"
            '="all-reduce_0",_xla_megascale_target="{1,2}x{0:7}"}',
        ],
        ["%sd = token[] send-done(%s)", "%rd = (bf16[16,4], token[]) recv-done(%r)"],
        "",
        (),
    ),
}
MEANWHILE = {
    MATMUL: True,
    FUSION: True,
    "%c = f32[16,16] convolution(%p, %p), dim_labels=bf_io->bf": True,
    "%w = s32[] while(%p), condition=%fused, body=%fused": True,
    '%k = f32[16] custom-call(%p), custom_call_target="__gemm"': True,
    "%f = bf16[16,4] call(%p), to_apply=%calls": True,
    "%f = bf16[16,4] call(%p), to_apply=%fused": False,
    "%f = bf16[2,4] fusion(%p), kind=kCustom, calls=%only_scatters": False,
    '%k = bf16[16,4] custom-call(%p), custom_call_target="ConcatBitcast"': False,
    "%b = bf16[64] bitcast(%p)": False,
}
CALLED = f"""{FUSED}
%calls (p: bf16[16,4]) -> bf16[16,4] {{
  %p = bf16[16,4] parameter(0)
  ROOT {FUSION}
}}
%only_scatters (p: bf16[16,4]) -> bf16[2,4] {{
  %p = bf16[16,4] parameter(0)
  ROOT %r = bf16[2,4] reduce-scatter(%p), dimensions={{0}}
}}
"""


@pytest.mark.parametrize("form", PAIRS)
def test_an_asynchronous_pair_is_one_row_that_knows_what_is_computed_meanwhile(form):
    kind, starts, dones, before, groups = PAIRS[form]

    def overlapped(*lines):
        (row,) = scheduled(*lines, before=FUSED + textwrap.dedent(before))
        assert row[:5] == (kind, 128, 1, groups, False)
        return row.overlapped

    assert overlapped(*starts, MATMUL, *dones) is True
    assert overlapped(*starts, *dones) is False
    assert overlapped(MATMUL, *starts, *dones, FUSION) is False
    # Waited for in another computation: nothing can be said.
    assert overlapped(*starts, MATMUL) is None


@pytest.mark.parametrize("line", MEANWHILE)
def test_what_a_collective_can_hide_behind(line):
    kind, starts, dones, _, _ = PAIRS["own opcode"]
    rows = scheduled(*starts, line, *dones, before=CALLED)
    (row,) = (row for row in rows if row.kind == kind)
    assert row.overlapped is MEANWHILE[line]


def test_a_send_is_waited_for_where_its_recv_is():
    _, starts, (recv_done, send_done), _, _ = PAIRS["send and recv"]
    (row,) = scheduled(*starts, send_done, MATMUL, recv_done)
    assert row.overlapped is True
    (row,) = scheduled(*starts, recv_done, MATMUL, send_done)
    assert row.overlapped is False
    for start, other in (starts, starts[::-1]):
        (row,) = scheduled(start, MATMUL, other, recv_done, send_done)
        assert row.overlapped is False
    # Without a recv of this channel it waits for itself.
    first, then = starts
    other = first.replace("channel_id=3", "channel_id=4")
    (row,) = scheduled(other, then, recv_done, MATMUL, send_done)
    assert row.overlapped is True


def test_what_goes_to_the_host_and_a_synchronous_collective():
    rows = scheduled(
        "%s = (bf16[16,4], u32[], token[]) send(%p, %t), is_host_transfer=true",
        "%sd = token[] send-done(%s)",
        "%r = (bf16[16,4], u32[], token[]) recv(%t), is_host_transfer=true",
        "%rd = (bf16[16,4], token[]) recv-done(%r)",
        "%a = bf16[16,4] all-reduce(%p), to_apply=%add",
        MATMUL,
    )
    assert rows == [Collective("all-reduce", 128, 1, EVERYONE, False, None)]


@pytest.mark.parametrize("computed", [True, False])
def test_a_collective_in_pieces_that_are_fused_with_what_is_computed(computed):
    gather = (
        "%g = bf16[128,4] all-gather(%p), replica_groups={}, dimensions={0}, "
        'frontend_attributes={chain_id="CHAIN"}'
    )
    piece = """
    %PIECE.CHAIN (p: bf16[16,4]) -> bf16[16,4] {
      %p = bf16[16,4] parameter(0)
      GATHER
      ROOT %c = bf16[16,4] OPERATION
    }
    """
    operations = {
        "start": 'custom-call(%g), custom_call_target="AsyncCollectiveStart"',
        "step": "convolution(%p, %p)" if computed else "bitcast(%p)",
        "done": 'custom-call(%g), custom_call_target="AsyncCollectiveDone"',
    }
    # The first of two such chains; the other one follows it at once.
    before = "".join(
        piece.replace("GATHER", gather)
        .replace("PIECE", name)
        .replace("OPERATION", operation)
        .replace("CHAIN", chain)
        for chain in "01"
        for name, operation in operations.items()
    )
    call = "%{0}.{1} = bf16[16,4] fusion(%p), kind=kCustom, calls=%{0}.{1}"
    first, second = (
        [call.format(name, chain) for name in operations] for chain in "01"
    )
    rows = scheduled(*first, second[0], second[2], before=before)
    assert [row.overlapped for row in rows] == [computed, False]
    assert {row[:5] for row in rows} == {("all-gather", 128, 1, EVERYONE, False)}


def test_asynchronous_pairs_count_once_in_gpu_spelling():
    rows = hlo("""
    HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=8

    %add (x: f32[], y: f32[]) -> f32[] {
      %x = f32[] parameter(0)
      %y = f32[] parameter(1)
      ROOT %sum = f32[] add(f32[] %x, f32[] %y)
    }

    %async_computation (param_0: bf16[16,4]) -> bf16[2,4] {
      %param_0 = bf16[16,4]{1,0} parameter(0)
      ROOT %reduce-scatter.1 = bf16[2,4]{1,0} reduce-scatter(bf16[16,4]{1,0} %param_0), channel_id=2, replica_groups={}, dimensions={0}, to_apply=%add
    }, execution_thread="parallel"

    ENTRY %main (p.0: f32[4], p.1: bf16[16,4], p.2: f32[2]) -> f32[4] {
      %p.0 = f32[4]{0} parameter(0), metadata={op_name="all-gather(%p), replica_groups={{0}}" source_file="a \\"b\\" = f32[1] all-reduce(%x)"}
      %p.1 = bf16[16,4]{1,0} parameter(1)
      %p.2 = f32[2]{0} parameter(2)
      %all-reduce-start = (f32[4]{0}, f32[2]{0}) all-reduce-start(f32[4]{0} %p.0, f32[2]{0} %p.2), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%add, backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false}}
      %all-reduce-done = (f32[4]{0}, f32[2]{0}) all-reduce-done((f32[4]{0}, f32[2]{0}) %all-reduce-start)
      %all-gather-start = (f32[4]{0}, f32[32]{0}) all-gather-start(f32[4]{0} %p.0), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
      %all-gather-done = f32[32]{0} all-gather-done((f32[4]{0}, f32[32]{0}) %all-gather-start)
      %collective-permute-start = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(f32[2]{0} %p.2), channel_id=4, source_target_pairs={{0,1},{1,0}}
      %collective-permute-done = f32[2]{0} collective-permute-done((f32[2]{0}, f32[2]{0}, u32[], u32[]) %collective-permute-start)
      %async-start = ((bf16[16,4]{1,0}), bf16[2,4]{1,0}) async-start(bf16[16,4]{1,0} %p.1), async_execution_thread="parallel", calls=%async_computation
      %async-done = bf16[2,4]{1,0} async-done(((bf16[16,4]{1,0}), bf16[2,4]{1,0}) %async-start)
      ROOT %out = f32[4]{0} get-tuple-element((f32[4]{0}, f32[2]{0}) %all-reduce-done), index=0
    }
    """)  # noqa: E501
    assert rows == [
        Collective("reduce-scatter", 128, 1, EVERYONE, False, False, 0),
        Collective("all-reduce", 24, 2, ((0, 2, 4, 6), (1, 3, 5, 7)), False, False, 0),
        Collective("all-gather", 16, 1, EVERYONE, False, False, 0),
        Collective("collective-permute", 8, 1, ((0, 1), (1, 0)), False, False, 0),
    ]


def test_branches_fusions_and_tiled_layouts_in_tpu_spelling():
    rows = hlo("""
    HloModule jit_step, num_partitions=4

    %fused_computation (p: bf16[8,128]) -> bf16[2,128] {
      %p = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
      ROOT %all-reduce.7 = bf16[8,128]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
    }

    %shared (p: s4[7]) -> s4[7] {
      %p = s4[7]{0:T(128)E(4)} parameter(0)
      ROOT %collective-broadcast = s4[7]{0:T(128)E(4)} collective-broadcast(%p), replica_groups={{0,1,2,3}}
    }

    %taken (t: (bf16[8,128], s4[7])) -> (bf16[2,128], s4[7]) {
      %t = (bf16[8,128]{1,0:T(8,128)(2,1)}, /*index=1*/s4[7]{0}) parameter(0)
      %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=0
      %y = s4[7]{0} get-tuple-element(%t), index=1
      %all-reduce-scatter = bf16[2,128]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation
      %called = s4[7]{0} call(%y), to_apply=%shared
      ROOT %r = (bf16[2,128]{1,0}, s4[7]{0}) tuple(%all-reduce-scatter, %called)
    }

    %other (t: pred[9]) -> pred[9] {
      %t = pred[9]{0} parameter(0)
      %all-to-all-start = ((pred[9]{0}), pred[9]{0}) all-to-all-start(%t), replica_groups={{0,1,2,3}}, dimensions={0}
      ROOT %all-to-all-done = pred[9]{0} all-to-all-done(%all-to-all-start)
    }

    ENTRY %main (flag: pred[], t: (bf16[8,128], s4[7]), o: pred[9], f: f8e4m3fn[3,5]) -> s4[7] {
      %flag = pred[] parameter(0)
      %t = (bf16[8,128]{1,0}, s4[7]{0}) parameter(1)
      %o = pred[9]{0} parameter(2)
      %f = f8e4m3fn[3,5]{1,0} parameter(3)
      %taken = f8e4m3fn[3,5]{1,0} all-reduce(%f), to_apply=%add
      %c = (bf16[2,128]{1,0}, s4[7]{0}) conditional(%flag, %t, %o), true_computation=%taken, false_computation=%other, control-predecessors={%taken}
      %y = s4[7]{0} get-tuple-element(%t), index=1
      ROOT %z = s4[7]{0} call(%y), to_apply=%shared, control-predecessors={%taken}
    }
    """)  # noqa: E501
    everyone = ((0, 1, 2, 3),)
    assert [row.branch for row in rows] == [(("c", 1),), (), (("c", 0),), ()]
    assert [row._replace(branch=()) for row in rows] == [
        Collective("all-reduce", 2 * 8 * 128, 1, ((0, 1), (2, 3)), True),
        Collective("collective-broadcast", 4, 1, everyone, False),
        Collective("all-to-all", 9, 1, everyone, True, False, 0),
        Collective("all-reduce", 15, 1, everyone, False),
    ]


def test_branch_computations_through_a_while_body():
    rows = hlo("""
    HloModule jit_step
    body {
      p = f32[<=6] parameter(0)
      ROOT r = f32[<=6] all-reduce(p), replica_groups={{1,0}}
    }
    condition {
      p = f32[<=6] parameter(0)
      ROOT r = pred[] constant(true)
    }
    first {
      p = f32[<=6] parameter(0)
      ROOT r = f32[<=6] while(p), condition=condition, body=body
    }
    second {
      ROOT p = f32[<=6] parameter(0)
    }
    never {
      p = f32[<=6] parameter(0)
      ROOT r = f32[<=6] all-gather(p), replica_groups={{1,0}}
    }
    ENTRY main {
      p = f32[<=6] parameter(0)
      i = s32[] constant(0)
      ROOT r = f32[<=6] conditional(i, p, p), branch_computations={first, second}
    }
    """)
    expected = Collective("all-reduce", 24, 1, ((1, 0),), True, times=None)
    assert rows == [expected._replace(branch=(("r", 0),))]


def test_an_asynchronous_wrapper_printed_beside_its_computation_counts_once():
    rows = hlo("""
    HloModule jit_step
    wrapped {
      p = f32[6] parameter(0)
      ROOT r = f32[6] all-to-all(p), replica_groups={{0,1}}
    }
    ENTRY main {
      p = f32[6] parameter(0)
      s = ((f32[6]), f32[6]) all-to-all-start(p), calls=wrapped
      ROOT d = f32[6] all-to-all-done(s)
    }
    """)
    assert rows == [Collective("all-to-all", 24, 1, ((0, 1),), False, False, 0)]


def test_what_a_program_starts_itself_is_a_custom_call_until_it_is_compiled():
    """As `psum_start` and `ppermute_start` of JAX 0.12 are given to XLA."""
    rows = hlo("""
    HloModule jit_step

    body {
      x = f32[4,16] parameter(0)
      s = f32[4,16] custom-call(x), custom_call_target="all-reduce-start", called_computations={add}, frontend_attributes={async_collective_config={"replica_groups": [[0, 2], [1, 3]], "use_global_device_ids": true, "channel_id": 1}}
      y = f32[4,4] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
      d = f32[4,16] custom-call(s), custom_call_target="all-reduce-done"
      p = f32[4,4] custom-call(y), custom_call_target="collective-permute-start", frontend_attributes={async_collective_config={"permutation": [[0, 2], [2, 0]], "channel_id": 2}}
      e = f32[4,4] custom-call(p), custom_call_target="collective-permute-done"
      ROOT r = (f32[4,16], f32[4,4]) tuple(d, e)
    }
    ENTRY main {
      x = f32[4,16] parameter(0)
      ROOT r = (f32[4,16], f32[4,4]) call(x), to_apply=body
    }
    """)  # noqa: E501
    assert rows == [
        Collective("all-reduce", 256, 1, ((0, 2), (1, 3)), False, True, 1),
        Collective("collective-permute", 64, 1, ((0, 2), (2, 0)), False, False, 0),
    ]


def test_groups_of_meshes_over_permuted_devices_are_those_of_the_arrays():
    devices = jax.devices()
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    mesh = jax.sharding.Mesh(
        [[devices[i] for i in order[:4]], [devices[i] for i in order[4:]]],
        ("w", "f"),
        axis_types=(AxisType.Auto,) * 2,
    )
    step = jax.vmap(lambda x: lax.pmean(x, "w"), axis_name="w", spmd_axis_name="w")
    x = jax.device_put(jnp.ones((2, 4)), NamedSharding(mesh, P("w", "f")))
    (row,) = audit.collectives(step, x)
    assert row.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['a'=4,'b'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2] {'b','a'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        (
            "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'a'}", ((3, 0), (1, 2))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_written_groups(written, groups):
    (row,) = hlo(f"""
    ENTRY main {{
      p = f32[6] parameter(0)
      ROOT r = f32[6] all-reduce(p), replica_groups={written}, to_apply=a
    }}
    """)
    assert row.groups == groups


def module(dtype="f32", operand="p", groups="{{0,1}}"):
    return hlo(f"""
    ENTRY main {{
      p = {dtype}[6] parameter(0)
      ROOT r = {dtype}[6] all-reduce({operand}), replica_groups={groups}
    }}
    """)


test_what_cannot_be_read_is_an_error = all_refused(globals())(r"""
module(operand="q")  # ValueError: does not define operand 'q'
module(dtype="quad")  # ValueError: unknown element type 'quad'
module(groups="@mesh")  # ValueError: device groups of 'r'
""")


def test_table_adds_up():
    text = audit.table(
        [
            Collective("all-reduce", 4096, 3, ((0, 1), (2, 3)), True),
            Collective("collective-permute", 512, 1, ((0, 1), (1, 0)), False),
        ]
    )
    lines = text.splitlines()
    assert lines[1].split() == ["all-reduce", "4096", "3", "2", "x", "2", "yes"]
    assert lines[2].split()[3:] == ["2", "pairs", "no"]
    assert lines[3].split()[:3] == ["total", "4608", "4"]
    assert lines[3].endswith("4096 bytes in conditionals")
    assert len({line.index("  ") for line in lines[1:2]}) == 1


def test_table_says_what_overlaps_where_anything_is_known():
    rows = [
        Collective("send", 512, 1, (), False, True),
        Collective("all-gather", 64, 1, ((0, 1),), True, False),
        Collective("all-reduce", 8, 2, ((0, 1),), False),
    ]
    lines = audit.table(rows).splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["yes", "no", "no"]
    column = lines[0].index("overlapped")
    assert [line[column:] for line in lines] == [
        "overlapped",
        "yes",
        "no",
        "",
        "512 bytes overlapped",
    ]
    assert "not said" in lines[1]
    assert "overlapped" not in audit.table(rows[2:])
