"""Every block of code on a page runs as it stands there, or is held against what it shows."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from attnroute.memory import reset
from attnroute.question.call import Call
from attnroute.question.host import Host

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "capability_tables" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if GENERATED not in page.parents)
FENCES = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?( *)```(\w*)[^\n]*\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
ON_A_GPU = "needs a GPU"
FILE = "the file "
PROGRAMS = {"attnroute", "bash", "cd", "git", "pip", "pre-commit", "python"}
"""What a line of a shell block may begin with; test_documents runs those of attnroute."""


class Block(NamedTuple):
    """A block: the comment on the line before it, its language, its text."""

    mark: str
    language: str
    code: str


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(mark, language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE))
        for mark, indent, language, code in FENCES.findall(text)
    ]


def pages_with(language):
    """Every page with such blocks, and these."""
    found = ((page, [b for b in blocks_of(page) if b.language == language]) for page in PAGES)
    return [pytest.param(page, blocks, id=page.name) for page, blocks in found if blocks]


def words_of(text):
    """The words of what was printed; times, versions and rules differ."""
    return set(re.findall(r"[a-z]{3,}", text))


def run(page, blocks):
    """Run blocks one after the other, as somebody does who pastes them into one session."""
    names = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block.code, str(page), "exec"), names)
    return names


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session in an empty folder, where models that would be downloaded are small and random."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda _name, **said: transformers.AutoModelForCausalLM.from_config(config, **said),
    )
    monkeypatch.chdir(tmp_path)
    yield
    reset()


@pytest.mark.parametrize(("page", "blocks"), pages_with("python"))
def test_python_runs_as_it_stands_on_the_page(page, blocks, session, capsys):
    assert run(page, [b for b in blocks if not b.mark])
    printed = words_of(capsys.readouterr().out)
    for shown in (block for block in blocks_of(page) if block.language == "text"):
        assert words_of(shown.code) <= printed


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "blocks"), pages_with("python"))
def test_python_runs_on_a_gpu(page, blocks, session):
    run(page, [b for b in blocks if not b.mark.startswith(FILE)])


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, id=b.mark)
        for page in PAGES
        for b in blocks_of(page)
        if b.language == "python" and b.mark
    ],
)
def test_a_marked_block_needs_a_gpu_or_is_a_file(block):
    if block.mark.startswith(FILE):
        path = ROOT / block.mark.removeprefix(FILE)
        assert path.read_text(encoding="utf-8") == block.code
    else:
        assert block.mark == ON_A_GPU
        assert "cuda" in block.code


@pytest.mark.parametrize(("page", "blocks"), pages_with("json"))
def test_json_is_a_call_or_a_host(page, blocks):
    for block in blocks:
        model = Call if "batch" in json.loads(block.code) else Host
        model.model_validate_json(block.code)


@pytest.mark.parametrize(("page", "blocks"), pages_with("toml"))
def test_toml_can_be_read(page, blocks):
    """test_house holds rows against the schema."""
    for block in blocks:
        assert tomllib.loads(block.code)


@pytest.mark.parametrize(("page", "blocks"), pages_with("bash"))
def test_shell_lines_begin_with_programs_that_are_there(page, blocks):
    for line in [line for block in blocks for line in block.code.splitlines() if line.strip()]:
        for command in re.split(r" && | \| ", line):
            words = shlex.split(command, comments=True)
            assert words[0] in PROGRAMS, line
            if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks"):
                assert list((ROOT / Path(*words[2].split("."))).parent.glob(f"{words[2].split('.')[-1]}*"))
            assert all(
                (ROOT / word).exists() for word in words if re.fullmatch(r"(tests|benchmarks)/\S+", word)
            )


def test_every_block_is_of_a_kind_that_a_test_reads():
    """Blocks without a language are commands and what they print (test_documents, test_house), and trees.

    Those of text are what the Python of their page prints.
    """
    languages = {page.name: {b.language for b in blocks_of(page)} for page in PAGES}
    read = {"", "bash", "json", "python", "text", "toml"}
    assert {name: found - read for name, found in languages.items() if found - read} == {
        "CONTRIBUTING.md": {"diff"}
    }
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * sum(len(blocks_of(page)) for page in PAGES)
