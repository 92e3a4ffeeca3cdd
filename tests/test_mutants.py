"""Each deliberate break has its one place, also where code has moved."""

import ast
import re

import pytest

from tests import mutants

ALL = [mutant for table in mutants.MUTANTS.values() for mutant in table]


def test_each_break_has_one_place_and_changes_it():
    package = mutants.ROOT / "optx_sync"
    for mutant in ALL:
        place = mutants.target(package, mutant)
        assert not mutants.same(mutants.parsed(mutant.old), mutants.parsed(mutant.new))
        module, _, function = mutant.where.partition(":")
        # Where it says, so that a reader finds it.
        assert place.file == package.joinpath(*module.split(".")).with_suffix(".py")
        assert function in mutants.functions(place.file)[1], mutant.where


def test_the_tests_to_begin_with_are_there():
    named = {test for mutant in ALL for test in mutant.tests}
    for test in named.union(*mutants.TESTS.values()):
        file, _, name = test.partition("::")
        text = (mutants.ROOT / "tests" / file).read_text()
        # A test of refusals is a table: `test_refused = all_refused(...)`.
        assert re.search(rf"^(def )?{name}\b", text, re.M) if name else text, test


MODULE = """
def first(x):
    if x > 1:  # why
        x = call(x, 2,
                 flag=True)
    return x + 1

class Second:
    def third(self, y):
        return y + 1
"""


@pytest.mark.parametrize(
    "where, old, new, becomes",
    [
        ("a:first", "x > 1", "False", "if False:"),
        ("a:first", "flag=True", "flag=None", "call(x, 2, flag=None)"),
        ("a:first", "flag=True", "pass", "call(x, 2)"),
        ("a:first", "x = call(x, 2, flag=True)", "pass", "    pass\n"),
        ("moved:Second.third", "y + 1", "y", "return y\n"),
        ("moved:renamed", "y + 1", "y", "return y\n"),
    ],
)
def test_code_is_found_by_what_it_says(tmp_path, where, old, new, becomes):
    (tmp_path / "a.py").write_text(MODULE)
    place = mutants.target(tmp_path, mutants.Mutant(where, old, new))
    assert becomes in mutants.broken(place, new) + "\n"
    assert ast.unparse(place.tree) == ast.unparse(ast.parse(MODULE))


@pytest.mark.parametrize("old, times", [("z", 0), ("1", 4)])
def test_what_is_not_there_once_is_refused(tmp_path, old, times):
    (tmp_path / "a.py").write_text(MODULE)
    with pytest.raises(LookupError, match=f"found {times} times"):
        mutants.target(tmp_path, mutants.Mutant("a:", old, "y"))
