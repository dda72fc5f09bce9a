"""Backends of other distributions: `tests/plugin` is one, found by its entry point and run as any other."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.own_tables import put
from support.reference import attend
from support.spy import Spy

import attnroute
from attnroute.cli import main
from attnroute.errors import NoBackendError, PluginWarning, TableError
from attnroute.memory import reset
from attnroute.tables.load import load

EXAMPLE = Path(__file__).parent / "plugin"
PACKAGES = ("toy_attention", "other_attention")
TOML = Path("toy_attention", "tables", "any", "toy.toml")


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    reset()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path with a copy of the example; what was found of it is forgotten."""
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    monkeypatch.undo()
    forget()


def tensors(head_dim=64, *, training=False):
    torch.manual_seed(0)
    return [torch.randn(2, 4, 100, head_dim, requires_grad=training) for _ in range(3)]


def replace(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def second(site, *, entry="other", backend="other"):
    """Install a second plug-in beside the example."""
    package = site / "other_attention"
    shutil.copytree(site / "toy_attention", package, ignore=shutil.ignore_patterns("__pycache__"))
    for scope in ("any", "cpu"):
        (package / "tables" / scope / "toy.toml").rename(package / "tables" / scope / f"{backend}.toml")
    shutil.copytree(site / "toy_attention-1.0.dist-info", site / "other_attention-2.0.dist-info")
    info = site / "other_attention-2.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-attention\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[attnroute.backends]\n{entry} = other_attention.tables\n")
    return package / "tables"


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_runs_where_it_is_named(site, is_causal):
    query, key, value = tensors()
    with Spy() as spy:
        out = attnroute.attention(query, key, value, is_causal=is_causal, backend="toy")
    assert "toy::attention" in spy.seen
    assert spy.backends == {"toy"}
    allowed = torch.ones(100, 100, dtype=torch.bool).tril() if is_causal else None
    want, _ = attend(query, key, value, allowed=allowed)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_overrides_reach_it_and_repairs_are_done_for_it(site):
    query, key, value = tensors()
    with Spy() as spy, attnroute.override(prefer="toy"):
        out = attnroute.attention(query, key[:, :2], value[:, :2])
    assert "toy::attention" in spy.seen
    want, _ = attend(query, key[:, :2], value[:, :2])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_it_is_compiled_as_it_is_decided(site):
    query, key, value = tensors()
    compiled = torch.compile(attnroute.attention, backend="eager", fullgraph=True)
    torch.compiler.reset()
    out = compiled(query, key, value, backend="toy")
    torch.testing.assert_close(out, attnroute.attention(query, key, value, backend="toy"))
    torch.compiler.reset()


def test_it_comes_last_unless_it_says_otherwise_and_explanations_say_why(site):
    decision = attnroute.explain(*tensors())
    assert decision.order[-2:] == ("toy", "math")
    assert decision.verdict("toy").status == "eligible"
    (site / "toy_attention" / "tables" / "cpu" / "arch.toml").write_text(
        '[[prefer]]\nname = "toy-first"\nfirst = ["toy"]\nbecause = "it is the one to try"\n'
        'evidence = [{ kind = "own", ref = "tests/test_plugins.py" }]\n',
        encoding="utf-8",
    )
    forget()
    decision = attnroute.explain(*tensors())
    assert decision.selected == "toy"
    assert decision.why_this_order.startswith("cpu/arch/toy-first")
    assert "it is the one to try" in str(decision)
    with Spy() as spy:
        attnroute.attention(*tensors())
    assert "toy::attention" in spy.seen


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (tensors(136), "any/toy/head-dim-max"),
        (tensors(training=True), "any/toy/inference-only"),
    ],
)
def test_its_own_limits_reject(site, given, rule):
    verdict = attnroute.explain(*given).verdict("toy")
    assert [finding.rule for finding in verdict.blocking] == [rule]
    with pytest.raises(NoBackendError, match=rule):
        attnroute.attention(*given, backend="toy")


def test_its_package_is_looked_for_as_every_other(site):
    assert attnroute.explain(*tensors()).host.versions["toy-attention"] == "1.0"
    (site / "toy_attention" / "backend.py").rename(site / "toy_attention" / "gone.py")
    replace(site / TOML, 'module = "toy_attention.backend"\nprovider', 'module = "toy_attention"\nprovider')
    forget()
    decision = attnroute.explain(*tensors())
    assert decision.verdict("toy").status == "unavailable"
    assert "without its module toy_attention/backend.py" in " ".join(str(decision).split())


def test_the_command_line_knows_it(site, capsys):
    assert main(["tables", "lint"]) == 0
    assert "13 backends" in capsys.readouterr().out
    call = ["explain", "fp32 b1 hq2 sq64 d64", "--arch", "cpu", "--backend", "toy"]
    assert main([*call, "--with", "toy-attention=1.0"]) == 0
    assert "selected   toy: required by the command line" in capsys.readouterr().out
    assert main(["rule", "any/toy/head-dim-max"]) == 0
    assert "nobody tried wider heads" in capsys.readouterr().out


BROKEN = {
    "no folder": (
        lambda site: shutil.rmtree(site / TOML.parent.parent),
        "requires a folder of tables; got toy_a",
    ),
    "no backend": (lambda site: (site / TOML).unlink(), "toy_attention.tables requires any/<backend>.toml"),
    "no TOML": (lambda site: (site / TOML).write_text("[backend"), "requires TOML"),
    "no module": (
        lambda site: replace(
            site / TOML, 'module = "toy_attention.backend"', 'module = "toy_attention.nowhere"'
        ),
        "any/toy.toml: backend.module requires a module that can be imported; got toy_attention.nowhere",
    ),
    "no answer": (lambda site: replace(site / TOML, "\nvmap = ", "\n# vmap = "), "missing are vmap"),
    "a name of ours": (
        lambda site: (site / TOML).rename((site / TOML).with_name("flash.toml")),
        "any/flash.toml requires another name; attnroute has a backend flash itself",
    ),
    "a row about another": (
        lambda site: (site / TOML.parent.parent / "cpu" / "flash.toml").write_text(""),
        "cpu/flash.toml requires the name of one of its backends, toy",
    ),
    "another's preference": (
        lambda site: (site / TOML.parent.parent / "cpu" / "arch.toml").write_text(
            '[[prefer]]\nname = "a"\nfirst = ["math"]\nbecause = "b"\n'
            'evidence = [{ kind = "own", ref = "c" }]\n'
        ),
        "[[prefer]] rows that name its own backends alone; got math",
    ),
    "a shared file of ours": (
        lambda site: put(site / TOML.parent.parent, {"shared/torch_2_8.toml": ""}),
        "shared/torch_2_8.toml requires another name",
    ),
    "a description of ours": (
        lambda site: replace(
            site / TOML, "[features]", '[provider.flash-attn]\nmodule = "toy"\n\n[features]'
        ),
        "provider.flash-attn requires what another file says of it",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_one_is_named_and_breaks_nothing_else(site, capsys, case):
    second(site)
    change, said = BROKEN[case]
    change(site)
    forget()
    with pytest.warns(PluginWarning) as told:
        tables = load()
    (sentence,) = [str(warning.message) for warning in told]
    assert sentence.startswith("the plug-in toy of toy-attention 1.0 is left out: ")
    assert said in sentence
    assert tables.problems == (sentence,)
    assert "toy" not in tables.backends
    assert "other" in tables.backends
    assert attnroute.explain(*tensors()).selected is not None
    assert main(["tables", "lint"]) == TableError.exit_code
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "backend", "what"), [("toy", "other", "name"), ("other", "toy", "backend")]
)
def test_two_with_one_name_are_an_error(site, entry, backend, what):
    second(site, entry=entry, backend=backend)
    forget()
    said = rf"requires a {what} of its own for each plug-in; got toy in .*2\.0 and .*1\.0; uninstall one"
    with pytest.raises(TableError, match=said):
        attnroute.explain(*tensors())


def test_without_an_executor_it_is_an_error_of_the_table(site):
    tables = second(site)
    replace(
        tables / "any" / "other.toml",
        'module = "toy_attention.backend"\nprovider',
        'module = "other_attention"\nprovider',
    )
    forget()
    with pytest.raises(
        TableError, match=r"any/other\.toml: backend\.module requires a module with an Executor"
    ):
        attnroute.attention(*tensors(), backend="other")


UNREADABLE = {
    "an egg without a name": (
        "old.egg-info",
        {"PKG-INFO": "Metadata-Version: 1.0\n", "entry_points.txt": ""},
    ),
    "no metadata": (
        "empty-1.0.dist-info",
        {"entry_points.txt": "[attnroute.backends]\nempty = empty.tables\n"},
    ),
    "bytes that are no text": ("odd-1.0.dist-info", {"METADATA": b"\xff\xfe", "entry_points.txt": b"\xff[x"}),
    "no section": ("bare-1.0.dist-info", {"METADATA": "Name: bare\n", "entry_points.txt": "a = b\n"}),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_other_distributions_with_unreadable_metadata_change_nothing(site, case):
    name, files = UNREADABLE[case]
    (site / name).mkdir()
    for file, text in files.items():
        (site / name / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        assert attnroute.explain(*tensors(), backend="toy").selected == "toy"


def test_a_distribution_that_another_folder_of_the_path_shadows_is_no_second_one(site, tmp_path, monkeypatch):
    older = tmp_path / "older"
    shutil.copytree(site / "toy_attention-1.0.dist-info", older / "toy_attention-0.5.dist-info")
    metadata = "Metadata-Version: 2.1\nName: toy-attention\nVersion: 0.5\n"
    (older / "toy_attention-0.5.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    forget()
    assert attnroute.explain(*tensors(), backend="toy").selected == "toy"
