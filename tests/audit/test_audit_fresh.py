"""Published releases beside the known ones, and what pip's words are taken for. pip itself is not run."""

from __future__ import annotations

import subprocess

import pytest
from support.wheels import put_wheel

from attnroute.audit import fresh, packages
from attnroute.cli import main
from attnroute.errors import PackageError
from attnroute.tables.read import read, shipped_folder
from attnroute.tables.releases import FILE, ReleaseTable

TABLE = read(shipped_folder() / FILE, ReleaseTable)


@pytest.fixture
def index(monkeypatch):
    """Answer for pip, by distribution, and note what it was asked."""
    asked = []

    def use(answers, code=0):
        def pip(*words):
            asked.append(words)
            out, err = answers(words[-1])
            return subprocess.CompletedProcess(words, code or int(not out), out, err)

        monkeypatch.setattr(packages, "_pip", pip)
        return asked

    return use


def listed(*versions):
    return f"name ({versions[0]})\nAvailable versions: {', '.join(versions)}\n", ""


def known(name):
    """What an index has where everything is known."""
    names = {alias: package for package, aliases in fresh.DISTRIBUTIONS.items() for alias in aliases}
    return listed(*TABLE.known[names.get(name, name)])


def run(capsys):
    code = main(["tables", "audit", "fresh"])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_nothing_is_stale_where_all_is_known(index, capsys):
    asked = index(known)
    code, said, _ = run(capsys)
    assert code == 0
    assert "nobody looked at" not in said
    assert {words[-1] for words in asked} >= {"nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "xformers", "torch"}
    assert "cuda" not in {words[-1] for words in asked}


def test_releases_inside_and_beyond_a_window_are_listed(index, capsys):
    newer = {"torch": ("2.15.9", "2.99.0"), "flash-attn-4": ("4.0.0b999",)}
    index(lambda name: listed(*newer.get(name, ()), *TABLE.known.get(name, TABLE.known["cudnn"])))
    code, said, _ = run(capsys)
    assert code == 1
    assert "nobody looked at 2.15.9, which the tables take for known" in said
    assert "nobody looked at 2.99.0, with which backends are unknown" in said
    assert "flash-attn-4: the newest of 34 is 4.0.0b999" in said


def test_releases_that_no_backend_takes_are_nobodys_business():
    """`known` has the frontend inside of an old torch, from before the one with operators."""
    published, known = {"1.12.0", "1.20.0", "1.29.0", "1.30.0"}, ["1.12.0", "1.29.0"]
    found = fresh.state("nvidia-cudnn-frontend", published, known, "1.33", [">=1.29, <1.33"])
    assert found.inside == ("1.30.0",)


def test_builds_nightlies_and_local_parts_are_no_releases_of_their_own():
    published = {"9.28.1.4", "9.29.0.1.dev5", "9.28.0"}
    assert fresh.state("cudnn", published, ["9.28.0", "9.28.1"], "9.29") == (
        "cudnn",
        2,
        "9.28.1",
        (),
        (),
    )


def test_releases_before_the_first_known_one_are_left_alone():
    assert fresh.state("torch", {"1.13.0", "2.5.0"}, ["2.5.0"], "2.6").published == 1


def test_a_distribution_that_the_index_lacks_is_said_and_no_failure(index, capsys):
    missing = ("", "ERROR: No matching distribution found for flash-attn-3")
    index(lambda name: missing if name == "flash-attn-3" else known(name))
    code, said, _ = run(capsys)
    assert code == 0
    assert "flash-attn-3: not on the index that pip is set to" in said


@pytest.mark.parametrize(
    "words",
    [
        "WARNING: Retrying (Retry(total=0)) after ...\nERROR: No matching distribution found for torch",
        "ERROR: Could not install: proxy says no",
        "",
    ],
)
def test_a_network_that_fails_is_one_sentence_and_no_missing_release(index, capsys, words):
    index(lambda _: ("", words))
    code, _, said = run(capsys)
    assert code == 7
    assert "`pip index versions torch` requires an index that answers; got: " in said
    assert said.count("\n") == 1


def test_a_wheel_is_fetched_once(index, monkeypatch, tmp_path):
    path = put_wheel(
        monkeypatch, tmp_path, "some-package", "1.0", {"some/__init__.py": "x = 1"}, ["torch>=2"]
    )
    asked = index(lambda _: ("", "ERROR: nothing there"))
    assert packages.wheel("some-package", "1.0") == path
    assert asked == []
    assert packages.requirements(path)["torch"].specifier.contains("2.5")
    assert (packages.sources_of(path, tmp_path / "out") / "some" / "__init__.py").read_text(
        "utf-8"
    ) == "x = 1"


def test_a_wheel_that_pip_cannot_fetch_is_one_sentence(index, monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "cache", lambda: tmp_path)
    index(lambda _: ("", "ERROR: nothing there"), code=1)
    with pytest.raises(PackageError, match=r"pip download some==2` requires a wheel .*nothing there"):
        packages.wheel("some", "2")
    assert list((tmp_path / "wheels").iterdir()) == []


def test_an_archive_that_is_cut_off_says_what_to_remove(tmp_path):
    broken = tmp_path / "some-1.0-py3-none-any.whl"
    broken.write_bytes(b"PK")
    with pytest.raises(PackageError, match=r"requires to be a whole wheel; .* remove .*some-1.0"):
        packages.sources_of(broken, tmp_path / "out")
