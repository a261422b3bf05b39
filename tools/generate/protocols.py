# SPDX-License-Identifier: Apache-2.0
"""Write the Python modules of the .proto files in serving/, or check that they are fresh."""

import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

from tools.generate.files import ROOT, written

LICENCE = b"# SPDX-License-Identifier: Apache-2.0\n"


def generated(source: Path) -> dict[Path, bytes]:
    """The modules of one .proto file: file → content. Raises ValueError if the file is not
    valid.
    """
    with tempfile.TemporaryDirectory() as folder:
        code = protoc.main(
            [
                "protoc",
                f"-I{ROOT}",
                f"-I{resources.files('grpc_tools') / '_proto'}",
                f"--python_out={folder}",
                f"--pyi_out={folder}",
                str(source),
            ]
        )
        if code:
            raise ValueError(f"{source} was not understood")
        made = [it for it in Path(folder).rglob("*") if it.is_file()]
        return {ROOT / it.relative_to(folder): LICENCE + it.read_bytes() for it in sorted(made)}


def main(*, check: bool) -> int:
    sources = sorted((ROOT / "serving").rglob("*.proto"))
    files = {file: it for source in sources for file, it in generated(source).items()}
    return written(files, check=check)
