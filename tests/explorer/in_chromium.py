"""The explorer's page, driven in headless Chromium, says what `decide` says; no page of the site is cut.

`nox -s explorer` builds the site and runs this file, which no other session collects. Chromium and its driver
are found on the path (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from attnroute.cli.matrix import CALLS
from attnroute.engine.decide import decide
from attnroute.errors import ArgumentError
from attnroute.question.line import parse, render
from attnroute.report import sentences
from attnroute.report.json import decision_from_json
from attnroute.tables.load import load
from attnroute.tables.machines import machine
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import published

FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage window-size=1366,900"
)
SITE = Path(os.environ["EXPLORER_SITE"])
RELEASES = published(shipped_folder())
PACKAGES = {
    name: known[-1] for name, known in RELEASES.items() if name not in ("torch", "cuda", "cudnn", "triton")
}
PARTS = ("transformer-engine-torch",)
MORE_CALLS = (
    "bf16 b8 hq32 hkv8 sq2048 skv2048 d128 causal keys-left=2048,1500,2000,1800,900,700,1024,2048",
    "fp16 b2 hq8 hkv8 sq512 skv576 d64 bias=fp16:1x8x512x576 train",
    "bf16 b4 hq64 hkv8 sq1 skv8192 d64 sink compiled shapes_vary",
    "bf16 b1 hq16 hkv16 sq4096 skv4096 d128 any(causal+window=1023,0|prefix=100) lse deterministic",
)
MACHINES = {
    "H200": ("sm_90", {"torch": "2.11.0", **PACKAGES}),
    "B200": ("sm_100", {"torch": "2.13.0", **PACKAGES}),
    "GeForce RTX 5090": ("sm_120", {"torch": "2.15.0"}),
    "A100": ("sm_80", {"torch": "2.8.0", "flash-attn": "2.8.3"}),
    "RTX PRO 6000": ("sm_120", {"torch": "2.14.1", "cudnn": "9.28.1", "flash-attn": "2.8.3"}),
    "x86-64": ("cpu", {"torch": "2.13.0"}),
}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(_Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/explorer/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in (*FLAGS.split(), f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    # Where a host is resolved to nothing, what a page loads from elsewhere is missing here too.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser, address):
    browser.get(address)
    return Page(browser)


class Page:
    """The explorer as a person uses it: what is set, and what can be read then."""

    def __init__(self, browser):
        self.browser = browser
        self.wait()

    def find(self, name):
        return self.browser.find_element("css selector", f"#explorer-{name}")

    def wait(self):
        answered = "return !document.querySelector('#explorer-answer[aria-busy]')"
        WebDriverWait(self.browser, 120, 0.05).until(lambda driver: driver.execute_script(answered))

    def set_machine(self, card, arch, versions):
        self.browser.execute_script(
            "document.querySelectorAll('#explorer-form details').forEach(d => d.open = true)"
        )
        Select(self.find("card")).select_by_value(f"{arch}|{card}")
        self.find("none").click()
        for name in RELEASES:
            Select(self.find(name)).select_by_value(versions.get(name, ""))

    def paste(self, line):
        """Put a line into the box for it, as pasting and leaving the box do."""
        script = "arguments[0].value = arguments[1]; for (const type of ['input', 'change']) "
        script += "arguments[0].dispatchEvent(new Event(type, {bubbles: true}))"
        self.browser.execute_script(script, self.find("line"), line)
        self.wait()

    @property
    def line(self):
        return self.find("line").get_attribute("value")

    @property
    def decision(self):
        return decision_from_json(
            self.browser.execute_script("return document.getElementById('explorer-answer').decision")
        )

    def shown(self):
        """Return what each backend's entry shows: name, status, time, repairs, sentences."""
        script = """
            const parts = ['.explorer-name', '.explorer-status', '.explorer-time', '.explorer-repairs', 'p'];
            return [...document.querySelectorAll('.explorer-verdicts details')].map(entry => [
                ...parts.map(part => entry.querySelector(part).textContent),
                [...entry.querySelectorAll('li')].map(item => item.textContent)])"""
        return self.browser.execute_script(script)


def host_of(card, arch, versions):
    both = {part: versions["transformer-engine"] for part in PARTS if "transformer-engine" in versions}
    host = machine(arch, load(None), argument="", given={**versions, **both})
    return host.model_copy(update={"device_name": card})


def said(verdict, decision):
    """Return what the entry of a backend must show."""
    is_selected = verdict.backend == decision.selected
    time = "" if verdict.predicted_ms is None else f"{float(f'{verdict.predicted_ms:.3g}'):g} ms"
    about = "≈ " if verdict.prediction is not None and verdict.prediction.kind == "inferred" else ""
    return [
        verdict.backend,
        "selected" if is_selected else verdict.status,
        about * bool(time) + time,
        f"after {', '.join(verdict.repairs)}" if verdict.repairs else "",
        sentences.status(verdict, decision),
        [sentences.finding(found) for found in sentences.findings(verdict)],
    ]


def rounded(decision):
    """Return a decision as data, times to 12 digits: another C library may round a power otherwise."""

    def round_all(value):
        if isinstance(value, dict):
            return {name: round_all(part) for name, part in value.items()}
        if isinstance(value, list):
            return [round_all(part) for part in value]
        return float(f"{value:.12g}") if isinstance(value, float) else value

    # What the page was not told about the machine it assumed, and says so; here it was told.
    return round_all(decision.model_dump(mode="json", exclude={"host": {"assumed"}}))


def assert_page_says(page, decision):
    assert rounded(page.decision) == rounded(decision)
    for shown, expected in zip(
        page.shown(), (said(v, decision) for v in sentences.arranged(decision)), strict=True
    ):
        shown[4] = shown[4].partition(": ")[2].removesuffix(".")
        assert shown == expected
    text = page.find("answer").text
    assert text.startswith(decision.selected or "none")
    assert all(sentences.hint(found, decision.selected) in text for found in decision.hints)
    assert sentences.stock(decision.stock, decision) in text


@pytest.mark.parametrize("card", MACHINES)
def test_answers_are_those_of_decide(page, card):
    arch, versions = MACHINES[card]
    page.set_machine(card, arch, versions)
    host = host_of(card, arch, versions)
    for line in (*CALLS.values(), *MORE_CALLS):
        page.paste(line)
        assert_page_says(page, decide(parse(line), host, advise=True))
        assert parse(page.line) == parse(line)


def test_the_form_writes_every_line_back(page):
    """Each control is set from the words that it writes, so that the form goes on from a pasted line."""
    for line in (*CALLS.values(), *MORE_CALLS):
        page.paste(line)
        Select(page.find("layout")).select_by_visible_text("bshd")
        page.wait()
        assert render(parse(page.line)) == render(parse(f"{line} bshd"))


def test_a_call_that_means_nothing_gets_the_sentence_of_the_error(page):
    page.paste("bf16 b1 hq3 hkv2 sq64 d64")
    with pytest.raises(ArgumentError) as error:
        parse("bf16 b1 hq3 hkv2 sq64 d64")
    assert page.find("answer").text == str(error.value)


def test_keys_alone_are_enough(page):
    """Tab goes from control to control, and what is typed and pressed there is answered."""
    page.set_machine("H100", "sm_90", {"torch": "2.13.0"})
    page.paste("bf16 b1 hq8 hkv8 sq64 skv64 d64")
    page.find("b").send_keys(Keys.CONTROL, "a")
    page.find("b").send_keys("4", Keys.TAB, "16", Keys.TAB, "2")
    for _ in range(5):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
    page.browser.switch_to.active_element.send_keys(Keys.SPACE)
    page.wait()
    expected = parse("bf16 b4 hq16 hkv2 sq64 skv64 d64 train")
    assert parse(page.line) == expected
    assert_page_says(page, decide(expected, host_of("H100", "sm_90", {"torch": "2.13.0"}), advise=True))


def set_screen(browser, width, scheme="light"):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


@pytest.mark.parametrize("width", [390, 1366])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_of_an_answer_is_cut(browser, page, width, scheme):
    set_screen(browser, width, scheme)
    page.paste(CALLS["training"])
    script = """document.querySelectorAll('.explorer details').forEach(d => d.open = true);
        const isCut = e => e.getBoundingClientRect().right > document.documentElement.clientWidth;
        return [...document.querySelectorAll('.explorer *:not(option)')]
            .filter(e => e.offsetParent && isCut(e)).map(e => e.outerHTML)"""
    assert browser.execute_script(script) == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_rows_lead_to_their_entries(page):
    """Each row that an answer names is a link to a heading of the reference, and each backend to its page."""
    page.set_machine("H100", "sm_90", {"torch": "2.11.0"})
    found = set()
    for line in (*CALLS.values(), *MORE_CALLS):
        page.paste(line)
        script = "return [...document.querySelectorAll('#explorer-answer a')].map(link => link.href)"
        found.update(page.browser.execute_script(script))
    assert len(found) > 40
    for link in found:
        path, _, mark = link.partition("#")
        text = (SITE / path.split("/", 3)[3] / "index.html").read_text(encoding="utf-8")
        assert not mark or f'id="{mark}"' in text, link


def test_the_address_of_an_answer_gives_it_again(browser, page):
    page.set_machine("A100", "sm_80", {"torch": "2.8.0", "flash-attn": "2.8.3"})
    page.paste("bf16 b1 hq8 hkv8 sq64 skv64 d64 causal train")
    before = page.decision
    browser.get(browser.current_url)
    again = Page(browser)
    assert again.decision == before
    assert render(before.call) == render(parse(again.line))


def test_nothing_came_from_elsewhere_and_nothing_failed(browser, page):
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("http://127.0.0.1:")] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_page_says_what_it_loads():
    size = sum(path.stat().st_size for path in (SITE / "explorer" / "runtime").iterdir())
    assert f"{size / 1e6:.0f} MB as files" in (SITE / "explorer" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [390, 1366])
def test_no_page_is_cut_or_loads_from_elsewhere(browser, address, width):
    """Code and tables fit at 1366 pixels; on a phone code does, and a page is never wider than the screen."""
    set_screen(browser, width)
    parts = "article pre code, article .md-typeset__scrollwrap" if width > 1000 else "article pre code"
    script = f"""return [document.documentElement.scrollWidth > innerWidth,
        [...document.querySelectorAll('{parts}')].filter(e => e.scrollWidth > e.clientWidth + 1).length,
        performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length]"""
    pages = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
    assert len(pages) > 40
    for name in pages:
        browser.get(f"{address.removesuffix('explorer/')}{name}/")
        assert browser.execute_script(script) == [False, 0, 0], name
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
