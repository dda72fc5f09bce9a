"""Where ranges of versions begin and end, and needs of which one is enough."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from attnroute.engine.decide import decide
from attnroute.engine.evaluate import missing_needs
from attnroute.errors import TableError
from attnroute.question.host import Host
from attnroute.question.line.reading import parse
from attnroute.tables.alternatives import alternatives, is_well_formed, names_in
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.points import end_of, points
from attnroute.tables.read import shipped_folder
from attnroute.tables.versions import contains

LONG = parse("bf16 b1 hq8 sq1024 d128")
NUMBERS = [f"1.{minor}.{patch}" for minor in range(4) for patch in range(3)]
TERMS = st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.sampled_from(NUMBERS))


def tables_with(tmp_path_factory, ranges):
    folder = tmp_path_factory.mktemp("tables")
    (folder / "sm_90").mkdir()
    text = "".join(
        f'[[rule]]\nname = "row-{i}"\nversions = {{ thing = "{said}" }}\nrequires = "never"\n'
        'because = "of the test"\nevidence = [{ kind = "own", ref = "this test" }]\n'
        for i, said in enumerate(ranges)
    )
    (folder / "sm_90" / "flash.toml").write_text(text, encoding="utf-8")
    return Tables((shipped_folder(), folder))


@given(ranges=st.lists(st.lists(TERMS, min_size=1, max_size=2), min_size=1, max_size=3))
def test_between_two_points_no_range_changes(tmp_path_factory, ranges):
    texts = [", ".join(operator + number for operator, number in terms) for terms in ranges]
    found = points(tables_with(tmp_path_factory, texts), "sm_90", "flash", "thing")
    assert list(found) == sorted(set(found))
    stretches = {}
    for number in NUMBERS:
        below = [point for point in found if point <= Version(number)]
        inside = tuple(contains(text, "thing", number) for text in texts)
        stretches.setdefault(below[-1] if below else None, set()).add(inside)
    assert all(len(inside) == 1 for inside in stretches.values())


def test_a_term_about_a_development_release_is_a_point_of_its_own(tmp_path_factory):
    tables = tables_with(tmp_path_factory, [">4.6.0.dev0, <4.6.2", "==4.6.0.dev0"])
    found = [str(point) for point in points(tables, "sm_90", "flash", "thing")]
    assert found == ["4.6.0.dev0", "4.6.0", "4.6.2"]


def test_only_known_versions_are_points():
    found = points(load(), "sm_90", "fa4", "flash-attn-4")
    known = load().backends["fa4"].versions_known["flash-attn-4"]
    assert found[0] == Version("4.0.0b3")
    assert all(contains(known, "flash-attn-4", str(point)) for point in found)
    assert points(load(), "sm_90", "fa4", "transformers") == ()


@pytest.mark.parametrize(
    ("ranges", "end"),
    [
        (">=2.5, <2.16", "2.16"),
        (">=2.5, <=2.15.0", "2.15.1"),
        ([">=1, <2", ">=3, <4"], "4"),
        ([">=1, <2", ">=3"], None),
        ("==2.8.3", "2.8.4"),
        (">=2.5", None),
        (">=1, <3, <2", "2"),
        (">=4.6.0, <=4.7.0.dev0", "4.7.0"),
        ("===4.6.0", "4.6.1"),
    ],
)
def test_the_end_of_ranges(ranges, end):
    assert end_of("torch", ranges) == (None if end is None else Version(end))


def test_a_beta_is_followed_by_the_next_one():
    assert end_of("flash-attn-4", "<=4.0.0b36") == Version("4.0.0b37")


@pytest.mark.parametrize(
    ("need", "names"),
    [("torch", ("torch",)), ("flash-attn-3 | xformers", ("flash-attn-3", "xformers")), ("c++", ("c++",))],
)
def test_a_need_names_one_or_several(need, names):
    assert alternatives(need) == names
    assert is_well_formed(need)


def test_every_name_of_several_needs_is_given_once():
    assert names_in(["torch", "a | b", "b", "torch"]) == ("torch", "a", "b")


@pytest.mark.parametrize("need", ["", "a|b", "a |b", "a | ", "a | a", "Torch", "a, b", "a or b", " a"])
def test_a_need_that_is_written_otherwise_is_seen(need):
    assert not is_well_formed(need)


@pytest.mark.parametrize(
    ("versions", "broken", "status"),
    [
        ({"xformers": "0.0.34"}, {}, "eligible"),
        ({"xformers": "0.0.99"}, {}, "unknown"),
        ({"flash-attn-3": "3.0.0", "xformers": "0.0.99"}, {}, "eligible"),
        ({"flash-attn-3": "3.0.0b1", "xformers": "0.0.34"}, {}, "unknown"),
        ({"flash-attn-3": "3.0.0b1", "xformers": "0.0.34"}, {"flash-attn-3": "no kernels"}, "eligible"),
    ],
)
def test_of_alternatives_the_first_that_is_there_must_be_a_known_one(versions, broken, status):
    host = Host(arch="sm_90", versions={"torch": "2.11.0", **versions}, broken=broken)
    assert decide(LONG, host).verdict("fa3").status == status


@pytest.mark.parametrize(
    ("versions", "broken", "is_missing"),
    [
        ({}, {}, True),
        ({"flash-attn-3": "3.0.0"}, {}, False),
        ({"xformers": "0.0.34"}, {}, False),
        ({"flash-attn-3": "3.0.0", "xformers": "0.0.34"}, {"flash-attn-3": "no kernels"}, False),
        ({"flash-attn-3": "3.0.0"}, {"flash-attn-3": "no kernels"}, True),
        ({"flash-attn-3": "3.0.0", "xformers": "0.0.34"}, {"flash-attn-3": "x", "xformers": "y"}, True),
        ({"flash-attn-3": "3.0.0"}, {"xformers": "no FA3 in it"}, False),
    ],
)
def test_one_of_several_alternatives_is_enough_unless_it_is_broken(versions, broken, is_missing):
    host = Host(arch="sm_90", versions={"torch": "2.11.0", **versions}, broken=broken)
    missing = missing_needs(host, load().backends["fa3"])
    assert missing == (("flash-attn-3 | xformers",) if is_missing else ())


def test_a_package_whose_releases_nobody_lists_cannot_be_open_ended(tmp_path):
    folder = tmp_path / "tables"
    shutil.copytree(shipped_folder(), folder)
    path = folder / "any" / "fa4.toml"
    text = path.read_text(encoding="utf-8")
    changed = text.replace("versions_known = {", 'versions_known = { cuda = ">=12, <untested",')
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(TableError, match=r"releases.toml: untested requires the first release of cuda"):
        _ = Tables((folder,)).backends
