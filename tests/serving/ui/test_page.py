# SPDX-License-Identifier: Apache-2.0
"""The page for people: the served files, and their behaviour in a real Chromium. The engine is a
fake.
"""

import asyncio
import json
from typing import Any

import pytest
from playwright.async_api import async_playwright, expect
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from lmi_config.options.declared import Settings
from serving.engine.base import EngineError
from serving.ui.page import FILES
from tests.serving.conftest import running
from tests.serving.lora.test_registry import registry, write
from tests.serving.router.conftest import routing
from tests.support.harness.wait import until_async
from tests.support.programs import chromium

pytestmark = pytest.mark.anyio

KEY, ADMIN = "the-key-of-all-clients", "the-key-of-the-operator"
HOSTILE = "<img src=x onerror=document.title='owned'>"
VIEWS = ("Chat", "Activity", "Adapters", "Plan")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


# The served files


@pytest.mark.parametrize(
    ("served", "settings"),
    [
        (True, {}),
        (True, {"host": "::1"}),
        (True, {"host": "localhost"}),
        (True, {"host": "0.0.0.0", "ui": True}),
        (True, {"secure_mode": True, "ui": True}),
        (False, {"host": "0.0.0.0"}),
        (False, {"host": "10.0.0.1"}),
        (False, {"host": "app.example"}),
        (False, {"secure_mode": True}),
        (False, {"ui": False}),
    ],
)
def test_there_is_a_page_on_a_laptop_and_elsewhere_where_it_is_asked_for(served, settings):
    assert Settings(**settings).serves_ui is served


async def test_the_page_needs_no_key_and_what_it_shows_an_admin_key():
    keys: dict[str, Any] = {"api_key": KEY, "admin_api_key": ADMIN}
    async with running(**keys) as server, routing(1, **keys) as router:
        for it in (server, router):
            for path in FILES:
                answer = await it.client.get(path)
                assert answer.status_code == 200
                policy = answer.headers["content-security-policy"]
                assert policy.startswith("default-src 'none';")
                assert "unsafe" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert (await it.client.head(path)).content == b""
                refused = await it.client.post(path)
                assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
            for headers, status in (({}, 401), (bearer(KEY), 403), (bearer(ADMIN), 200)):
                answer = await it.client.get("/ui/status", headers=headers)
                assert answer.status_code == status
            assert (await it.client.post("/ui/status", headers=bearer(ADMIN))).status_code == 405
            for path in ("/ui", "/ui/status"):  # from another name of this machine
                answer = await it.client.get(path, headers={"host": "evil.example"})
                assert answer.status_code == 403


async def test_without_the_page_there_is_nothing_in_its_place():
    async with running(ui=False) as server, routing(1, ui=False) as router:
        for it in (server, router):
            for path in (*FILES, "/ui/status"):
                assert (await it.client.get(path)).status_code == 404


async def test_the_status_says_what_the_start_is_at_and_whose_requests_are_there(tmp_path):
    async with running(wait=False, api_key=KEY) as it:
        it.may_start.clear()
        await it.client.get("/ping")
        status = (await it.client.get("/ui/status", headers=bearer(KEY))).status_code
        assert status == 403  # with keys, a client's key gives no administration
        it.may_start.set()
    async with running(wait=False) as it:
        it.may_start.clear()
        await until_async(lambda: it.server.lifecycle.detail == "pretending")
        found = (await it.client.get("/ui/status")).json()
        reached = {step["step"] for step in found["steps"] if step["seconds"] is not None}
        assert (reached, found["requests"]) == ({"beginning", "fetching"}, [])
        it.may_start.set()
        await it.ready()
        asked = [asyncio.create_task(it.invoke({"inputs": "wait"})) for _ in range(7)]
        await until_async(lambda: it.pipeline.waiting == 2)
        found = (await it.client.get("/ui/status")).json()
        rows = [{"tenant": "", "adapter": "", "waiting": 2, "in_flight": 5}]
        assert (found["requests"], found["adapters"]) == (rows, None)
        it.engine.gate.set()
        await asyncio.gather(*asked)
        assert (await it.client.get("/ui/status")).json()["requests"] == []


# The page in a browser


@pytest.fixture(scope="module")
async def browser(anyio_backend):
    async with async_playwright() as playwright:
        it = await playwright.chromium.launch(**chromium())
        yield it
        await it.close()


@pytest.fixture
async def page(browser):
    """A page, which must contact only its own server, and have no faults."""
    context = await browser.new_context()
    it = await context.new_page()
    faults: list[str] = []
    it.on("pageerror", lambda error: faults.append(str(error)))
    it.on("console", lambda said: faults.append(said.text) if "Content" in said.text else None)
    hosts = set()
    it.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    yield it
    await context.close()
    assert faults == []
    assert len(hosts) == 1


async def test_from_the_start_to_a_chat_by_keyboard(page):
    async with running(wait=False) as it:
        it.may_start.clear()
        await page.goto(f"{it.url}/ui")
        await expect(page.get_by_role("status").first).to_have_text("starting")
        await expect(page.get_by_role("heading", name="Starting, for")).to_be_visible()
        await expect(page.locator("li[aria-current=step]")).to_contain_text("fetching")
        await expect(page.get_by_label("Message")).to_be_disabled()
        it.may_start.set()
        await expect(page.get_by_role("status").first).to_have_text("ready")
        await page.get_by_label("Message").focus()
        await page.keyboard.type("a b c")
        await page.keyboard.press("Enter")
        answer = page.get_by_role("article", name="Model")
        await expect(answer).to_contain_text("cba")
        await expect(answer).to_contain_text("first token")
        assert it.engine.bodies[-1]["messages"] == [{"role": "user", "content": "a b c"}]
        # A stopped answer stays, and the engine no longer works on it.
        await page.keyboard.type("wait x")
        await page.keyboard.press("Enter")
        await expect(answer.last).to_contain_text("x")
        await page.keyboard.press("Escape")
        await expect(answer.last).to_contain_text("Stopped.")
        await until_async(lambda: it.engine.running == 0)
        for text, said in (("refuse", "not like this"), ("fault x", "failed")):
            await page.keyboard.type(text)
            await page.keyboard.press("Enter")
            await expect(answer.last).to_contain_text(said)
        # A new chat is empty, even if the one before was still being answered.
        await page.keyboard.type("wait y")
        await page.keyboard.press("Enter")
        await expect(answer.last).to_contain_text("y")
        await page.get_by_role("button", name="New chat").click()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.keyboard.type("z")
        await page.keyboard.press("Enter")
        await expect(answer).to_contain_text("z")
        assert it.engine.bodies[-1]["messages"] == [{"role": "user", "content": "z"}]


async def test_nothing_that_models_or_clients_write_becomes_html(page):
    async with running() as it:
        rows = [{"name": HOSTILE, "src": HOSTILE, "preload": False, "pin": False}]
        labels = f'tenant="{HOSTILE}",adapter="{HOSTILE}",direction="input",cached="false"'

        async def adapters(route):
            await route.fulfill(json={"adapters": rows})

        async def models(route):
            await route.fulfill(json={"data": [{"id": HOSTILE, "parent": "lmi"}]})

        async def metrics(route):
            await route.fulfill(body=f"slipway_tokens_total{{{labels}}} 3\n")

        async def status(route):
            found = await (await route.fetch()).json()
            found["plan"]["rows"], found["plan"]["findings"] = [[HOSTILE] * 3], [HOSTILE]
            await route.fulfill(json=found)

        await page.route("**/adapters*", adapters)
        await page.route("**/v1/models", models)
        await page.route("**/metrics", metrics)
        await page.route("**/ui/status", status)
        await page.goto(f"{it.url}/ui")
        await expect(page.get_by_role("status").first).to_have_text("ready")
        await page.unroute("**/v1/models")
        await page.evaluate("models = [{ id: 'fake' }]")
        await page.get_by_label("Message").fill(HOSTILE)
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_role("article", name="You")).to_have_text(HOSTILE)
        answer = page.get_by_role("article", name="Model")
        await expect(answer).to_contain_text("onerror=document.title='owned'>src=x<img")
        for view, count in (("Activity", 2), ("Adapters", 2), ("Plan", 3)):
            await page.get_by_role("link", name=view).click()
            cells = page.locator("section:visible td", has_text=HOSTILE)
            await expect(cells).to_have_count(count)
        assert await page.locator("img").count() == 0
        assert "owned" not in await page.title()


ODD_TENANTS = (
    *("a\tb", "a\nb", "a\rb", 'a"b', "a\\b", "a\\nb", "\\", '"', "\x00\x1b\x7f", "\xa0\xff"),
    *("\u2028", "\u202eb", "\U0001f600", "{}", "} 5", 'le="5"', "le=", "tenant=", ',adapter="x"'),
    *("__proto__", "constructor", "toString", "other", " ", "a" * 5000, HOSTILE, "#", "NaN"),
)


async def test_the_page_shows_every_tenants_name_and_goes_on(page):
    registry = CollectorRegistry()
    names = ("tenant", "adapter", "direction", "cached")
    tokens = Counter("slipway_tokens", "x", names, registry=registry)
    first = Histogram("vllm:time_to_first_token_seconds", "x", ["tenant"], registry=registry)
    for number, tenant in enumerate(ODD_TENANTS, 1):
        tokens.labels(tenant, "", "input", "false").inc(1000 - number)
        first.labels(tenant).observe(0.1)
    asked = 0

    async def metrics(route):
        nonlocal asked
        asked += 1
        tokens.labels("late", "", "input", "false").inc(asked)
        await route.fulfill(body=generate_latest(registry).decode())

    async with running() as it:
        await page.route("**/metrics", metrics)
        await page.goto(f"{it.url}/ui#activity")
        await expect(page.locator("#requests tbody tr")).to_have_count(len(ODD_TENANTS) + 1)
        cells = page.locator("#requests tbody tr td:first-child")
        shown = await cells.evaluate_all("found => found.map((it) => it.textContent)")
        assert shown[:-1] == [*ODD_TENANTS]
        before = asked
        await until_async(lambda: asked >= before + 2)
        assert await page.evaluate("samples.at(-1).series.get('slipway_tokens_total')") > 0


async def test_a_look_that_fails_is_followed_by_another(browser):
    context = await browser.new_context()
    page = await context.new_page()
    told: list[str] = []
    page.on("console", lambda said: told.append(said.text))
    async with running() as it:
        await page.goto(f"{it.url}/ui")
        await expect(page.get_by_role("status").first).to_have_text("ready")
        await page.evaluate(
            "() => { window.whole = showStart; showStart = () => { throw Error('odd') } }"
        )
        await until_async(lambda: any("odd" in it for it in told))
        await page.evaluate("() => { document.title = 'stale'; showStart = window.whole }")
        await expect(page).to_have_title("Slipway: ready")
    await context.close()


async def test_the_browser_itself_refuses_html_and_other_hosts(browser):
    context = await browser.new_context()
    page = await context.new_page()
    async with running() as it:
        await page.goto(f"{it.url}/ui")
        made = (
            "() => { try { document.body.innerHTML = '<b>' } catch (error) { return `${error}` } }"
        )
        assert "TrustedHTML" in await page.evaluate(made)
        asked = """() => new Promise((resolve) => {
            const refused = (event) => resolve(event.violatedDirective);
            document.addEventListener("securitypolicyviolation", refused);
            fetch("http://localhost:1/").then(() => resolve("none"), () => 0);
        })"""
        assert await page.evaluate(asked) == "connect-src"
    await context.close()


async def test_a_key_shows_what_it_may_and_stays_in_its_tab(page):
    async with running(api_key=KEY, admin_api_key=ADMIN) as it:
        await page.goto(f"{it.url}/ui#activity")
        await expect(page.locator("#refused")).to_contain_text("This server has keys")
        charts = page.locator("figure")
        await expect(page.get_by_role("table")).to_have_count(0)  # not even an empty one
        await page.get_by_label("Key").fill("another")
        await page.get_by_label("Key").press("Enter")
        await expect(page.locator("#refused")).to_contain_text("not valid here")
        for key, refusal in ((KEY, "needs an admin key"), (ADMIN, None)):
            await page.get_by_label("Key").fill(key)
            await page.get_by_label("Key").press("Enter")
            if refusal:
                await expect(page.locator("#refused")).to_contain_text(refusal)
                assert await charts.count() == 0
                await page.get_by_role("link", name="Chat").click()
                await expect(page.get_by_label("Message")).to_be_enabled()
                await page.get_by_role("link", name="Activity").click()
            else:
                await expect(page.locator("#refused")).to_be_hidden()
                await expect(charts.first).to_be_visible()
        kept = "[sessionStorage.length, localStorage.length, document.cookie, location.search]"
        assert await page.evaluate(kept) == [1, 0, "", ""]
        await page.reload()
        await expect(charts.first).to_be_visible()


async def test_the_end_is_shown(page):
    async with running(wait=False) as it:
        it.may_start.clear()
        it.start_error = EngineError("the engine did not start: no memory")
        await page.goto(f"{it.url}/ui")
        await expect(page.get_by_role("status").first).to_have_text("starting")
        it.may_start.set()
        await asyncio.wait_for(it.task, 10)
        await expect(page.get_by_role("status").first).to_have_text("unreachable")
        await expect(page.locator("#start")).to_be_visible()


async def test_draining_is_shown(page):
    async with running() as it:
        await page.goto(f"{it.url}/ui")
        await expect(page.get_by_role("status").first).to_have_text("ready")
        asked = asyncio.create_task(it.invoke({"inputs": "wait"}))
        await until_async(lambda: it.engine.running == 1)
        it.server.stop()
        await expect(page.get_by_role("status").first).to_have_text("draining")
        await expect(page.get_by_label("Message")).to_be_disabled()
        it.engine.gate.set()
        assert (await asked).status_code == 200


async def test_an_adapter_is_shown_as_it_is_loaded_and_why_it_cannot_be(page, tmp_path):
    async with running() as it:
        it.pipeline.adapters = registry(it.engine, tmp_path / "adapters")
        for name in ("lawyer", "poet"):
            src = str(write(tmp_path / "adapters" / name))
            await it.client.post("/adapters", params={"name": name, "src": src})
        await page.goto(f"{it.url}/ui#adapters")
        row = page.get_by_role("row", name="poet")
        await expect(row).to_contain_text("registered")
        it.engine.may_load.clear()
        load = page.get_by_role("button", name="Load poet")
        await load.click()
        await expect(row).to_contain_text("loading")
        it.engine.fails_to_load = True
        it.engine.may_load.set()
        await expect(row).to_contain_text("failed")
        await expect(row).to_contain_text("the engine cannot load it")
        it.engine.fails_to_load = False
        await load.focus()
        await page.evaluate("look()")  # this leaves the focus unchanged
        await page.keyboard.press("Enter")
        await expect(row).to_contain_text("loaded")
        await expect(row).not_to_contain_text("cannot")
        await expect(page.get_by_role("row", name="lawyer")).to_contain_text("registered")


async def test_it_fits_a_phone(page):
    async with running() as it:
        await page.set_viewport_size({"width": 360, "height": 640})
        await page.goto(f"{it.url}/ui")
        for view in VIEWS:
            await page.get_by_role("link", name=view).click()
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, view


async def test_the_router_shows_its_replicas(page):
    async with routing(2) as it:
        await page.goto(f"{it.url}/ui#replicas")
        for replica in it.fleet:
            await expect(page.get_by_role("row", name=replica.url)).to_contain_text("ready")
        await expect(page.get_by_role("link", name="Plan")).to_be_hidden()


async def test_a_large_fleet_is_shown_in_pages(page):
    row = {
        **{"role": "both", "kept_from_requests": False, "requests_under_way": 0, "detail": ""},
        **{"prompt_tokens_queued": 0, "models": ["lmi"], "adapters": 0, "kv_cache_tokens": 9},
        **{"kv_tier_tokens": {}, "state": "ready"},
    }

    async def page_of(route):
        start = int((route.request.url.partition("start=")[2]) or 0)
        rows = [{"replica": f"http://r{n}", **row} for n in range(start, min(start + 200, 250))]
        told = {"replicas": rows, "warnings": [], "count": 250, "next": None if start else 200}
        await route.fulfill(body=json.dumps(told))

    async with running() as it:
        await page.route("**/ui/status*", page_of)
        await page.route("**/metrics", lambda route: route.fulfill(body=""))
        await page.goto(f"{it.url}/ui#replicas")
        await expect(page.get_by_text("1 to 200 of 250")).to_be_visible()
        await page.get_by_role("button", name="Next").click()
        await expect(page.get_by_text("201 to 250 of 250")).to_be_visible()
        await expect(page.get_by_role("row", name="http://r249")).to_be_visible()
        await page.get_by_role("button", name="First").click()
        await expect(page.get_by_role("row", name="http://r0", exact=False).first).to_be_visible()
        await expect(page.get_by_text("1 to 200 of 250")).to_be_visible()


async def test_copies_of_one_container_are_shown_with_their_numbers_and_requests(page):
    row = {
        **{"role": "both", "kept_from_requests": False, "requests_under_way": 0, "detail": ""},
        **{"prompt_tokens_queued": 0, "models": ["lmi"], "adapters": 0, "kv_cache_tokens": 9},
        **{"kv_tier_tokens": {"memory": 5_000}},
    }
    rows = [
        {"replica": "http://127.0.0.1:5004", "copy": 0, "state": "ready", **row},
        {"replica": "http://127.0.0.1:5005", "copy": 1, "state": "failed", **row}
        | {"detail": "left out: CUDA error"},
    ]
    counts = ('copy="0",direction="input"', 'copy="1",direction="input"', 'direction="output"')
    labels = 'tenant="a",adapter="",cached="false"'
    tokens = "".join(f"slipway_tokens_total{{{labels},{it}}} 7.0\n" for it in counts)
    async with running() as it:
        body = json.dumps({"replicas": rows, "warnings": []})
        await page.route("**/ui/status", lambda route: route.fulfill(body=body))
        await page.route("**/metrics", lambda route: route.fulfill(body=tokens))
        await page.goto(f"{it.url}/ui#replicas")
        failed = page.get_by_role("row", name="copy 1")
        await expect(failed).to_contain_text("left out: CUDA error")
        await expect(page.get_by_role("row", name="copy 0")).to_contain_text("memory 5,000")
        await page.get_by_role("link", name="Activity").click()
        cells = page.locator("#requests tbody tr td")
        await expect(cells).to_have_text(["a", "base model", "14", "0%", "7"])
