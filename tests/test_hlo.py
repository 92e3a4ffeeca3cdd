import textwrap

import jax
import jax.numpy as jnp
import pytest

from benchmarks import by_hand
from optx_sync.audit import hlo

MODULE = textwrap.dedent("""
    HloModule jit_step, is_scheduled=true, replica_count=2, num_partitions=4

    %fused (p: f32[4,4]) -> f32[4,4] {
      %p = f32[4,4]{1,0} parameter(0)
      ROOT %c = f32[4,4]{1,0} copy(%p)
    }
    %add (x: f32[], y: f32[]) -> f32[] {
      %x = f32[] parameter(0)
      %y = f32[] parameter(1)
      ROOT %sum = f32[] add(%x, %y)
    }
    %body (t: f32[4,4]) -> f32[4,4] {
      %t = f32[4,4]{1,0} parameter(0)
      ROOT %b = f32[4,4]{1,0} negate(%t)
    }
    %quiet (t: (f32[4,4])) -> (f32[4,4]) {
      %a = f32[4,4]{1,0} copy(%t)
      ROOT %r = (f32[4,4]{1,0}) tuple(%a)
    }
    %round.1 (t: (f32[4,4])) -> (f32[4,4]) {
      %a = (f32[4,4]{1,0}, bf16[15]{0}) fusion(%t), kind=kLoop, calls=%fused
      %w = f32[4,4]{1,0} while(%t), condition=%never_defined, body=%body
      ROOT %r = f32[1,16]{1,0} fusion(%a), kind=kLoop, calls=%fused
    }
    %unused (t: f32[4]) -> f32[4] {
      ROOT %a = f32[4]{0} copy(%t)
    }
    ENTRY %main (p: f32[4,4]) -> f32[4,4] {
      %f = f32[4,4]{1,0} fusion(%p), calls=%fused, metadata={op_name="%unused = ("}
      %k = f32[4]{0} custom-call(%p), custom_call_target="a \\"b\\" {c}", api_version=2
      %s = f32[] reduce(%f), dimensions={0,1}, to_apply=%add
      %c = (f32[4,4]{1,0}) conditional(%i, %f, %f), BRANCHES
      ROOT %o = f32[4,4]{1,0} copy(%c)
    }
""")
OUTSIDE = ["fusion", "custom-call", "reduce", "conditional", "copy"]
QUIET, ROUND = ["copy", "tuple"], ["fusion", "while", "fusion"]
LOOP = ["parameter", "negate"]


@pytest.fixture(
    params=[
        "branch_computations={%quiet, %round.1}",
        "true_computation=%round.1, false_computation=%quiet",
        "false_computation=%quiet, true_computation=%round.1",
    ]
)
def program(request):
    return hlo.read(MODULE.replace("BRANCHES", request.param))


@pytest.mark.parametrize(
    ("branches", "inside"),
    [
        ("every", LOOP + QUIET + ROUND),
        ("none", []),
        (0, QUIET),
        (1, LOOP + ROUND),
        (5, LOOP + ROUND),
    ],
)
def test_what_is_written_in_which_branch(program, branches, inside):
    opcodes = [instruction.opcode for instruction in by_hand.written(program, branches)]
    assert opcodes == inside + OUTSIDE


def test_what_is_reached(program):
    outside = {"main", "fused", "add"}
    assert hlo.reached(program, "none") == outside
    assert hlo.reached(program) == outside | {"quiet", "round.1", "body"}
    assert hlo.reached(program, fused=False) == {"main", "quiet", "round.1", "body"}


def test_computations_and_instructions(program):
    assert program.entries == ["main"]
    assert program.devices == 8
    call = program.computations["main"][1]
    assert call.quoted == {"custom_call_target": r"a \"b\" {c}"}
    assert call.operands == ("%p",)
    fusion = program.computations["round.1"][0]
    assert fusion.arrays == [("f32", (4, 4), 64), ("bf16", (15,), 30)]
    main = program.computations["main"]
    assert hlo.operands(main[2], main) == [("f32", (4, 4), 64)]


def test_a_compiled_program_and_what_was_given_to_the_compiler():
    double = jax.jit(lambda x, y: (2 * x, x.sum()), donate_argnums=0)
    arguments = jnp.ones((64, 64), jnp.bfloat16), jnp.ones(3)
    compiled = double.lower(*arguments).compile()
    for memory in (by_hand.memory(compiled), by_hand.memory(double, *arguments)):
        assert memory.aliased == 2 * 64 * 64
        # The second argument is not used.
        assert memory.arguments == memory.aliased
        assert 2 < memory.outputs - memory.aliased < 100
    program = hlo.program(compiled)
    assert program.computations[program.entries[0]]
    text = double.lower(*arguments).as_text("hlo")
    reductions = [i for i in by_hand.written(hlo.read(text)) if i.opcode == "reduce"]
    assert len(reductions) == 1


@pytest.mark.parametrize("ask", [hlo.program, by_hand.memory])
def test_what_is_not_a_program_is_refused(ask):
    with pytest.raises(TypeError, match="got 3"):
        ask(3)
    with pytest.raises(TypeError, match="compiled already"):
        ask(jax.jit(lambda x: x).lower(1.0), 1.0)

    class Silent:
        def as_text(self):
            return None

        memory_analysis = as_text

    with pytest.raises(TypeError, match=r"this backend|expected string"):
        ask(Silent())
