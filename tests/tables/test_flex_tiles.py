"""Tile options of FlexAttention: what the kernel accepts, and what fits into the device's shared memory."""

from __future__ import annotations

from itertools import product

import pytest

from attnroute.engine.decide import judge
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.nodes import KeyPaddingNode
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from attnroute.vocabulary import DTYPE_BYTES

TABLES = load()
ARCHS = [a for a in TABLES.arch_names if TABLES.arch(a).shared_memory_per_block and a != "sm_75"]
DIMS = (16, 64, 96, 128, 160, 192, 256, 320, 512)
DTYPES = ("bfloat16", "float32")
RELEASES = ("2.8.0", "2.11.0", "2.13.0", "2.15.0")
UNEQUAL = [(192, 128), (64, 128), (64, 192), (64, 256), (128, 256), (96, 256)]
SPARSE_BLOCK = 128
REGISTERS = 64 * 1024
"""Of 4 bytes, per block."""


def rounded(size):
    """Triton's tiles are powers of two."""
    return 1 << (size - 1).bit_length()


def verdict_of(
    arch, *, torch="2.11.0", dtype="bfloat16", dims=(128, 128), seqlen=4096, phase="training", bias=None
):
    call = Call(
        dtype=dtype,
        batch=1,
        num_heads_q=8,
        num_heads_kv=4,
        seqlen_q=seqlen,
        seqlen_kv=4096,
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        phase=phase,
        bias=bias,
    )
    host = Host(arch=arch, versions={"torch": torch, "cuda": "13.0", "triton": "3.9.0"})
    return judge(call, host, TABLES, "flex", Policy())


def every(arch):
    """Every verdict that gives options, with its dtype and head dims."""
    for torch, dtype, dims, phase in product(
        RELEASES, DTYPES, [(d, d) for d in DIMS] + UNEQUAL, ("training", "inference")
    ):
        verdict = verdict_of(arch, torch=torch, dtype=dtype, dims=dims, phase=phase)
        if verdict.options:
            yield dict(verdict.options), dtype, dims, (torch, dtype, dims, phase, verdict.option_rows)


def forward_bytes(options, dtype, dims, arch):
    """What the forward takes, by the estimate that the rows name."""
    width, (qk, v) = DTYPE_BYTES[dtype], map(rounded, dims)
    rows, columns, stages = (options[f"fwd_{n}"] for n in ("BLOCK_M", "BLOCK_N", "num_stages"))
    query, stage = rows * qk * width, columns * (qk + v) * width
    if arch in ("sm_90", "sm_100", "sm_103", "sm_110"):
        return query + stages * stage
    if stages == 1:  # Keys and values take turns in one buffer.
        stage = columns * max(qk, v) * width
    return query + max(1, stages - 1) * stage + rows * columns * width + 512


@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_of_the_forward_fit(arch):
    limit = TABLES.arch(arch).shared_memory_per_block
    given = [g for g in every(arch) if "fwd_BLOCK_M" in g[0]]
    assert len(given) > 10
    for options, dtype, dims, case in given:
        assert forward_bytes(options, dtype, dims, arch) <= limit, case


def test_the_estimate_gives_what_was_reported():
    """An error text of an H100 and one of an A10G, for the tiles that the kernel takes by itself."""
    own = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 3}
    assert forward_bytes(own, "bfloat16", (512, 512), "sm_90") == 262144
    own = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 3}
    assert forward_bytes(own, "bfloat16", (192, 128), "sm_86") == 139776


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_accepts_the_tiles(arch):
    for options, _, _, case in every(arch):
        for name, size in options.items():
            if "BLOCK" in name:
                assert size in (16, 32, 64, 128), case
                assert SPARSE_BLOCK % size == 0
        if "bwd_BLOCK_M1" in options:
            assert options["bwd_BLOCK_N1"] % options["bwd_BLOCK_M1"] == 0, case
            assert options["bwd_BLOCK_M2"] % options["bwd_BLOCK_N2"] == 0, case


@pytest.mark.parametrize("arch", ARCHS)
def test_sums_fit_into_the_registers(arch):
    """A block keeps float32 sums of its rows: of the output, or of dK and dV, or of dQ."""
    for options, _, dims, case in every(arch):
        qk, v = map(rounded, dims)
        if "fwd_BLOCK_M" in options:
            threads = 32 * options["fwd_num_warps"]
            assert options["fwd_BLOCK_M"] * v <= min(REGISTERS, threads * 255) * 0.75, case
        if "bwd_BLOCK_N1" in options:
            threads = 32 * options["bwd_num_warps"]
            sums = max(options["bwd_BLOCK_N1"] * (qk + v), options["bwd_BLOCK_M2"] * qk)
            assert sums <= min(REGISTERS, threads * 255), case


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dims", [(320, 320), (512, 512)])
def test_wide_heads_have_tiles_forward_and_backward(arch, dims):
    """The kernel's own forward tiles fit on no card there."""
    options = dict(verdict_of(arch, dims=dims).options)
    assert {"fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N2"} <= set(options)
    inference = dict(verdict_of(arch, dims=dims, phase="inference").options)
    assert not [name for name in inference if name.startswith("bwd_")]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 256), (128, 256)])
def test_values_wider_than_keys_have_tiles_of_their_own(arch, dims, dtype):
    """The kernel takes its tiles by head_dim_qk, and those of 64 do not hold values of 256."""
    if arch in ("sm_90", "sm_100"):
        own = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 3}
        assert forward_bytes(own, "bfloat16", (64, 256), arch) == 262144
    assert "fwd_BLOCK_M" in dict(verdict_of(arch, dims=dims, dtype=dtype).options)


@pytest.mark.parametrize("seqlen", [8, 100, 128, 4096])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128)])
@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "sm_120"])
def test_the_backward_of_a_bias_has_tiles_at_every_length(arch, dims, seqlen):
    bias = {"kind": "dense", "dtype": "float32", "shape": [1, 8, seqlen, 4096], "requires_grad": True}
    options = dict(verdict_of(arch, dims=dims, seqlen=seqlen, bias=bias).options)
    assert "bwd_BLOCK_M1" in options
    assert ("fwd_BLOCK_M" in options) is (seqlen >= 128)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128)])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_float32_backward_of_a_bias_keeps_the_tiles_of_16_rows(arch, dims):
    """torch takes these for float32, and they fit; those for 16 bits would take twice as much."""
    bias = {"kind": "dense", "dtype": "float32", "shape": [1, 8, 4096, 4096], "requires_grad": True}
    options = dict(verdict_of(arch, dims=dims, dtype="float32", bias=bias).options)
    assert not [name for name in options if name.startswith("bwd_")]


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_107"])
def test_tiles_of_torch_2_14_fit_beside_a_bias_on_blackwell(arch):
    for torch, given in (("2.13.0", True), ("2.14.0", False), ("2.15.0", False)):
        options = forward_options(arch, (64, 64), bias="float32", torch=torch)
        assert ("fwd_BLOCK_M" in options) is given, torch


@pytest.mark.parametrize("arch", ARCHS)
def test_a_forward_of_short_queries_keeps_its_rows(arch):
    """The kernel for fewer than 128 queries counts on the BLOCK_M that it computes itself."""
    for seqlen, dims, dtype in product((1, 7, 127), DIMS, DTYPES):
        options = dict(verdict_of(arch, dims=(dims, dims), seqlen=seqlen, dtype=dtype).options)
        assert "fwd_BLOCK_M" not in options or "FORCE_USE_FLEX_ATTENTION" in options


@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_fit_where_short_queries_run_the_whole_kernel(arch):
    """torch's own, at head dims that it has no tiles for, are 64 rows of float32 and 128 of 16 bits.

    On an H200 torch 2.11 asked for 344320 bytes: 31 float32 queries of head dim 192.
    """
    limit = TABLES.arch(arch).shared_memory_per_block
    forced = 0
    for torch, seqlen, dims, dtype in product(RELEASES, (1, 7, 31, 127), (80, 96, 160, 192, 224), DTYPES):
        for heads in ((8, 8), (8, 4), (24, 8)):
            options = forward_options(arch, (dims, dims), dtype, torch=torch, heads=heads, seqlen=seqlen)
            if options.pop("FORCE_USE_FLEX_ATTENTION", False):
                own = {
                    "fwd_BLOCK_M": 64 if dtype == "float32" else 128,
                    "fwd_BLOCK_N": 64,
                    "fwd_num_stages": 3,
                }
                assert forward_bytes(own | options, dtype, (dims, dims), arch) <= limit, (
                    torch,
                    seqlen,
                    dims,
                    heads,
                )
                forced += 1
    assert forced > 50
    own = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 3}
    assert forward_bytes(own, "float32", (192, 192), "sm_90") > TABLES.arch("sm_90").shared_memory_per_block


@pytest.mark.parametrize(
    ("arch", "dims", "given"),
    [("sm_120", (128, 128), False), ("sm_120", (160, 160), True), ("sm_120", (256, 256), True)],
)
def test_a_backward_that_was_reported_not_to_fit_gets_other_tiles(arch, dims, given):
    """pytorch/pytorch#198224: from 160 on, not at 128."""
    options = dict(verdict_of(arch, dims=dims, torch="2.15.0").options)
    assert ("bwd_BLOCK_M1" in options) is given


def test_short_queries_run_the_whole_kernel_where_the_short_one_fails():
    def forced(torch, seqlen, arch="sm_90"):
        return "FORCE_USE_FLEX_ATTENTION" in dict(verdict_of(arch, torch=torch, seqlen=seqlen).options)

    assert forced("2.13.0", 100)
    assert forced("2.15.0", 100)
    assert not forced("2.13.0", 1)
    assert not forced("2.13.0", 128)


@pytest.mark.parametrize(
    ("dtype", "seqlen", "forced"),
    [("float32", 100, True), ("float32", 16, False), ("float32", 128, False), ("bfloat16", 100, False)],
)
def test_short_float32_queries_run_the_whole_kernel_as_the_short_one_compiles_for_minutes(
    dtype, seqlen, forced
):
    call = Call(
        dtype=dtype, batch=2, num_heads_q=2, num_heads_kv=2, seqlen_q=seqlen, seqlen_kv=512,
        head_dim_qk=192, head_dim_v=192,
    )  # fmt: skip
    host = Host(arch="sm_90", versions={"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"})
    options = dict(judge(call, host, TABLES, "flex", Policy()).options)
    assert ("FORCE_USE_FLEX_ATTENTION" in options) is forced


def forward_options(arch, dims, dtype="bfloat16", bias=None, torch="2.11.0", heads=(8, 4), seqlen=4096):
    """What the forward is given: its options by their names, those of an inference."""
    given = {"dtype": dtype, "head_dim_qk": dims[0], "head_dim_v": dims[1], "seqlen_q": seqlen}
    given |= {"num_heads_q": heads[0], "num_heads_kv": heads[1], "seqlen_kv": 4096, "batch": 1}
    if bias is not None:
        given["bias"] = {"kind": "dense", "dtype": bias, "shape": [1, heads[0], seqlen, 4096]}
    host = Host(arch=arch, versions={"torch": torch, "cuda": "13.0", "triton": "3.9.0"})
    options = judge(Call(**given), host, TABLES, "flex", Policy()).options
    return {name: value for name, value in options if name.startswith(("fwd_", "FORCE_"))}


@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "bias", "fits"),
    [
        ("sm_100", (64, 64), "bfloat16", "float32", False),
        ("sm_103", (64, 64), "bfloat16", "float32", False),
        ("sm_110", (64, 64), "bfloat16", "float32", False),
        ("sm_100", (64, 64), "bfloat16", "bfloat16", True),
        ("sm_100", (128, 128), "bfloat16", "float32", True),
        ("sm_80", (128, 128), "float32", "float32", False),
        ("sm_80", (256, 256), "bfloat16", "float32", False),
        ("sm_80", (256, 256), "bfloat16", "bfloat16", True),
        ("sm_86", (64, 64), "float32", "float32", False),
        ("sm_89", (64, 64), "float32", "float32", False),
        ("sm_86", (64, 64), "bfloat16", "bfloat16", True),
        ("sm_120", (64, 64), "bfloat16", "bfloat16", True),
    ],
)
def test_own_tiles_that_do_not_fit_beside_a_bias_are_replaced(arch, dims, dtype, bias, fits):
    """`python -m benchmarks.flex_tiles` prints what each takes."""
    assert ("fwd_BLOCK_M" in forward_options(arch, dims, dtype, bias)) is not fits
    if dims != (256, 256):
        assert "fwd_BLOCK_M" not in forward_options(arch, dims, dtype)


def test_192_and_128_get_other_tiles_beside_a_float32_bias():
    assert forward_options("sm_86", (192, 128), bias="bfloat16")["fwd_BLOCK_M"] == 128
    assert forward_options("sm_86", (192, 128), bias="float32")["fwd_BLOCK_M"] == 64


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_110"])
def test_the_backward_of_a_bias_has_tiles_on_blackwell(arch):
    bias = {"kind": "dense", "dtype": "float32", "shape": [1, 8, 4096, 4096], "requires_grad": True}
    given = dict(verdict_of(arch, bias=bias).options)
    assert given["bwd_num_stages"] == 2
    assert "bwd_BLOCK_M1" not in dict(verdict_of(arch, torch="2.9.1", bias=bias).options)
    assert "bwd_BLOCK_M1" not in dict(verdict_of(arch).options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100"])
def test_one_query_of_an_odd_group_runs_the_whole_kernel_with_tiles_that_fit(arch):
    """torch leaves the kernel for short queries out there, and its own tiles are those of 128 queries."""
    assert forward_options(arch, (160, 160), heads=(24, 8), seqlen=1)["fwd_num_stages"] == 1
    assert forward_options(arch, (160, 160), heads=(8, 4), seqlen=1) == {}


@pytest.mark.parametrize(
    ("heads", "mask", "refused"),
    [(128, True, False), (129, True, False), (255, True, False), (256, True, True), (256, False, False)],
)
def test_groups_that_no_tile_holds_are_powers_of_two_below_a_mask(heads, mask, refused):
    call = Call(
        dtype="bfloat16", batch=1, num_heads_q=heads, num_heads_kv=1, seqlen_q=1, seqlen_kv=512,
        head_dim_qk=64, head_dim_v=64, mask=(KeyPaddingNode(lengths=(400,)),) if mask else (),
    )  # fmt: skip
    host = Host(arch="sm_90", versions={"torch": "2.13.0", "cuda": "13.0", "triton": "3.9.0"})
    assert ("expand_kv" in judge(call, host, TABLES, "flex", Policy()).repairs) is refused
