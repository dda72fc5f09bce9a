"""`attnroute explain`: machines, calls, exit codes, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from attnroute import settings
from attnroute.cli import main
from attnroute.engine.decide import decide
from attnroute.engine.decision import WhyNot
from attnroute.errors import ArgumentError
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy, merge
from attnroute.report.json import SCHEMA_VERSION, decision_from_json
from attnroute.report.sentences import host_line
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import companions_of, known

RELEASES = known(shipped_folder())
CALL = "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train"
H100 = '{"arch": "sm_90", "device_name": "H100", "versions": {"torch": "2.11.0+cu130", "cudnn": "9.19.0"}}'


def explained(capsys, *words):
    """Return the decision that `--format json` prints, and what stands on stderr."""
    code = main(["explain", *words, "--json", "-v"])
    out, err = capsys.readouterr()
    assert out, err
    return decision_from_json(out), code, err


@pytest.fixture
def host_file(tmp_path):
    path = tmp_path / "host.json"
    path.write_text(H100, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([CALL, "--arch", "sm_90"], 0),
        ([CALL, "softcap=30", "--arch", "sm_90"], 0),
        ([CALL, "double_backward", "--arch", "sm_90"], 3),
        ([CALL, "function", "--arch", "sm_90"], 0),
        ([CALL, "softcap=30", "double_backward", "--arch", "sm_90"], 4),
        ([CALL, "--arch", "sm_90", "--backend", "efficient", "--with", "torch=2.15.0"], 0),
        (["bf16 b1 hq8 sq64 d320 causal", "--arch", "sm_90", "--backend", "flash"], 4),
        ([CALL, "--arch", "sm_91"], 2),
        ([CALL, "casual", "--arch", "sm_90"], 2),
        (["--arch", "sm_90"], 2),
    ],
)
def test_the_exit_code_says_what_was_selected(words, code, capsys) -> None:
    assert main(["explain", *words]) == code
    out, err = capsys.readouterr()
    assert bool(err) is (code == 2)
    assert bool(out) is (code != 2)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--arch", "sm_91"], "or the name of a card, like h100; got"),
        (["--arch", "sm_90", "--backend", "flahs"], 'did you mean "flash"?'),
        (["--arch", "sm_90", "--with", "tourch=2.9"], 'did you mean "torch"?'),
        (["--arch", "sm_90", "--with", "torch"], "--with requires NAME=VERSION"),
        (["--arch", "sm_90", "--with", "torch=two"], 'the version of torch requires PEP 440; got "two"'),
        (["--arch", "sm_90", "--without", "flash-atn"], 'did you mean "flash-attn"?'),
        (["--arch", "sm_90", "--host", "x.json"], "not allowed with argument --arch"),
        (["--host", "no-such-file.json"], "--host requires a JSON file"),
        (["--arch", "sm_90", "--format", "yaml"], "invalid choice: 'yaml'"),
        (["--arch", "sm_90", "--archh", "x"], "unrecognized arguments: --archh"),
        (["--arch", "sm_90", "--q", "1,2,3"], "--q requires counts B,HQ,SQ,D"),
        (["--arch", "sm_90", "--kv", "1"], "--kv requires counts HKV,SKV or HKV,SKV,DV"),
        (["--arch", "sm_90", "--mask", "casual"], 'did you mean "causal"?'),
        (["--arch", "sm_90", "--free-memory", "10GB"], "--free-memory requires a size like 10GiB, 512MiB or"),
    ],
)
def test_a_wrong_word_is_one_sentence_on_stderr(words, names, capsys) -> None:
    assert main(["explain", CALL, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert names in err
    assert err.startswith("attnroute: ")
    assert err.count("\n") == 1 or "--host" in names


def test_flags_say_the_same_as_words(capsys) -> None:
    flags = "--q 2,32,4096,192 --kv 8,4096,128 --dtype bfloat16 --mask causal,window=4096,keys=100,37 --train"
    more = (
        "--softcap 30 --dropout 0.1 --sink --lse --deterministic --scale negative --bias fp32:1x1x4096x4096"
    )
    decision, _, _ = explained(capsys, *flags.split(), *more.split(), "--arch", "sm_90")
    words = "bf16 b2 hq32 hkv8 sq4096 skv4096 d192/128 causal window=4095,0 keys=100,37 train softcap=30"
    rest = "dropout=0.1 sink lse deterministic scale=negative bias=fp32:1x1x4096x4096"
    assert decision.call == parse(f"{words} {rest}")


def test_words_may_be_one_argument_or_many_and_stand_behind_flags(capsys) -> None:
    one, _, _ = explained(capsys, CALL, "--arch", "sm_90")
    many, _, _ = explained(capsys, "--arch", "sm_90", *CALL.split())
    mixed, _, _ = explained(
        capsys, "causal", "--arch", "sm_90", "train", "--q", "2,32,4096,128", "--kv", "8,4096", "bf16"
    )
    assert one == many == mixed


def test_json_for_another_machine_is_the_decision(capsys, host_file) -> None:
    decision, code, err = explained(capsys, CALL, "--host", host_file, "--backend", "efficient")
    policy = Policy(require="efficient", origin={"require": "the command line"})
    expected = decide(
        parse(CALL), Host.model_validate_json(H100), policy=merge(Policy(), policy), advise=True
    )
    assert decision == expected
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("text", "size"), [("1.5GiB", 3 * 2**29), ("512 MiB", 2**29), ("1000000", 10**6), ("0", 0)]
)
def test_free_memory_keeps_out_what_allocates_more(text, size, capsys) -> None:
    call = "bf16 b2 hq32 sq2048 d128 train"
    decision, _, _ = explained(capsys, call, "--arch", "sm_90", "--free-memory", text)
    scores = decision.verdict("math").score_bytes
    assert decision.host.free_memory == size
    assert (decision.verdict("math").excluded is not None) is (scores > size)


def test_a_recorded_host_takes_and_loses_versions(capsys, host_file) -> None:
    words = ["--host", host_file, "--with", "torch=2.15.0", "--without", "cudnn"]
    decision, _, _ = explained(capsys, CALL, *words)
    assert decision.host.versions == {"torch": "2.15.0"}
    assert decision.verdict("cudnn").missing == ("cudnn",)


def test_what_a_flag_names_is_no_longer_broken(capsys, tmp_path) -> None:
    path = tmp_path / "host.json"
    broken = {"triton": "no compiler", "flash-attn-3": "no kernels", "xformers": "no kernels"}
    host = Host.model_validate_json(H100).with_versions({"triton": "3.6.0", "flash-attn-3": "3.0.0"})
    path.write_text(host.model_copy(update={"broken": broken}).model_dump_json(), encoding="utf-8")
    decision, _, _ = explained(capsys, CALL, "--host", str(path))
    assert decision.verdict("fa3").missing == ("flash-attn-3 | xformers",)
    words = ["--with", "xformers=0.0.34", "--without", "triton"]
    decision, _, _ = explained(capsys, CALL, "--host", str(path), *words)
    assert decision.host.broken == {"flash-attn-3": "no kernels"}
    assert decision.host.versions["xformers"] == "0.0.34"
    assert decision.verdict("fa3").missing == ()
    assert decision.verdict("flex").missing == ("triton",)


@pytest.mark.parametrize(
    "name", ["flash-attn-3", "xformers", "transformer-engine-torch", "nvidia-cutlass-dsl"]
)
def test_every_package_that_a_backend_needs_can_be_given(capsys, name) -> None:
    decision, _, _ = explained(capsys, CALL, "--arch", "sm_90", "--with", f"{name}=1.0")
    assert decision.host.versions[name] == "1.0"


@pytest.mark.parametrize(
    ("words", "versions", "said"),
    [
        ([], RELEASES[-1]._asdict(), "(the newest known release)"),
        (
            ["--with", "torch=2.11"],
            {"torch": "2.11", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"},
            "triton 3.6.0 (what its",
        ),
        (
            ["--with", "torch=2.11", "--with", "cudnn=9.26"],
            {"torch": "2.11", "cuda": "13.0", "cudnn": "9.26", "triton": "3.6.0"},
            "cuda 13.0, triton",
        ),
        (
            ["--with", "torch=2.11+cu128"],
            {"torch": "2.11+cu128", "triton": "3.6.0"},
            "triton 3.6.0 (what its default wheel brings); nothing about cuda and cudnn, because",
        ),
        (["--with", "torch=2.99"], {"torch": "2.99"}, "no default wheel of torch 2.99 is listed"),
        (["--without", "torch"], {}, ""),
        (
            ["--without", "cudnn"],
            {name: value for name, value in RELEASES[-1]._asdict().items() if name != "cudnn"},
            "torch",
        ),
    ],
)
def test_what_was_not_said_about_a_machine_is_assumed_aloud(words, versions, said, capsys) -> None:
    decision, _, err = explained(capsys, CALL, "--arch", "sm_90", *words)
    assert err == ""
    assert decision.host.versions == versions
    assert decision.host.assumed.keys().isdisjoint(word.partition("=")[0] for word in words)
    assert said in host_line(decision.host)
    assert bool(decision.host.assumed) is bool(said)
    main(["explain", CALL, "--arch", "sm_90", *words])
    assert host_line(decision.host) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "versions", "said"),
    [
        (
            [],
            {"torch": RELEASES[-1].torch, "c++": "present", "avx2": "present"},
            "(as most machines have)",
        ),
        (
            ["--without", "c++"],
            {"torch": RELEASES[-1].torch, "avx2": "present"},
            "avx2 present",
        ),
        (
            ["--with", "torch=2.9", "--with", "c++=13", "--without", "avx2"],
            {"torch": "2.9", "c++": "13"},
            "",
        ),
    ],
)
def test_a_cpu_has_no_cuda_and_a_compiler(words, versions, said, capsys) -> None:
    decision, _, err = explained(capsys, "fp32 b1 hq1 sq64 d64", "--arch", "cpu", *words)
    assert err == ""
    assert decision.host.versions == versions
    assert said in host_line(decision.host)
    assert ("assumed" in host_line(decision.host)) is bool(said)


def test_what_compiles_is_not_called_unavailable_for_want_of_a_compiler(capsys) -> None:
    for arch in ("sm_90", "sm_120", "cpu"):
        decision, _, _ = explained(capsys, "fp32 b1 hq1 sq64 d64", "--arch", arch)
        assert decision.verdict("flex").missing == ()
    decision, _, _ = explained(capsys, "fp32 b1 hq1 sq64 d64", "--arch", "sm_90", "--without", "triton")
    assert decision.verdict("flex").missing == ("triton",)


def test_the_newest_release_is_the_one_with_the_highest_version() -> None:
    assert RELEASES[-1].torch == max(
        (c.torch for c in RELEASES), key=lambda t: [int(n) for n in t.split(".")]
    )
    wheel_of = partial(companions_of, folder=shipped_folder())
    assert wheel_of("2.11.0") == ("2.11.0", "13.0", "9.19.0", "3.6.0")
    assert wheel_of("2.11") == wheel_of("2.11.0")
    assert wheel_of("3.0") is None


def test_without_torch_the_question_about_this_machine_is_one_sentence(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "attnroute.probes.torch_host", None)
    monkeypatch.setattr("attnroute.cli._host.import_module", _no_torch)
    assert main(["explain", CALL]) == ArgumentError.exit_code
    assert "name a machine with --arch or --host, or install torch" in capsys.readouterr().err


def _no_torch(name):
    raise ModuleNotFoundError(name, name="torch")


def test_the_environment_steers_an_explanation_and_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setenv("ATTNROUTE_BACKENDS", "-cudnn")
    settings.reload()
    try:
        main(["explain", CALL, "--arch", "sm_90"])
    finally:
        monkeypatch.undo()
        settings.reload()
    assert "banned by ATTNROUTE_BACKENDS=-cudnn" in capsys.readouterr().out


def test_a_malformed_table_is_exit_code_5(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm_90" / "cudnn.toml").write_text('[[rule]]\nname = "Bad Name"\n', encoding="utf-8")
    monkeypatch.setenv("ATTNROUTE_TABLES", str(tmp_path))
    settings.reload()
    try:
        code = main(["explain", CALL, "--arch", "sm_90"])
    finally:
        monkeypatch.undo()
        settings.reload()
    assert code == 5
    assert "sm_90/cudnn.toml: rule Bad Name: name:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["explain", CALL, "--arch", "sm_90"], ["explain", CALL, "--host", "HOST"], ["rule", "any/cudnn/dtype"]],
)
def test_neither_torch_nor_rich_is_loaded_for_text_about_another_machine(words, host_file) -> None:
    words = [host_file if word == "HOST" else word for word in words]
    code = f"import sys; from attnroute.cli import main; main({words!r}); print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert loaded[0] == "loaded"
    assert set(loaded) & {"torch", "rich", "numpy", "transformers"} == set()
    assert "attnroute.tables.load" in loaded


def test_the_module_runs_and_its_exit_code_reaches_the_shell() -> None:
    words = ["explain", CALL, "softcap=30", "double_backward", "--arch", "sm_90"]
    done = subprocess.run(
        [sys.executable, "-m", "attnroute", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stdout.startswith("selected   none: ")
    assert done.stderr == ""


def test_why_not_as_json_is_the_answer(capsys, host_file) -> None:
    assert main(["why-not", "flash", CALL, "--host", host_file, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.pop("schema_version") == SCHEMA_VERSION
    answer = WhyNot.model_validate(data)
    assert answer.decision.host == Host.model_validate_json(H100)
    assert (answer.backend, answer.behind) == ("flash", "time")
    assert answer.changes[0].selects == "flash"


def test_why_not_says_every_other_backend_if_asked(capsys) -> None:
    assert main(["why-not", "flash", CALL, "--arch", "sm_90"]) == 0
    short = capsys.readouterr().out
    assert main(["why-not", "flash", CALL, "--arch", "sm_90", "-v"]) == 0
    lines = capsys.readouterr().out.removeprefix(short).splitlines()
    labels = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert labels == {verdict.backend for verdict in decide(parse(CALL), Host(arch="sm_90")).verdicts} - {
        "flash"
    }


def test_times_of_another_architecture_are_explained_where_they_stand(capsys) -> None:
    for command in (["explain"], ["why-not", "math"]):
        main([*command, CALL, "--arch", "rtx5090"])
        out = capsys.readouterr().out
        assert "(inferred)" in out
        assert "inferred   times computed from those of another architecture's card" in out


def test_why_not_an_unknown_backend_names_the_nearest(capsys) -> None:
    assert main(["why-not", "flahs", CALL, "--arch", "sm_90"]) == 2
    assert capsys.readouterr().err.endswith('did you mean "flash"?\n')


def test_why_not_takes_settings_and_flags(capsys) -> None:
    flags = ["--q", "2,32,4096,128", "--dtype", "bf16", "--train", "--backend", "flash"]
    assert main(["why-not", "math", *flags, "--arch", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert "change     backend = math would select math" in out
    assert "not the one that the command line requires" in out.replace("\n           ", " ")
