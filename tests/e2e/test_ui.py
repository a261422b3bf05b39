# SPDX-License-Identifier: Apache-2.0
"""The page for people over the real engine, with keys, tiers and adapters, and over the router."""

import re
import time

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright

from tests.e2e.conftest import serving
from tests.support.models import tiny_lora
from tests.support.programs import chromium

ADMIN = "the-key-of-the-operator"
KEYS = {"OPTION_API_KEY": "the-key-of-all", "OPTION_ADMIN_API_KEY": ADMIN}
DOCUMENT = "The import statement is one of many that bind names. " * 60


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(**chromium())


@pytest.fixture(scope="module")
def opened(browser):
    """Opens the page of a server, with the admin key."""
    context = browser.new_context()

    def opened(it, view=""):
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.goto(f"{it.url}/ui{view}")
        page.get_by_label("Key").fill(ADMIN)
        page.get_by_label("Key").press("Enter")
        return page

    yield opened
    context.close()


@pytest.fixture(scope="module")
def served(tiny_options, tmp_path_factory):
    """A server that is starting."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "lmcache.yaml").write_text("max_local_cpu_size: 0.5\n")
    options = {**tiny_options, **KEYS, "OPTION_ENABLE_LORA": "true"}
    options["OPTION_ADAPTER_ROOTS"] = str(folder)
    tiny_lora.write(folder / "poet", 1)
    lmcache = str(folder / "lmcache.yaml")
    with serving(folder / "log", **options, OPTION_LMCACHE_CONFIG_FILE=lmcache) as it:
        while True:
            try:
                it.client.get("/ping")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield it


@pytest.fixture(scope="module")
def page(opened, served):
    """The server's page, opened while it starts."""
    it = opened(served)
    expect(it.get_by_role("heading", name="Starting, for")).to_be_visible()
    expect(it.locator("li[aria-current=step]")).to_be_visible()
    served.ready()
    expect(it.locator("#stage")).to_have_text("ready", timeout=30_000)
    return it


def say(page, text):
    """Send a message. Returns the complete answer as the page shows it."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    answer = page.get_by_role("article", name="Model").last
    expect(answer).not_to_have_attribute("aria-busy", "true", timeout=60_000)
    return answer.inner_text()


def test_the_plan_has_each_figure_with_its_reason(page):
    page.get_by_role("link", name="Plan").click()
    for what in ("model", "KV per token", "memory", "KV tier L1"):
        expect(page.locator("#plan-table").get_by_text(what, exact=True).first).to_be_visible()
    expect(page.locator("#started li")).not_to_have_count(0)


def test_a_chat_with_the_model_and_an_adapter(page, served):
    page.get_by_role("link", name="Adapters").click()
    page.get_by_label("Name").fill("poet")
    page.get_by_label("Source").fill(str(served.log.with_name("poet")))
    page.get_by_role("button", name="Register").click()
    row = page.locator("#adapter-table tr", has_text="poet")
    expect(row).to_contain_text("loaded", timeout=30_000)
    page.get_by_role("link", name="Chat").click()
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("8")
    first = say(page, DOCUMENT)
    assert "first token" in first
    assert "tokens/s" in first
    assert ", 0 cached" in first
    page.get_by_role("button", name="New chat").click()
    again = say(page, DOCUMENT)
    assert ", 0 cached" not in again
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Model or adapter").select_option("poet")
    assert ", 0 cached" in say(page, DOCUMENT)
    page.get_by_role("link", name="Activity").click()
    for title in ("Time to first token", "Inter-token latency", "Prompt tokens found in caches"):
        figure = page.locator("figure", has_text=title)
        expect(figure.locator("b").first).to_have_text(re.compile("[0-9]"), timeout=10_000)
    expect(page.locator("#requests")).to_contain_text("poet")


def test_the_router_serves_the_page_of_its_replicas(opened, page, served, tmp_path_factory):
    log = tmp_path_factory.mktemp("routed") / "log"
    options = {"OPTION_ROUTER_REPLICAS": served.url, **KEYS}
    with serving(log, "./entrypoint.sh", "route", **options) as it:
        it.ready()
        routed = opened(it, "#replicas")
        expect(routed.get_by_role("row", name=served.url)).to_contain_text("ready")
        routed.get_by_role("link", name="Chat").click()
        assert "first token" in say(routed, "An import")
        routed.get_by_role("link", name="Adapters").click()
        routed.get_by_role("button", name="Remove poet").click()
        routed.get_by_role("button", name="Remove poet").click()
        expect(routed.locator("#adapters-said")).to_have_text("poet is removed")
        routed.close()
    listed = served.client.get("/adapters", headers={"x-api-key": ADMIN}).json()
    assert listed["adapters"] == []
