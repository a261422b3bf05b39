# SPDX-License-Identifier: Apache-2.0
"""Pictures of the page over the real engine: five states, on a desktop in light and dark and on a
phone, and docs/guides/ui.png.

    python -m tests.pictures FOLDER
"""

import argparse
import io
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from serving.access import keys
from tests.support.harness import ports
from tests.support.harness.process import ROOT, ROUTE, SERVE, Program
from tests.support.harness.wait import until
from tests.support.models import tiny, tiny_lora
from tests.support.programs import chromium

ADMIN = "the-key-of-the-operator"
TEAMS = {"search": "", "support": "support-tone", "batch": ""}
"""Keys, and the adapter that each of them uses."""
LOAD_S = 75.0
DESKTOP: dict[str, Any] = {"viewport": {"width": 1100, "height": 800}}
SCREENS: dict[str, dict[str, Any]] = {
    "light": {**DESKTOP, "color_scheme": "light"},
    "dark": {**DESKTOP, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "color_scheme": "light",
    },
}


class Screens:
    """The page on all screens at once. folder: for the pictures."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._folder = folder
        self._contexts = {name: browser.new_context(**it) for name, it in SCREENS.items()}
        self.pages: dict[str, Page] = {}

    def open(self, url: str) -> None:
        for name, context in self._contexts.items():
            page = self.pages[name] = context.new_page()
            page.set_default_timeout(60_000)
            page.goto(f"{url}/ui")
            page.get_by_label("Key").fill(ADMIN)
            page.get_by_label("Key").press("Enter")

    def all(self, what: Callable[[Page], object]) -> None:
        for page in self.pages.values():
            what(page)

    def show(self, view: str) -> None:
        self.all(lambda page: page.get_by_role("link", name=view, exact=True).click())

    def take(self, state: str) -> None:
        for name, page in self.pages.items():
            page.screenshot(path=self._folder / f"{state}-{name}.png", full_page=name != "light")


@contextmanager
def _load(it: Program) -> Iterator[None]:
    """Each team asks about documents, partly about the same ones as before."""
    over = threading.Event()

    def ask(team: str, user: int) -> None:
        with httpx.Client(base_url=it.url, timeout=60) as client:
            for number in itertools.count():
                if over.is_set():
                    return
                document = number // 3 if user else number
                body = {
                    "model": TEAMS[team] or "lmi",
                    "prompt": f"{team} {user} {document}: " + "The import statement binds. " * 60,
                    "max_tokens": 24 if team == "batch" else 48,
                    "stream": True,
                    "ignore_eos": True,
                }
                headers = {"authorization": f"Bearer {team}"}
                client.post("/v1/completions", json=body, headers=headers).raise_for_status()

    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, team, user) for team in TEAMS for user in range(2)]
        try:
            yield
        finally:
            over.set()
        for it_asked in asked:
            it_asked.result()


def _options(folder: Path) -> dict[str, str]:
    (folder / "lmcache.yaml").write_text("max_local_cpu_size: 0.5\n")
    rows = [{"name": team, "sha256": keys.digest(team.encode())} for team in TEAMS]
    (folder / "keys.json").write_text(json.dumps({"keys": rows}))
    return {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "4",
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "2",
        "OPTION_ADAPTER_ROOTS": str(folder),
        "OPTION_API_KEYS_FILE": str(folder / "keys.json"),
        "OPTION_ADMIN_API_KEY": ADMIN,
        "OPTION_ROUTER_SECRET": "secret" * 8,
    }


def _register(it: Program, folder: Path, name: str, seed: int, **more: bool) -> None:
    tiny_lora.write(folder / name, seed)
    body = {"name": name, "src": str(folder / name), **more}
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = httpx.post(f"{it.url}/adapters", json=body, headers=headers, timeout=60)
    answer.raise_for_status()


def _server(screens: Screens, it: Program, folder: Path) -> None:
    until(it.listens)  # long before it is ready
    screens.open(it.url)
    screens.all(lambda page: expect(page.locator("#steps .done")).not_to_have_count(0))
    screens.all(lambda page: expect(page.locator("li[aria-current=step]")).to_be_visible())
    screens.take("1-starting")
    it.ready()
    screens.all(lambda page: expect(page.locator("#stage")).to_have_text("ready", timeout=30_000))
    screens.show("Plan")
    screens.take("2-plan")
    for seed, name in enumerate(("support-tone", "legal-terms", "release-notes", "old-catalogue")):
        _register(it, folder, name, seed, preload=seed == 0)
    screens.show("Activity")
    screens.all(lambda page: page.reload())  # plots begin with the load
    with _load(it):
        time.sleep(LOAD_S)
        screens.take("3-load")
        _for_docs(screens.pages["light"])
    (folder / "old-catalogue" / "adapter_model.safetensors").unlink()
    screens.show("Adapters")
    page = screens.pages["light"]
    page.get_by_role("button", name="Load old-catalogue").click()
    screens.all(lambda page: expect(page.locator(".pill.failed")).to_be_visible())
    (engine,) = it.children("VLLM::EngineCore")
    engine.suspend()
    page.get_by_role("button", name="Load legal-terms").click()
    screens.all(lambda page: expect(page.locator(".pill.loading")).to_be_visible())
    screens.take("4-adapters")
    engine.resume()
    screens.show("Chat")
    for page in screens.pages.values():
        page.get_by_label("Message").fill("import")
        page.get_by_label("Message").press("Enter")
        answer = page.get_by_role("article", name="Model").last
        expect(answer).not_to_have_attribute("aria-busy", "true")
    screens.take("0-chat")


def _router(screens: Screens, it: Program, folder: Path) -> None:
    replicas = f"{it.url},http://127.0.0.1:{ports.free()}"
    options = {**_options(folder), "OPTION_ROUTER_REPLICAS": replicas}
    with Program(*ROUTE, environ=options, log=folder / "log-router") as router:
        router.ready()
        screens.open(router.url)
        screens.show("Replicas")
        screens.all(lambda page: expect(page.locator(".pill.down")).to_be_visible())
        screens.take("5-router")
        screens.show("Activity")
        with _load(router):
            time.sleep(15)
            screens.take("5-router-load")


def _for_docs(page: Page) -> None:
    taken = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    taken.quantize(64, dither=Image.Dither.NONE).save(ROOT / "docs/guides/ui.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        browser = stack.enter_context(sync_playwright()).chromium.launch(**chromium())
        it = stack.enter_context(Program(*SERVE, environ=_options(folder), log=folder / "log"))
        screens = Screens(browser, folder)
        _server(screens, it, folder)
        _router(screens, it, folder)


if __name__ == "__main__":
    main()
