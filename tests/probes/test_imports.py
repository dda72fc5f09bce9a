"""Whether packages can be imported is found out once, and what cannot be is unavailable with its error."""

from __future__ import annotations

import ast
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.fake_site import EXTENSION, FLASH_ATTN, NEW_CUTE

from attnroute.engine.decide import decide
from attnroute.memory import reset
from attnroute.probes import imports, packages, torch_host
from attnroute.question.line import parse
from attnroute.report.text import render_decision
from attnroute.tables.alternatives import names_in
from attnroute.tables.load import load
from attnroute.tables.providers import Library, Providers, libraries_of

CALL = parse("bf16 b1 hq8 sq512 d128")
COUNTING = "import sys\nsys.flash_attn_imports = getattr(sys, 'flash_attn_imports', 0) + 1\n"
FA3_FILES = {"flash_attn_3/__init__.py": ""}
TABLES = load()
PROVIDERS = TABLES.providers
WITH_LIBRARIES = [backend for backend in TABLES.backends if libraries_of(TABLES, "any", backend)]
XFORMERS_FILES = {"xformers/__init__.py": "", "xformers/flash_attn_3/__init__.py": ""}


def check(backend):
    return imports.check(libraries_of(TABLES, "any", backend), PROVIDERS)


def settle(backend):
    return imports.mark_if_broken(libraries_of(TABLES, "any", backend), PROVIDERS)


def check_installed():
    imports.check_installed([libraries_of(TABLES, "any", backend) for backend in TABLES.backends], PROVIDERS)


@pytest.fixture
def fa4(site, monkeypatch):
    """Return a function that installs FA4 whose interface runs a line of Python."""
    monkeypatch.setattr(sys, "flash_attn_imports", 0, raising=False)

    def install(line=""):
        text = f"import flash_attn.cute.cache_utils\n{COUNTING}{line}\n"
        site.install("flash-attn-4", "4.0.0b36", NEW_CUTE | {"flash_attn/cute/interface.py": text})
        site.install("nvidia-cutlass-dsl", "4.8.1")

    return install


@pytest.mark.parametrize("backend", ["flash", "cudnn", "math", "flex", "chunked", "efficient"])
def test_backends_of_torch_itself_have_nothing_to_import(backend):
    assert check(backend) is None
    assert settle(backend) is None


@pytest.mark.usefixtures("site")
def test_what_is_not_installed_cannot_be_imported():
    said = check("fa2")
    assert said.startswith("importing flash_attn.flash_attn_interface raises ModuleNotFoundError: ")


def test_a_package_that_can_be_imported_is_imported_once(fa4):
    fa4()
    assert check("fa4") is None
    del sys.modules["flash_attn.cute.interface"]
    assert check("fa4") is None
    assert settle("fa4") is None
    assert sys.flash_attn_imports == 1
    assert packages.broken(PROVIDERS) == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sys.no_such_thing", "AttributeError: module 'sys' has no attribute 'no_such_thing'"),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
        ("assert False", "AssertionError"),
        ("raise KeyError", "KeyError"),
        ("raise ValueError('x' * 1000)", "ValueError: " + "x" * 288),
    ],
)
def test_whatever_an_import_raises_is_said_in_one_line_and_not_tried_again(fa4, line, said):
    fa4(line)
    expected = f"importing flash_attn.cute.interface raises {said}"
    assert check("fa4") == check("fa4") == expected
    assert sys.flash_attn_imports == 1
    assert packages.broken(PROVIDERS) == {}


def test_an_interrupt_is_no_fault_of_the_package(fa4):
    fa4("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        check("fa4")
    assert packages.broken(PROVIDERS) == {}
    fa4()
    assert check("fa4") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sys.exit()", "SystemExit"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("sys.exit('no GPU found')", "SystemExit: no GPU found"),
        ("raise SystemExit", "SystemExit"),
        ("quit = type('PanicException', (BaseException,), {}); raise quit('rust')", "PanicException: rust"),
        ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})", "E"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    ],
)
def test_a_package_that_ends_the_process_is_broken(fa4, line, said):
    fa4(line)
    expected = f"importing flash_attn.cute.interface raises {said}"
    assert settle("fa4") == expected
    assert packages.broken(PROVIDERS)["flash-attn-4"] == expected


def test_an_exit_that_a_signal_asks_for_passes(fa4):
    """Who stops a process with SIGTERM must not wait for it because a package was just being imported."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        fa4("import os, signal; os.kill(os.getpid(), signal.SIGTERM); [0 for _ in range(10**6)]")
        with pytest.raises(SystemExit, match="143"):
            check("fa4")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert packages.broken(PROVIDERS) == {}


def test_warnings_as_errors_break_no_package(fa4, recwarn):
    fa4("import warnings; warnings.warn('old')")
    assert check("fa4") is None
    assert not recwarn.list


def on(arch):
    """Return this machine as if it had a card of an architecture."""
    host = torch_host.host_of("cpu", None, PROVIDERS)
    versions = {"torch": "2.11.0", "cudnn": "9.19.0"}
    return host.model_copy(update={"arch": arch}).with_versions(versions)


def test_a_broken_install_is_unavailable_with_its_error(fa4):
    fa4("sys.no_such_thing")
    assert decide(CALL, on("sm_100")).verdict("fa4").status == "eligible"
    said = settle("fa4")
    host = on("sm_100")
    assert host.broken["flash-attn-4"] == said == settle("fa4")
    assert host.versions["flash-attn-4"] == "4.0.0b36"
    found = decide(CALL, host)
    assert found.selected not in ("fa4", "flex_fa4")
    verdict = found.verdict("fa4")
    assert (verdict.status, verdict.missing) == ("unavailable", ("flash-attn-4",))
    text = " ".join(render_decision(found, verbose=True).split())
    assert re.search(r"fa4 unavailable, predicted [^,]+, ", text)
    assert f"needs flash-attn-4, which cannot be used ({said})" in text


def test_hosts_are_the_same_object_until_something_is_marked():
    before = torch_host.host_of("cpu", None, PROVIDERS)
    try:
        assert torch_host.host_of("cpu", None, PROVIDERS) is before
        imports.mark_broken("flash-attn-3", "no such luck")
        assert torch_host.host_of("cpu", None, PROVIDERS).broken["flash-attn-3"] == "no such luck"
    finally:
        reset()
    assert torch_host.host_of("cpu", None, PROVIDERS) == before


def install_fa3(site, *, theirs=None, of_xformers=None):
    """Install FA3 in one or both of its places, each as Python that runs when it is imported."""
    # A compiled module cannot be faked; Python finds one of the same name in its place.
    if theirs is not None:
        site.install("flash-attn-3", "3.0.0", FA3_FILES | {"flash_attn_3/_C.py": theirs})
    if of_xformers is not None:
        site.install("xformers", "0.0.34", XFORMERS_FILES | {"xformers/flash_attn_3/_C.py": of_xformers})


FAILS = "raise OSError('no kernel')\n"


@pytest.mark.parametrize(
    ("theirs", "of_xformers", "broken"),
    [
        ("", FAILS, set()),
        (FAILS, "", set()),
        (None, "", set()),
        (FAILS, None, {"flash-attn-3"}),
        (None, FAILS, {"xformers"}),
        (FAILS, FAILS, {"flash-attn-3", "xformers"}),
    ],
)
def test_fa3_is_broken_where_neither_copy_can_be_imported(site, theirs, of_xformers, broken):
    install_fa3(site, theirs=theirs, of_xformers=of_xformers)
    said = settle("fa3")
    assert packages.broken(PROVIDERS).keys() == broken
    assert (said is None) is not bool(broken)
    for copy in broken:
        assert packages.broken(PROVIDERS)[copy] in said
    verdict = decide(CALL, on("sm_90")).verdict("fa3")
    assert verdict.missing == (("flash-attn-3 | xformers",) if broken else ())


def test_the_second_copy_of_fa3_is_left_alone_once_the_first_is_imported(site):
    install_fa3(site, theirs="", of_xformers=FAILS)
    assert check("fa3") is None
    assert "xformers" not in sys.modules


def test_an_operator_that_is_registered_already_is_not_registered_again(site):
    site.install("other", "1.0", {"flash_attn_3/__init__.py": FAILS})
    given = Library("other", "flash_attn_3", "attnroute_probe_test::fwd")
    providers = Providers({})
    with torch.library._scoped_library("attnroute_probe_test", "DEF") as library:
        library.define("fwd(Tensor x) -> Tensor")
        assert imports.check(((given,),), providers) is None
    other = given._replace(operator="attnroute_probe_test::none")
    assert imports.check(((other,),), providers) == "importing flash_attn_3 raises OSError: no kernel"


def test_only_what_is_installed_is_imported_for_a_probe(fa4, site, capsys):
    fa4("print('welcome')")
    site.install("flash-attn", "2.8.3", FLASH_ATTN | {"flash_attn/flash_attn_interface.py": FAILS})
    check_installed()
    assert packages.broken(PROVIDERS).keys() == {"flash-attn"}
    out, err = capsys.readouterr()
    assert (out, err) == ("", "welcome\n")
    assert not {"cudnn", "transformer_engine", "xformers"} & sys.modules.keys()


def test_nothing_is_imported_whose_files_are_known_to_be_wrong(site):
    site.install("flash-attn", "2.8.3", {"flash_attn/__init__.py": "raise SystemExit\n"})
    check_installed()
    assert packages.broken(PROVIDERS).keys() == {"flash-attn"}
    assert "flash_attn" not in sys.modules


def test_forgetting_looks_again(fa4, site):
    fa4("sys.no_such_thing")
    settle("fa4")
    fa4()
    reset()
    assert torch_host.host_of("cpu", None, PROVIDERS).broken == on("sm_90").broken
    assert settle("fa4") is None
    site.uninstall("flash-attn-4")
    reset()
    assert "flash-attn-4" not in torch_host.versions(PROVIDERS)


def test_every_backend_that_needs_a_package_of_its_own_imports_one():
    own = {name for name, provider in PROVIDERS.by_name.items() if provider.parts}
    needs = {b: set(names_in(info.needs)) for b, info in TABLES.backends.items()}
    assert [backend for backend, names in needs.items() if own & names] == WITH_LIBRARIES


@pytest.mark.parametrize("backend", [name for name in WITH_LIBRARIES if name != "flex_fa4"])
def test_what_is_checked_is_what_the_executor_imports(backend):
    # flex_fa4 leaves the import to torch.
    path = find_spec(TABLES.backends[backend].module).origin
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {one.module for several in libraries_of(TABLES, "any", backend) for one in several} <= words


def test_a_compiled_module_that_is_none_is_an_error_of_its_own(site):
    site.install("flash-attn-3", "3.0.0", FA3_FILES | {f"flash_attn_3/_C{EXTENSION}": "no machine code"})
    assert packages.installed(PROVIDERS) == {"flash-attn-3": "3.0.0"}
    assert settle("fa3").startswith("importing flash_attn_3._C raises ImportError: ")
    assert decide(CALL, on("sm_90")).verdict("fa3").status == "unavailable"
