"""Which compilers are found, and what is said where none is."""

from __future__ import annotations

import stat
import sys
from types import SimpleNamespace

import pytest
import torch

from attnroute.engine.decide import decide
from attnroute.memory import reset
from attnroute.probes import compilers, torch_host
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.tables.alternatives import names_in
from attnroute.tables.load import load

CALL = parse("fp32 b1 hq1 sq64 d64 softcap=30")


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    """Nothing found here may stay, and nothing of this machine may be found."""
    caches = (compilers.cxx, compilers.c_for_triton, torch_host.host_of)
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH of its own; returns a function that puts a program there, which prints a text and exits."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, says="", code=0):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\nprint({says!r})\nraise SystemExit({code})\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return put


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0", "12.2.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)\nTarget: x86_64-pc-linux-gnu", "18.1.3"),
        ("some compiler", "present"),
    ],
)
def test_a_compiler_says_its_version(says, version, programs):
    programs("g++" if sys.platform != "darwin" else "clang++", says)
    assert compilers.cxx() == compilers.Found(version=version)


def test_cxx_names_another_one(programs, monkeypatch):
    programs("g++", "g++ 9.4.0")
    programs("mine", "mine 3.2")
    monkeypatch.setenv("CXX", "mine")
    assert compilers.cxx().version == "3.2"


def test_a_compiler_that_is_not_there_is_said_with_its_name(programs, monkeypatch):
    found = compilers.cxx()
    assert found.version is None
    assert "which is not on PATH" in found.problem
    compilers.cxx.cache_clear()
    monkeypatch.setenv("CXX", "icpx")
    assert compilers.cxx().problem == "CXX names icpx, which is not on PATH"


def test_a_compiler_that_fails_is_broken(programs, monkeypatch):
    path = programs("mine", code=3)
    monkeypatch.setenv("CXX", "mine")
    assert compilers.cxx().problem.startswith(f"{path} --version fails: ")


def test_a_compiler_that_speaks_another_encoding_is_understood(programs, monkeypatch):
    path = programs("mine")
    said = "import sys; sys.stdout.buffer.write('compilé 3.2'.encode('latin-1'))"
    path.write_text(f"#!{sys.executable}\n{said}\n", encoding="utf-8")
    monkeypatch.setenv("CXX", "mine")
    assert compilers.cxx().version == "3.2"


def test_a_cudnn_that_torch_refuses_is_broken(monkeypatch):
    def refuse():
        raise RuntimeError("cuDNN version incompatibility: compiled against 9.19, found 9.1")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    reset()
    host = torch_host.host_of("cpu", None, load().providers)
    reset()
    assert "cudnn" not in host.versions
    assert "RuntimeError: cuDNN version incompatibility" in host.broken["cudnn"]


def test_triton_needs_any_c_compiler(programs, monkeypatch):
    assert compilers.c_for_triton().problem == "it needs a C compiler, and neither gcc nor clang is on PATH"
    compilers.c_for_triton.cache_clear()
    programs("clang")
    assert compilers.c_for_triton().version == "present"
    compilers.c_for_triton.cache_clear()
    monkeypatch.setenv("CC", "tcc")
    assert compilers.c_for_triton().problem == "it needs a C compiler, and CC names tcc, which is not on PATH"


def test_a_cpu_without_a_compiler_keeps_flex_away_and_says_why(programs):
    host = torch_host.host_of("cpu", None, load().providers)
    assert "c++" not in host.versions
    verdict = decide(CALL, host).verdict("flex")
    assert "c++" in verdict.missing
    assert verdict.status == "unavailable"


def test_a_cpu_with_a_compiler_is_ready(programs, monkeypatch):
    programs("mine", "mine 13.2.0")
    monkeypatch.setenv("CXX", "mine")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(sys, "platform", "linux")
    host = torch_host.host_of("cpu", None, load().providers)
    assert (host.versions["c++"], host.versions["avx2"], host.broken) == ("13.2.0", "present", {})
    assert decide(CALL, host).verdict("flex").status == "eligible"


@pytest.mark.parametrize(
    ("platform", "capability", "said"),
    [
        ("darwin", "AVX2", "torch.compile writes no attention kernel on macOS"),
        ("linux", "DEFAULT", "torch calls this processor's vectors DEFAULT"),
        ("linux", "SVE256", "torch calls this processor's vectors SVE256"),
    ],
)
def test_a_processor_that_inductor_does_not_take_is_broken(platform, capability, said, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert torch_host.host_of("cpu", None, load().providers).broken["avx2"] == said


def test_every_need_is_something_that_a_probe_finds_or_a_flag_gives():
    tables = load()
    infos = [tables.info(arch, backend) for arch in tables.arch_names for backend in tables.backends]
    needed = set(names_in(need for info in infos for need in info.needs))
    assert needed >= {"torch", "cudnn", "triton", "c++", "avx2", "flash-attn-3", "xformers"}
    assert needed <= {"torch", "cudnn", "c++", "avx2"} | tables.providers.by_name.keys()


def test_a_missing_c_compiler_breaks_triton(programs, monkeypatch):
    card = SimpleNamespace(major=9, minor=0, name="a card")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    versions = {"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"}
    monkeypatch.setattr(torch_host, "versions", lambda _: versions)
    host = torch_host.host_of("cuda", 0, load().providers)
    broken = {"triton": compilers.c_for_triton().problem}
    assert host == Host(arch="sm_90", device_name="a card", versions=versions, broken=broken)
    call = CALL.with_(dtype="bfloat16")
    assert decide(call, host).verdict("flex").missing == ("triton",)
    compilers.c_for_triton.cache_clear()
    programs("gcc")
    assert torch_host.host_of("cuda", 1, load().providers).broken == {}
    assert decide(call, torch_host.host_of("cuda", 1, load().providers)).verdict("flex").status == "eligible"
