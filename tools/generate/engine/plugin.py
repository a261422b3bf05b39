# SPDX-License-Identifier: Apache-2.0
"""Write slipway.dist-info from pyproject.toml, or check that it is fresh. vLLM finds Slipway's
plugin by it.

An installation would write it, but Slipway runs from a folder and is never installed.
"""

import tomllib

from tools.generate.files import ROOT, written

FOLDER = ROOT / "slipway.dist-info"


def main(*, check: bool) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    lines = []
    for group, plugins in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{plugin} = {place}" for plugin, place in plugins.items())]
    files = {
        FOLDER / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        FOLDER / "entry_points.txt": "\n".join(lines) + "\n",
    }
    return written({file: text.encode() for file, text in files.items()}, check=check)
