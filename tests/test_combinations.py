"""Any two options work together, or a message says why not; the page lists these."""

import inspect

import pytest

import optx_sync as oxs
from tests.combinations import PAGE, WRAPPERS, section

# What changes numbers or dtypes and nothing else, or belongs to one rule.
LEFT_OUT = {
    *("inner", "axis_name", "accumulator_dtype", "reduce_extra_args", "seed"),
    "equal_extra_args",
    *("rule", "replicas_to_aggregate", "total_num_replicas", "variables_to_average"),
}


@pytest.mark.parametrize("title", WRAPPERS)
def test_every_pair_is_tried_and_the_page_lists_who_is_refused(title):
    """`python -m tests.combinations` writes the page."""
    wrapper, _, options = WRAPPERS[title]
    wrapper = oxs.center_variable if wrapper is oxs.diloco else wrapper
    tried = {name for option in options.values() for name in option.keywords}
    assert not set(inspect.signature(wrapper).parameters) - tried - LEFT_OUT
    assert section(title) in PAGE.read_text()
