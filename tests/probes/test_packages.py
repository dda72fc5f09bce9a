"""What is installed, read off metadata and files: no install may look like another one."""

from __future__ import annotations

import sys
import tempfile
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_site import EXTENSION, FLASH_ATTN, NEW_CUTE, OLD_CUTE, Site, path_of

from attnroute import foreign
from attnroute.memory import reset
from attnroute.probes import packages
from attnroute.probes.packages import Survey
from attnroute.tables.load import load

FA2_8 = FLASH_ATTN | OLD_CUTE


def survey():
    reset()
    return packages.survey(load().providers)


def test_nothing_is_installed(site):
    assert survey() == Survey({}, {})


def test_a_version_is_that_of_the_metadata_and_nothing_is_imported(site):
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    site.install("nvidia-cutlass-dsl", "4.8.1")
    assert survey() == Survey({"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1"}, {})
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


@pytest.mark.parametrize("name", ["flash_attn_3", "flash-attn-3", "Flash_Attn.3"])
def test_a_distribution_is_found_however_it_is_spelled(site, name):
    site.install(name, "3.0.0", {f"flash_attn_3/_C{EXTENSION}": "", "flash_attn_3/__init__.py": ""})
    assert survey() == Survey({"flash-attn-3": "3.0.0"}, {})


def test_fa4_alone_is_not_taken_for_fa2(site):
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    assert "flash-attn" not in survey().versions | survey().broken


def test_the_old_cute_folder_of_fa2_is_not_taken_for_fa4(site):
    site.install("flash-attn", "2.8.3", FA2_8)
    assert survey() == Survey({"flash-attn": "2.8.3"}, {})


def test_fa4_installed_over_fa2_leaves_both(site):
    site.install("flash-attn", "2.8.3", FA2_8)
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    assert survey() == Survey({"flash-attn": "2.8.3", "flash-attn-4": "4.0.0b36"}, {})


def test_fa2_installed_over_fa4_breaks_it(site):
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    site.install("flash-attn", "2.8.3", FA2_8)
    found = survey()
    assert found.versions == {"flash-attn": "2.8.3"}
    assert found.broken == {
        "flash-attn-4": "4.0.0b36 is installed, but flash_attn/cute/interface.py is not that of flash-attn-4,"
        " which installing flash-attn replaces and uninstalling it removes; install flash-attn-4 again, after"
        " it"
    }


def test_uninstalling_fa2_takes_files_of_fa4_along(site):
    site.install("flash-attn", "2.8.3", FA2_8)
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    site.uninstall("flash-attn")
    assert survey().versions == {}
    assert "install flash-attn-4 again" in survey().broken["flash-attn-4"]


def test_fa2_before_fa4_on_the_path_hides_it(site, tmp_path, monkeypatch):
    nearer = Site(tmp_path / "nearer")
    nearer.install("flash-attn", "2.7.4", FLASH_ATTN)
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    monkeypatch.setattr(sys, "path", path_of(nearer.folder, site.folder))
    found = survey()
    assert found.versions == {"flash-attn": "2.7.4"}
    assert "flash_attn/cute has lost files" in found.broken["flash-attn-4"]


def test_parts_of_a_namespace_may_stand_in_two_folders(site, tmp_path, monkeypatch):
    nearer = Site(tmp_path / "nearer")
    nearer.install("other", "1.0", {"flash_attn/other.py": ""})
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    monkeypatch.setattr(sys, "path", path_of(nearer.folder, site.folder))
    assert survey() == Survey({"flash-attn-4": "4.0.0b36"}, {})


OPERATIONS = st.lists(st.sampled_from(["+flash-attn", "-flash-attn", "+flash-attn-4", "-flash-attn-4"]))
FILES = {"flash-attn": ("2.8.3", FA2_8), "flash-attn-4": ("4.0.0b36", NEW_CUTE)}


@given(operations=OPERATIONS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("site")
def test_whatever_was_installed_in_whatever_order_fa4_is_there_with_its_own_files(operations):
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        site, present = Site(folder), set()
        try:
            sys.path[:] = path_of(folder)
            for sign, name in ((o[0], o[1:]) for o in operations):
                if sign == "+" and name not in present:
                    site.install(name, *FILES[name])
                    present.add(name)
                elif sign == "-" and name in present:
                    site.uninstall(name)
                    present.remove(name)
            found = survey()
        finally:
            sys.path[:] = path
        whole = all(_text(site, file) == text for file, text in NEW_CUTE.items() if "__init__" not in file)
    assert ("flash-attn-4" in found.versions) == ("flash-attn-4" in present and whole)
    assert ("flash-attn-4" in found.broken) == ("flash-attn-4" in present and not whole)
    assert ("flash-attn" in found.versions) == ("flash-attn" in present)


def _text(site, file):
    path = site.folder / file
    return path.read_text(encoding="utf-8") if path.is_file() else None


@pytest.mark.parametrize("lost", [f"flash_attn_2_cuda{EXTENSION}", "flash_attn/flash_attn_interface.py"])
def test_fa2_without_its_kernels_is_broken(site, lost):
    site.install("flash-attn", "2.8.3", {name: text for name, text in FLASH_ATTN.items() if name != lost})
    found = survey()
    assert found.versions == {}
    assert found.broken["flash-attn"].startswith("2.8.3 is installed, but ")
    assert lost.removesuffix(EXTENSION) in found.broken["flash-attn"]


def test_kernels_for_another_python_are_none(site):
    files = {f"flash_attn_3/_C{'.cpython-27-x86_64-linux-gnu.so'}": "", "flash_attn_3/__init__.py": ""}
    site.install("flash-attn-3", "3.0.0", files)
    assert survey().versions == {}
    assert "without its compiled kernels" in survey().broken["flash-attn-3"]


def test_a_build_of_fa3_as_an_egg_is_found(site, monkeypatch):
    egg = Site(site.folder / "flash_attn_3-3.0.0-py3-linux-x86_64.egg")
    for path, text in {f"flash_attn_3/_C{EXTENSION}": "", "EGG-INFO/PKG-INFO": "Version: 3.0.0\n"}.items():
        file = egg.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", path_of(egg.folder, site.folder))
    assert survey() == Survey({"flash-attn-3": "3.0.0"}, {})


def test_a_build_on_the_path_without_metadata_has_no_version_and_says_so(site):
    for path in ("flash_attn_3/__init__.py", f"flash_attn_3/_C{EXTENSION}"):
        file = site.folder / path
        file.parent.mkdir(exist_ok=True)
        file.touch()
    found = survey()
    assert found.versions == {}
    assert found.broken == {
        "flash-attn-3": "flash_attn_3._C can be imported, but no metadata says which release it is; install"
        " it with pip"
    }


def test_xformers_counts_where_it_carries_fa3(site):
    site.install(
        "xformers", "0.0.34", {"xformers/__init__.py": "", f"xformers/flash_attn_3/_C{EXTENSION}": ""}
    )
    assert survey() == Survey({"xformers": "0.0.34"}, {})
    site.uninstall("xformers")
    site.install("xformers", "0.0.35", {"xformers/__init__.py": ""})
    assert survey().versions == {}
    assert "0.0.35 is installed, but without FlashAttention-3 in it" in survey().broken["xformers"]


TE = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": ""}


@pytest.mark.parametrize("place", ["", "transformer_engine/", "transformer_engine/wheel_lib/"])
def test_transformer_engine_built_from_source_is_one_distribution(site, place):
    site.install("transformer_engine", "2.16.1", TE | {f"{place}transformer_engine_torch{EXTENSION}": ""})
    expected = {"transformer-engine": "2.16.1", "transformer-engine-torch": "2.16.1"}
    assert survey() == Survey(expected, {})


def test_transformer_engine_from_wheels_is_several(site):
    site.install("transformer_engine", "2.16.1", TE)
    assert survey() == Survey({"transformer-engine": "2.16.1"}, {})
    site.install("transformer_engine_torch", "2.16.1")
    assert survey().versions == {"transformer-engine": "2.16.1"}
    assert "without its compiled module" in survey().broken["transformer-engine-torch"]
    site.install("transformer_engine_torch", "2.16.1", {f"transformer_engine_torch{EXTENSION}": ""})
    assert survey().versions["transformer-engine-torch"] == "2.16.1"


def test_metadata_of_a_system_package_without_a_list_of_files_is_enough(site):
    site.install("flash-attn", "2.8.3", FLASH_ATTN, info="egg-info", record=False)
    assert survey() == Survey({"flash-attn": "2.8.3"}, {})


@pytest.mark.parametrize(
    ("metadata", "got"),
    [("Name: triton\n", "none"), ("", "none"), ("Name: triton\nVersion: unknown\n", '"unknown"')],
)
def test_a_version_that_cannot_be_compared_is_said(site, metadata, got):
    site.install("triton", "3.0", metadata=metadata, record=False)
    found = survey()
    assert found.versions == {}
    assert found.broken["triton"].startswith("its metadata must name a version as PEP 440 has them; ")
    assert f"got {got};" in found.broken["triton"]


def test_metadata_in_another_encoding_breaks_that_package_alone(site):
    site.install("flash-attn", "2.8.3", FLASH_ATTN)
    site.install("triton", "3.0")
    metadata = site.folder / "triton-3.0.dist-info/METADATA"
    metadata.write_bytes("Name: triton\nVersion: 3.0\nAuthor: Jérôme\n".encode("latin-1"))
    found = survey()
    assert found.versions == {"flash-attn": "2.8.3"}
    assert found.broken["triton"].startswith("its metadata and files cannot be read (UnicodeDecodeError: ")


@pytest.mark.parametrize(
    "raised", [RuntimeError("lost"), SystemExit(1), UnicodeDecodeError("a", b"", 0, 1, "b")]
)
@pytest.mark.parametrize("asked", ["distribution", "find_spec"])
def test_whatever_is_raised_while_a_package_is_looked_at_breaks_that_package_alone(
    site, monkeypatch, asked, raised
):
    site.install("flash-attn", "2.8.3", FLASH_ATTN)
    site.install("xformers", "0.0.33", {"xformers/flash_attn_3/_C.py": ""})
    home = packages.metadata if asked == "distribution" else foreign
    real = getattr(home, asked)

    def look(name):
        if name == "xformers":
            raise raised
        return real(name)

    monkeypatch.setattr(home, asked, look)
    found = survey()
    assert found.versions == {"flash-attn": "2.8.3"}
    assert list(found.broken) == ["xformers"]


def test_an_interrupt_while_packages_are_looked_at_passes_and_leaves_nothing(site, monkeypatch):
    site.install("flash-attn", "2.8.3", FLASH_ATTN)

    def stop(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(packages.metadata, "distribution", stop)
        with pytest.raises(KeyboardInterrupt):
            survey()
    assert survey().versions == {"flash-attn": "2.8.3"}


def test_a_version_of_more_digits_than_python_reads_is_said(site):
    site.install("triton", "3.0", metadata=f"Name: triton\nVersion: {'9' * 5000}\n")
    assert "PEP 440" in survey().broken["triton"]


def test_a_folder_of_metadata_that_was_left_empty_raises_nothing(site):
    (site.folder / "triton-3.0.dist-info").mkdir()
    assert survey().versions == {}


def test_a_module_is_located_without_importing_what_is_around_it(site):
    bomb = 'raise RuntimeError("imported")\n'
    site.install("xformers", "1", {"xformers/__init__.py": bomb, "xformers/inner/deep/leaf.py": bomb})
    assert foreign.locate("xformers.inner.deep.leaf").origin.endswith("leaf.py")
    assert foreign.locate("xformers.inner.other") is None
    assert foreign.locate("xformers.inner.deep.leaf.more") is None
    assert foreign.locate("nothing_of_this_name.inner") is None


def test_a_module_without_a_spec_is_found_nowhere(site, monkeypatch):
    # Stand-ins of tests look so.
    stand_in = ModuleType("flash_attn")
    stand_in.__spec__ = None
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    assert foreign.locate("flash_attn.cute") is None
    site.install("flash-attn-4", "4.0.0b36", NEW_CUTE)
    assert "flash-attn-4" in survey().broken


def test_every_distribution_of_the_issue_is_looked_for():
    assert load().providers.by_name.keys() >= {
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "xformers",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "quack-kernels",
        "apache-tvm-ffi",
        "transformer-engine",
        "transformer-engine-torch",
        "triton",
        "transformers",
    }
