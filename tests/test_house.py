"""House rules that a machine can check: sizes, names on pages, versions, and what importing costs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import LONGEST_FIRST
from support.golden_files import but_for_newest

import attnroute
from attnroute.cli import main
from attnroute.tables.archs import ArchTable
from attnroute.tables.load import load
from attnroute.tables.preferences import all_preferences
from attnroute.tables.schema import BackendTable, SharedRules

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "attnroute"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "capability_tables").rglob("*.md")]
)
# What a reader or a user sees: pages, and the texts that the package itself prints.
TEXTS = [*PAGES, *MODULES, *sorted((ROOT / "capability_tables").rglob("*.toml"))]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
# The distribution is torch-attnroute; pip given the bare import name would fetch a stranger's package.
INSTALLS_BARE_NAME = re.compile(r"pip3? +install[^\n`&;|#]*(?<![\w/.-])attnroute(?![\w/-])")

SHOWN_COMMAND = re.compile(r"^```\n\$ attnroute (.*?)^```$", flags=re.DOTALL | re.MULTILINE)

WITHOUT_TORCH = """
import sys, pytest
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"{name} may not be imported here")
sys.meta_path.insert(0, Blocked())
"""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring apart: documenting every argument must not be punished."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    return total - len((ast.get_docstring(function, clean=False) or "").splitlines())


def nox_sessions() -> set[str]:
    return {
        function.name
        for function in functions_of(ROOT / "noxfile.py")
        if any("nox.session" in ast.unparse(decorator) for decorator in function.decorator_list)
    }


def in_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_test_imports_another() -> None:
    imported = re.compile(r"^\s*(?:from|import) (?:[\w.]+\.)?test_\w+", re.MULTILINE)
    assert [name_of(path) for path in TESTS if imported.search(path.read_text(encoding="utf-8"))] == []


def test_modules_and_pages_are_found() -> None:
    assert len(MODULES) > 10
    assert ROOT / "README.md" in PAGES


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=name_of)
def test_module_is_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines; split it by job"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    lengths = {function.name: length_of(function) for function in functions_of(path)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_no_text_installs_the_bare_name(path: Path) -> None:
    assert INSTALLS_BARE_NAME.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("command", "is_bad"),
    [
        ("pip install " + "attnroute", True),
        ("python -m pip install -U 'attnroute[torch]'", True),
        ("pip install torch-attnroute", False),
        ('pip install "torch-attnroute[torch]"', False),
        ('pip install -e ".[torch]" && attnroute demo', False),
        ("pip install ./attnroute", False),
    ],
)
def test_the_search_for_the_bare_name_works(command: str, is_bad: bool) -> None:
    assert bool(INSTALLS_BARE_NAME.search(command)) is is_bad


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_sessions_named_on_a_page_exist(path: Path) -> None:
    named = set(re.findall(r"\bnox -s +(\w+)", path.read_text(encoding="utf-8")))
    assert named <= nox_sessions()


def test_readme_gives_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "python -m pip install nox && python -m nox -s demo" in readme
    assert "python -m nox -s tests" in readme


def test_links_between_pages_lead_somewhere() -> None:
    dead = [
        f"{name_of(page)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target.partition("?")[0]).exists()
    ]
    assert dead == []


def test_readme_calls_routed_what_has_a_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|[^|]+\| routed \|$", readme, flags=re.MULTILINE)
    routed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert routed == set(load().backends)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_shown_on_a_page_are_valid(page: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        if "[[rule]]" in block or "[features" in block:
            model = SharedRules if "files = [" in block else BackendTable
            model.model_validate(tomllib.loads(block))
        elif "[[prefer]]" in block:
            ArchTable.model_validate(tomllib.loads(block))


def test_rules_named_on_pages_exist() -> None:
    pattern = re.compile(r"attnroute rule ([a-z0-9_]+/[a-z0-9_]+/[a-z0-9-]+)")
    named = {rule for page in PAGES for rule in pattern.findall(page.read_text(encoding="utf-8"))}
    assert named
    assert named - {row.id for row in (*load().all_rows(), *all_preferences(load()))} == set()


def test_explanations_shown_on_pages_are_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [block for page in PAGES for block in SHOWN_COMMAND.findall(page.read_text(encoding="utf-8"))]
    assert shown
    for block in shown:
        command, _, output = block.partition("\n")
        main(shlex.split(command))
        assert but_for_newest(capsys.readouterr().out) == but_for_newest(output)


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "attnroute/_version.py"
    assert "version" not in project["project"]


def test_installed_version_is_this_version() -> None:
    assert importlib.metadata.version("torch-attnroute") == attnroute.__version__


def test_changelog_speaks_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## \[?(\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    assert newest[:1] == [attnroute.__version__]


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = set(in_fresh_interpreter("import attnroute, sys; print(*sys.modules)").split())
    assert loaded & {"torch", "pydantic", "rich", "attnroute.tables", "attnroute.api"} == set()


def test_importing_the_command_line_leaves_torch_out() -> None:
    loaded = set(in_fresh_interpreter("import attnroute.cli, sys; print(*sys.modules)").split())
    assert "attnroute.cli" in loaded
    assert "torch" not in loaded


def test_explaining_for_a_named_machine_leaves_torch_out() -> None:
    code = (
        "import sys; from attnroute.cli import main\n"
        "try: main(['explain', 'bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train', '--arch', 'sm_90'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    assert in_fresh_interpreter(code).split()[-1] == "False"


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_files_that_begin_first_exist() -> None:
    assert [name for name in LONGEST_FIRST if not (ROOT / "tests" / name).is_file()] == []


def test_what_runs_without_torch_imports_without_it():
    """The session `lowest` has no torch; here one that is there may not be imported."""
    found = re.search(
        r"^TORCH_FREE_TESTS = \((.+)\)$", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE
    )
    paths = re.findall(r'"([^"]+)"', found[1])
    code = WITHOUT_TORCH + f"sys.exit(pytest.main({['-q', '--co', *paths]}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
