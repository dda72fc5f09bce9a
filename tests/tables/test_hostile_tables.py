"""Tables that somebody got wrong: one sentence that names file and row, at once, and exit code 5."""

from __future__ import annotations

import datetime

import pytest

from attnroute.cli import main
from attnroute.engine.decide import decide
from attnroute.errors import ArgumentError, TableError
from attnroute.memory import reset
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.settings import reload
from attnroute.tables.folders import Tables
from attnroute.tables.lint import lint
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

CALL = parse("bf16 b1 hq8 sq64 d64")
HOST = Host(arch="sm_90", versions={"torch": "2.13.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})
EVIDENCE = 'evidence = [{ kind = "own", ref = "this test" }]'


def rule(requires="head_dim_qk = 8", more="", name="odd"):
    said = f"requires = {requires if requires.startswith('{') else '{ ' + requires + ' }'}"
    return f'[[rule]]\nname = "{name}"\n{said}\nbecause = "of this test"\n{EVIDENCE}\n{more}\n'


def order(names='["math"]', more=""):
    return f'[[order]]\nname = "odd"\norder = {names}\nbecause = "of this test"\n{EVIDENCE}\n{more}\n'


def prefer(names='["math"]', more=""):
    return order(names, more).replace("[[order]]", "[[prefer]]").replace("order = ", "first = ")


def arch(rows, backends="[]"):
    return f"cards = []\nbackends = {backends}\n{EVIDENCE}\n{rows}"


def put(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


HUGE = "9" * 5000
FLASH = "sm_90/flash.toml"
BAD_ROWS = {
    "a true length": (FLASH, rule("seqlen_q = true"), "rule odd.*seqlen_q requires numbers.*got true"),
    "a list of bools": (FLASH, rule("seqlen_q = [true]"), "rule odd.*seqlen_q requires numbers"),
    "not a number": (FLASH, rule('seqlen_q = "==nan"'), 'rule odd.*seqlen_q requires numbers.*got "nan"'),
    "a float that is none": (FLASH, rule("seqlen_q = nan"), "rule odd.*seqlen_q requires numbers.*got nan"),
    "infinity": (FLASH, rule('seqlen_q = "<inf"'), 'rule odd.*seqlen_q requires numbers.*got "inf"'),
    "a power without end": (FLASH, rule('seqlen_q = "<1e999"'), "rule odd.*finite number"),
    "5,000 digits in a term": (FLASH, rule(f'seqlen_q = "<{HUGE}"'), "rule odd.*at most 30 digits"),
    "5,000 digits": (FLASH, rule(f"seqlen_q = {HUGE}"), "requires TOML"),
    "a count of a flag": (FLASH, rule("is_gqa = 1"), "rule odd.*is_gqa requires true or false; got 1"),
    "a term about a flag": (FLASH, rule('causal = "==1"'), "rule odd.*causal requires true or false"),
    "a number for a word": (FLASH, rule("dtype = 16"), "rule odd.*dtype requires"),
    "no value at all": (FLASH, rule("head_dim_qk = []"), "rule odd.*a list with something in it"),
    "a flag beside a number": (FLASH, rule('seqlen_q = "<is_gqa"'), "rule odd.*numbers or fields that are"),
    "deep nesting": (FLASH, f"include = {'[' * 5000}{']' * 5000}", "requires TOML; it nests too deeply"),
    "versions that are none": (FLASH, rule(more='versions = { torch = ">=junk" }'), "rule odd: versions"),
    "any text as a version": (FLASH, rule(more='versions = { torch = "===junk" }'), "rule odd: versions"),
    "a version of 10,000 digits": (
        FLASH,
        rule(more=f'versions = {{ torch = ">={"9" * 10000}" }}'),
        r"rule odd: versions.*\(10002 characters\)",
    ),
    "no range": (FLASH, rule(more="versions = { torch = [] }"), "rule odd: versions.*at least one range"),
    "versions of a preference": (
        "sm_90/arch.toml",
        arch(prefer(more='versions = { torch = "2.9" }')),
        "sm_90/arch.toml: prefer odd: versions: .*PEP 440",
    ),
    "versions of stock": (
        "any/stock.toml",
        order(more='versions = { torch = "junk" }').replace('because = "of this test"\n', ""),
        "any/stock.toml: order odd: versions: .*PEP 440",
    ),
    "a stranger that is preferred": (
        "sm_90/arch.toml",
        arch(prefer('["flsh"]')),
        'sm_90/arch.toml: prefer odd: first requires backends.*got flsh; did you mean "flash"',
    ),
    "a stranger on an architecture": (
        "sm_90/arch.toml",
        arch(prefer(), '["chunkd"]'),
        'sm_90/arch.toml: backends requires.*got chunkd; did you mean "chunked"',
    ),
    "a backend that is preferred twice": (
        "sm_90/arch.toml",
        arch(prefer('["math", "math"]')),
        "sm_90/arch.toml: prefer odd: first: .*each backend once",
    ),
    "a stranger in stock": (
        "any/stock.toml",
        order('["flsh"]').replace('because = "of this test"\n', ""),
        "any/stock.toml: order odd requires backends.*got flsh",
    ),
    "a key of 5,000 letters": (
        FLASH,
        rule(more=f"{'x' * 5000} = 1"),
        r"rule odd: x+\.\.\. \(5000 characters\)",
    ),
    "a name of 5,000 letters": (FLASH, rule(name="X" * 5000), r"rule X+\.\.\. \(5000 characters\): name"),
    "no text": (FLASH, "\x00", "requires TOML"),
    "itself": ("shared/flex_triton.toml", 'include = ["shared/flex_triton"]', "do not include it"),
}


@pytest.fixture
def _in_force(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNROUTE_TABLES", str(tmp_path / "mine"))
    yield
    monkeypatch.undo()
    reset()
    reload()


@pytest.mark.usefixtures("_in_force")
@pytest.mark.parametrize("case", BAD_ROWS)
def test_one_sentence_names_file_and_row(case, tmp_path, capsys):
    file, text, said = BAD_ROWS[case]
    put(tmp_path / "mine", {file: text})
    reset()
    reload()
    for words in (["explain", "bf16 b1 hq8 sq64 d64", "--arch", "sm_90"], ["tables", "lint"]):
        assert main(words) == TableError.exit_code
        lines = "".join(capsys.readouterr())
        assert file in lines
        assert len(lines) < 1000
    with pytest.raises(TableError, match=said):
        decide(CALL, HOST, load(tmp_path / "mine"), advise=True)


def test_a_backend_without_an_answer_about_a_feature(tmp_path):
    head = 'title = "A backend"\nmodule = "mine"\nprovider = "torch"\nneeds = []\n'
    head += "versions_known = {}\noperators = []\n"
    files = {"any/mine.toml": f'[backend]\n{head}memory = "linear"\n', "sm_90/mine.toml": ""}
    tables = load(put(tmp_path / "mine", files))
    with pytest.raises(TableError, match=r"any/mine\.toml: features\.gqa requires true, false"):
        decide(parse("bf16 b1 hq8 hkv2 sq64 d64"), HOST, tables)


SHAPES = {
    "a diamond": lambda n: [f"shared/f{n + 1}", f"shared/g{n + 1}"],
    "twice the same": lambda n: [f"shared/f{n + 1}", f"shared/f{n + 1}"],
}
LEVELS = 300


@pytest.mark.parametrize("shape", SHAPES)
def test_includes_take_work_in_proportion_to_the_files(shape, tmp_path):
    """Were the work doubled at each level, this would not end."""
    files = {}
    for level in range(LEVELS):
        for letter in "fg":
            text = f"include = {SHAPES[shape](level)}\n" if level < LEVELS - 1 else ""
            files[f"shared/{letter}{level}.toml"] = text + rule(name=f"row-{letter}-{level}")
    files[FLASH] = 'include = ["shared/f0"]'
    folder = put(tmp_path / "mine", files)
    tables = Tables((shipped_folder(), folder))
    rows = [row.id for row in tables.rules("sm_90", "flash") if row.id.startswith("shared/f")]
    assert f"shared/f{LEVELS - 1}/row-f-{LEVELS - 1}" in rows


def test_a_circle_of_many_files_is_named(tmp_path):
    files = {f"shared/f{n}.toml": f'include = ["shared/f{(n + 1) % 500}"]' for n in range(500)}
    folder = put(tmp_path / "mine", {**files, FLASH: 'include = ["shared/f0"]'})
    with pytest.raises(TableError, match=r"shared/f0\.toml: include requires files that do not include it"):
        Tables((shipped_folder(), folder)).rules("sm_90", "flash")


def test_lint_says_what_deciding_says(tmp_path):
    folder = put(tmp_path / "mine", {"sm_90/arch.toml": arch(prefer('["flsh"]'))})
    problems = lint(Tables((shipped_folder(), folder)), datetime.date(2026, 11, 28))
    assert [str(p) for p in problems if "got flsh" in str(p)]


@pytest.mark.parametrize("version", ["9" * 10_000, "1." * 5000 + "1", "junk", "", "1.0\x1b[31m"])
def test_a_junk_version_of_a_machine_is_a_sentence(version, capsys):
    with pytest.raises(ArgumentError, match="the version of torch requires PEP 440") as raised:
        decide(CALL, Host(arch="sm_90", versions={"torch": version}))
    assert len(str(raised.value)) < 300
    given = ["explain", "bf16 b1 hq8 sq64 d64", "--arch", "sm_90", "--with", f"torch={version}"]
    assert main(given) == ArgumentError.exit_code
    assert len(capsys.readouterr().err) < 400
