"""`oxs.citation`: the references of docstrings as BibTeX, of all that a `tx` is of."""

import ast
import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs
from optx_sync import runtime
from optx_sync.audit import citation
from tests.cases import OPTIMIZERS
from tests.transformations import CENTERS, EXCHANGES, GRAPHS, made

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
OPTAX = "deepmind2020deepmind"
MADE = made()
# Docstrings with references, by where they stand.
DOCS = {
    f"{path.relative_to(ROOT)}, {getattr(node, 'name', 'module')}": doc
    for path in sorted((ROOT / "optx_sync").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, DOCUMENTED)
    if "\nReference" in (doc := ast.get_docstring(node) or "")
}


def entries(text):
    """(kind, key) and fields of each entry, as BibTeX reads them."""
    found = {}
    text = re.sub(r"^%.*\n?", "", text, flags=re.MULTILINE)
    while text := text.strip():
        kind, key = re.match(r"@(\w+)\{(\w+),\n", text).groups()
        assert key not in found
        ends = [place for place, sign in enumerate(text, 1) if sign == "}"]
        end = next(x for x in ends if text[:x].count("{") == text[:x].count("}"))
        inside = text[: end - 1].partition(",\n")[2]
        fields = re.findall(r"^  (\w+) = \{(.*)\},$", inside, re.MULTILINE)
        assert inside.count("\n") == len(fields) == len(dict(fields)), inside
        found[key] = {"kind": kind, **dict(fields)}
        text = text[end:]
    return found


def keys(*parts):
    return list(entries(oxs.citation(*parts)))[1:]


def own(method):
    return [one.key for one in citation.references(inspect.getdoc(method))]


@pytest.mark.parametrize("where", DOCS)
def test_every_reference_has_the_one_form(where):
    found = citation.references(DOCS[where])
    text = " ".join(DOCS[where].partition("\nReferences:\n")[2].split())
    # All of the section is read, and each quoted title is one of a reference.
    assert [f'"{one.title}"' for one in found] == re.findall(r'"[^"]*"', text)
    for one in found:
        of_arxiv = re.fullmatch(r"arXiv \d{4}\.\d{4,5}", one.where or "")
        assert bool(of_arxiv) == ("arxiv" in (one.where or "").lower()), one


def test_the_entries_of_all_are_one_file():
    every, seen = {}, set()
    for one in (x for doc in DOCS.values() for x in citation.references(doc)):
        assert every.setdefault(one.key, one) == one  # two papers would share a key
        seen.add(one.title)
    assert len(every) == len(seen) > 45
    text = "\n\n".join(one.bibtex("misc", key) for key, one in every.items())
    found = entries(text)
    assert found.keys() == every.keys()
    for fields in found.values():
        assert fields["title"] and fields["author"] and int(fields["year"]) > 1900
        assert not re.search(r"(?<!\\)[#$%&_]|et al|\"", fields["author"])


def test_a_reference_of_another_form_is_refused():
    doc = 'One.\n\nReferences:\n    Stich, "Local SGD", 2018. Lin et al., 2018.'
    with pytest.raises(ValueError, match=r"as `Authors, .* got Lin et al., 2018\."):
        citation.references(doc)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_an_optimizer_is_known(case):
    assert keys(case.make()) == own(getattr(oxs.optimizers, case.name))
    assert own(getattr(oxs.optimizers, case.name))


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_is_known_alone_and_inside(name):
    method = getattr(oxs.exchange, name)
    for number, one in enumerate(EXCHANGES[name]):
        assert {*own(method)} <= {*keys(one)}
        for wrapper in ("cross_shard", "diloco"):
            found = keys(MADE[f"{wrapper}, {name} {number}"])
            assert {*found} == {*keys(one), *own(getattr(oxs, wrapper)), OPTAX}
    [first, *_] = EXCHANGES[name]
    if name not in ("rotated", "power_sgd", "error_feedback"):  # made of several
        assert {*keys(first)} - {OPTAX} == {*own(method)}


@pytest.mark.parametrize("name", CENTERS)
def test_a_center_rule_is_known_and_no_other_one(name):
    inner = oxs.optimizers.gradient_descent(0.1)
    found = keys(CENTERS[name](inner, "workers"))
    assert {*found} - {OPTAX} == {*own(getattr(oxs, name)), "robbins1951stochastic"}
    injected = optax.inject_hyperparams(oxs.diloco, static_args=("axis_name",))
    assert {*own(oxs.diloco)} < {*keys(injected(inner, "workers"))}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_known_by_the_wrapper_around_it(name):
    graph = own(getattr(oxs.graphs, name))
    assert {*graph, *own(oxs.gossip)} <= {*keys(MADE[f"gossip, {name}"])}
    others = {x for other in GRAPHS for x in own(getattr(oxs.graphs, other))}
    assert others & {*keys(MADE[f"gossip, {name}"])} == {*graph}


def test_all_parts_of_a_nested_transformation():
    coded = oxs.exchange.error_feedback(oxs.exchange.top_k(64, bits=2), 0.95)
    pods = oxs.diloco(
        oxs.cross_shard(oxs.optimizers.adam(0.1), "hosts"),
        "pods",
        outer=oxs.outer.delayed_nesterov(0.7, 0.9, 4),
        exchange=coded,
        fragments=oxs.rules.strided(4),
    )
    tx = optax.chain(oxs.clip_by_global_norm(1.0, ("hosts", "pods")), pods)
    methods = [oxs.clip_by_global_norm, oxs.diloco, oxs.optimizers.adam]
    methods += [oxs.outer.delayed_nesterov, oxs.rules.strided]
    methods += [oxs.exchange.error_feedback, oxs.exchange.top_k]
    assert {*keys(tx)} == {key for one in methods for key in own(one)} | {OPTAX}
    both = {*own(oxs.diloco), *own(oxs.local_sgd), OPTAX}
    assert {*keys(MADE["nested"])} == both
    assert {*own(oxs.outer.qsr)} < {*keys(MADE["diloco, qsr"])}
    assert {*own(oxs.noloco), *own(oxs.gossip)} < {*keys(MADE["noloco"])}
    feedback = oxs.exchange.error_feedback, oxs.exchange.quantized
    coded = {key for one in (oxs.sync_replicas, *feedback) for key in own(one)}
    assert {*keys(MADE["sync_replicas, coded"])} == coded | {OPTAX}


def test_methods_themselves_and_several_parts():
    found = keys(oxs.simulate.decoupled, oxs.exchange.krum(1), oxs.rules.agn)
    expected = [*own(oxs.simulate.decoupled), *own(oxs.exchange.krum), *own(oxs.agn)]
    assert {*found} - {OPTAX} == {*expected}
    # Agreements of a run that hold numbers alone.
    assert keys(runtime.SyncReplicas(3)) == own(oxs.sync_replicas)
    assert keys(runtime.quorum(2)) == own(oxs.simulate.decoupled)


def test_what_is_not_known_is_said_and_what_has_no_program_is_refused():
    def update(updates, state, params=None):
        return updates, state

    own_one = optax.GradientTransformation(lambda params: (), update)
    text = oxs.citation(oxs.local_sgd(own_one, "workers"))
    said = re.findall(r"^% Not known here: .*\.(\S+) of (.*)$", text, re.MULTILINE)
    assert said == [("<lambda>", __name__), ("update", __name__)]
    assert "stich2018local" in entries(text)
    assert "%" not in oxs.citation(oxs.local_sgd(optax.adam(0.1), "workers"))
    for part in (oxs.local_sgd(own_one, "workers").init(jnp.zeros(2)), 3, "diloco"):
        with pytest.raises(TypeError, match=r"finds programs; got .* oxs.citation\(tx"):
            oxs.citation(part)


def test_the_library_is_cited_as_its_file_says():
    [key, fields], *_ = entries(oxs.citation(optax.sgd(0.1))).items()
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    cited = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert (key, fields["kind"]) == ("optx_sync", "software")
    assert fields["title"].replace("\\", "")[1:-1] == cited["title"].strip('"')
    assert fields["author"].replace("\\", "")[1:-1] == cited["  - name"]
    assert fields["year"] == cited["date-released"][:4]
    assert fields["version"] == cited["version"] == oxs.__version__
