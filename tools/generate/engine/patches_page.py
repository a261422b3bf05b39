# SPDX-License-Identifier: Apache-2.0
"""Write docs/explanation/patches.md from the patches, or check that it is fresh."""

from collections.abc import Iterator

from serving.engine.versions.table import NAMES, read
from serving.patching.patch import CACHE_SERVER, ENGINE, HTTP, SERVER, Patch
from tools.engines.judge import PATCHES
from tools.generate.files import ROOT, written

PAGE = ROOT / "docs" / "explanation" / "patches.md"
ROOMS = {
    SERVER: "serving/engine/patches/frontend",  # and outputs, beside it
    ENGINE: "serving/engine/patches/engine_core",
    CACHE_SERVER: "serving/kv_cache/patches",
    HTTP: "serving/http/patches",
}
INTRODUCTION = """\
# Patches of vLLM, LMCache and uvicorn

<!-- Written by tools/generate/engine/patches_page.py from the patches; do not edit. -->

Slipway replaces some private functions of its libraries, and relies on others. Each patch is a file
in the folder of its process. It lists the names that it needs: functions with their parameters, and
attributes of classes. Before a process applies its patches, it compares these names with the
installed libraries.

- A patch **fails closed** if it separates tenants or adapters, or if answers or limits could be
  wrong without it. If a name is missing, the start is refused. The last line of the log names the
  patch, the name and the installed version.
- Any other patch is **left out** if a name is missing. One line of the log names the patch and the
  consequence.

Patches for adapters come as a vLLM plugin (`serving/engine/patches/engine_core/plugin.py`).
`slipway.dist-info` beside `serving` registers it, and vLLM calls it in each of its processes.
Patches for KV cache tiers come with the connector, which vLLM imports by its path.
"""


VERSIONS = """
## Versions

A start compares the installed versions with `serving/engine/versions/versions.toml`. It warns about
a version that is not supported or that has limits, and refuses a version that does not work.
`scripts/dev engine VERSION` tries another vLLM for CPUs, and `scripts/dev engine VERSION
--unpacked` checks a CUDA wheel by its files. Both run every night with the newest version.

| | supported | tested | limits | does not work |
|---|---|---|---|---|
"""


def page() -> str:
    sections = "".join(_section(process) for process in ROOMS)
    return INTRODUCTION + sections + VERSIONS + "".join(_versions())


def _versions() -> Iterator[str]:
    for package, known in read().items():
        span = known.oldest if known.oldest == known.newest else f"{known.oldest} to {known.newest}"
        told = [
            "; ".join(f"{version}: {what}" for version, what in it.items()) or "none known"
            for it in (known.seen, known.limits, known.broken)
        ]
        yield f"| {NAMES[package]} | {span} | {' | '.join(told)} |\n"


def _section(process: str) -> str:
    rows = [it for it in PATCHES if it.process == process]
    lines = [
        f"\n## In {process}\n",
        f"\nIn `{ROOMS[process]}/`.\n",
        "\n| patch | purpose, and reason | if a name is missing |\n|---|---|---|\n",
        *(f"| {' | '.join(_cells(it))} |\n" for it in rows),
    ]
    return "".join(lines)


def _cells(patch: Patch) -> Iterator[str]:
    yield f"`{patch.name}`"
    upstream = f" Upstream: {_linked(patch.upstream)}." if patch.upstream else ""
    yield f"{patch.does} {patch.why}{upstream}"
    end = "**The start is refused**: without it," if patch.closed else "Left out, with a warning:"
    yield f"{end} {patch.without}."


def _linked(upstream: str) -> str:
    return f"<{upstream}>" if upstream.startswith("https:") else upstream


def main(*, check: bool) -> int:
    return written({PAGE: page().encode()}, check=check)
