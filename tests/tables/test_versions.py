"""Version ranges: the traps of this field, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from attnroute.engine.decide import decide
from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.versions import comparable, contains, specifier, version_of

PARTS = st.lists(st.integers(0, 99), min_size=2, max_size=3).map(lambda parts: ".".join(map(str, parts)))
CALL = Call(
    dtype="bfloat16",
    batch=1,
    num_heads_q=8,
    num_heads_kv=8,
    seqlen_q=64,
    seqlen_kv=64,
    head_dim_qk=64,
    head_dim_v=64,
)


@pytest.mark.parametrize(
    ("distribution", "version", "compared"),
    [
        ("torch", "2.11.0", "2.11.0"),
        ("torch", "2.11.0+cu130", "2.11.0"),
        ("torch", "2.14.0a0", "2.14.0"),
        ("torch", "2.14.0a0+git0fe1a2b", "2.14.0"),
        ("torch", "2.15.0.dev20260922", "2.15.0"),
        ("torch", "2.15.0.dev20260922+cu132", "2.15.0"),
        ("torch", "2.9.0rc3", "2.9.0"),
        ("flash-attn", "2.8.3.post1", "2.8.3"),
        ("flash-attn", "2.8.3.post1+cu12torch2.8", "2.8.3"),
        ("cudnn", "9.10.2.21", "9.10.2"),
        ("cudnn", "9.19.0", "9.19.0"),
        ("nvidia-cudnn-frontend", "1.29.0.1", "1.29.0.1"),
        ("flash-attn-4", "4.0.0b36", "4.0.0"),
        ("flash-attn-4", "4.0.0b36+local", "4.0.0"),
        ("flash-attn-4", "4.0.0b11.dev3", "4.0.0"),
        ("flash-attn-4", "4.0.0", "4.0.0"),
    ],
)
def test_versions_are_compared_as(distribution, version, compared):
    assert str(comparable(distribution, version)) == compared


@pytest.mark.parametrize(
    ("ranges", "distribution", "version", "inside"),
    [
        # A nightly of 2.14 has what 2.14 has, so it is no 2.13 any more.
        (">=2.14", "torch", "2.14.0a0", True),
        ("<2.14", "torch", "2.14.0a0", False),
        (">=2.15", "torch", "2.15.0.dev20260922", True),
        # Numbers, not letters.
        (">=2.9, <2.14", "torch", "2.10.0+cu128", True),
        (">=12.8", "cuda", "12.10", True),
        # A post release is the release, a local part is nothing.
        ("==2.8.3", "flash-attn", "2.8.3.post1", True),
        ("<=2.8.3", "flash-attn", "2.8.3.post1", True),
        (">2.8.3", "flash-attn", "2.8.3.post1", False),
        ("==2.11.0", "torch", "2.11.0+cu130", True),
        # cuDNN's fourth number is a build.
        ("<=9.10.2", "cudnn", "9.10.2.21", True),
        (">9.10.2", "cudnn", "9.10.2.21", False),
        # flash-attn-4 has published only betas: they must be found, and in their own order.
        (">=4.0.0b11", "flash-attn-4", "4.0.0b36", True),
        (">=4.0.0b11", "flash-attn-4", "4.0.0b9", False),
        (">=4.0.0b11, <4.0.0b36", "flash-attn-4", "4.0.0b36", False),
        (">=4.0.0b11", "flash-attn-4", "4.0.0", True),
        # A term that names a development, pre- or post-release is about what was published under that name.
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.0.dev0", False),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.0.dev1", True),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.0rc1", True),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.0", True),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.0.post1", True),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.1.dev0", True),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.1+cu13", True),
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.5.9", False),
        # The plain term beside it still counts a nightly as its release.
        (">4.6.0.dev0, <4.6.2", "nvidia-cutlass-dsl", "4.6.2.dev0", False),
        ("==4.6.0.dev0", "nvidia-cutlass-dsl", "4.6.0.dev0", True),
        ("==4.6.0.dev0", "nvidia-cutlass-dsl", "4.6.0", False),
        ("!=4.6.0.dev0", "nvidia-cutlass-dsl", "4.6.0", True),
        (">=2.15.0.dev20260922", "torch", "2.15.0.dev20260921", False),
        (">=2.15.0.dev20260922", "torch", "2.15.0.dev20260922+cu132", True),
        (">=2.15.0.dev20260922", "torch", "2.15.0a0+git0fe1a2b", True),
        (">=2.15.0.dev20260922", "torch", "2.15.0", True),
        ("<2.9.0rc3", "torch", "2.9.0rc2", True),
        ("<2.9.0rc3", "torch", "2.9.0rc3", False),
        (">=2.8.3.post1", "flash-attn", "2.8.3", False),
        (">=2.8.3.post1", "flash-attn", "2.8.3.post1+cu12torch2.8", True),
        ("<2.8.3.post1", "flash-attn", "2.8.3", True),
        # So is one with three signs of equality.
        ("===2.8.3", "flash-attn", "2.8.3", True),
        ("===2.8.3", "flash-attn", "2.8.3+local", True),
        ("===2.8.3", "flash-attn", "2.8.3.post1", False),
        ("===2.14.0", "torch", "2.14.0.dev20260801", False),
        ("===9.10.2.21", "cudnn", "9.10.2.21", True),
        ("===9.10.2.21", "cudnn", "9.10.2.22", False),
        # Short ranges and long versions.
        ("==2.13.*", "torch", "2.13.1", True),
        (">=2.13", "torch", "2.13", True),
        ("!=2.12.0", "torch", "2.12.0", False),
        ("", "torch", "2.12.0", True),
    ],
)
def test_ranges(ranges, distribution, version, inside):
    assert contains(ranges, distribution, version) is inside


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("9.1.0", True),
        ("9.9.9", True),
        ("9.10.0", False),
        ("9.12.0", False),
        ("9.13.1", True),
        ("9.22.0", False),
    ],
)
def test_ranges_may_have_holes(version, inside):
    assert contains([">=9.0, <9.10", ">=9.13, <9.22"], "cudnn", version) is inside


def test_no_range_contains_nothing():
    assert not contains([], "torch", "2.13.0")


@given(PARTS, PARTS)
def test_ranges_follow_the_order_of_versions(version, bound):
    point, edge = Version(version), Version(bound)
    for suffix in ("", "+cu130", ".dev20260922", "a0+git123", ".post2", "rc1"):
        assert contains(f">={bound}", "torch", version + suffix) is (point >= edge)
        assert contains(f"<{bound}", "torch", version + suffix) is (point < edge)
        assert contains(f"=={bound}", "torch", version + suffix) is (point == edge)


EXACT = ["1.2.0.dev3", "1.2.0a1", "1.2.0rc1", "1.2.0.post1", "1.2.0b2.dev1"]
PUBLISHED = ["1.1.9", "1.2.0.dev2", *EXACT, "1.2.0.dev4", "1.2.0", "1.2.0.post2", "1.2.1"]


@pytest.mark.parametrize("bound", EXACT)
@pytest.mark.parametrize("version", PUBLISHED)
def test_an_exact_bound_follows_the_order_of_what_was_published(version, bound):
    point, edge = Version(version), Version(bound)
    holds = {"<": point < edge, "<=": point <= edge, ">": point > edge, ">=": point >= edge}
    for operator, expected in {**holds, "==": point == edge, "!=": point != edge}.items():
        assert contains(f"{operator}{bound}", "torch", f"{version}+cu130") is expected


@pytest.mark.parametrize(
    "text", ["2.9", "=>2.9", ">=2.9 <2.14", ">=two", "<2.14;", ">=2.9+", "~2.9", "===new"]
)
def test_a_malformed_range_names_itself(text):
    with pytest.raises(ValueError, match="a version range requires PEP 440 terms") as raised:
        specifier(text)
    assert f'got "{text}"' in str(raised.value)


@pytest.mark.parametrize("version", ["git-0fe1a2b", "", "2.13.0-cu130-rocm!", "nightly"])
def test_a_malformed_version_names_itself_and_its_distribution(version):
    with pytest.raises(ArgumentError, match="the version of torch requires PEP 440") as raised:
        comparable("torch", version)
    assert f'got "{version}"' in str(raised.value)


def test_a_host_with_a_malformed_version_gets_that_sentence_from_decide():
    with pytest.raises(
        ArgumentError, match='the version of torch requires PEP 440; got "nightly"; write it like'
    ):
        decide(CALL, Host(arch="sm_90", versions={"torch": "nightly"}))


@pytest.mark.parametrize(
    ("versions", "cuda"),
    [
        ({"torch": "2.11.0+cu130"}, "13.0"),
        ({"torch": "2.7.1+cu126"}, "12.6"),
        ({"torch": "2.5.1+cu118"}, "11.8"),
        ({"torch": "2.11.0+cu130", "cuda": "12.9"}, "12.9"),
        ({"torch": "2.13.0+cpu"}, None),
        ({"torch": "2.13.0+rocm6.4"}, None),
        ({"torch": "2.13.0"}, None),
        ({"torch": "2.14.0a0+git0fe1a2b"}, None),
        ({}, None),
    ],
)
def test_the_cuda_version_may_be_read_off_torch(versions, cuda):
    assert version_of("cuda", versions) == cuda


def test_other_versions_are_only_what_is_stated():
    assert version_of("torch", {"torch": "2.11.0+cu130"}) == "2.11.0+cu130"
    assert version_of("cudnn", {"torch": "2.11.0+cu130"}) is None
