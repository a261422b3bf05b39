# SPDX-License-Identifier: Apache-2.0
"""The requirements of a release: one version, and the steps of `scripts/dev release`."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.release import version

ROOT = Path(__file__).parents[2]
PLACES = {place for place, _ in version.REPEATED}
REPOSITORY = "registry.example.com:5000/slipway"


def dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "dev", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def copy(tmp_path):
    """The files of this checkout that have the version."""
    for name in ("pyproject.toml", "CHANGELOG.md", *PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_version_is_the_same_everywhere():
    assert version.faults(ROOT) == []


def test_another_version_is_found_and_written(copy):
    stated = copy / "pyproject.toml"
    stated.write_text(re.sub(version.STATED, 'version = "9.8.7"', stated.read_text(), flags=re.M))
    assert len(version.faults(copy)) == len(version.REPEATED) + 1
    version.write(copy)
    (left,) = version.faults(copy)
    assert left.startswith("CHANGELOG.md has version ")
    assert left.endswith("pyproject.toml has 9.8.7")
    for name in PLACES:
        before, after = ((it / name).read_text().splitlines() for it in (ROOT, copy))
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        assert len(changed) == [place for place, _ in version.REPEATED].count(name)
        assert all("9.8.7" in line for line in changed)


def test_notes_are_the_changelogs_section(copy):
    changelog = copy / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## [Unreleased]\n\n- x\n\n## [0.2.0] - 2027-01-01\n\n### Added\n\n- new\n"
        "\n## [0.1.0] - 2026-11-22\n\n- old\n"
    )
    assert version.notes(copy) == "### Added\n\n- new"


def test_a_version_without_a_date_has_no_notes(copy):
    (copy / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0] - not released\n\n- new\n")
    with pytest.raises(SystemExit, match=r"write the date of the release .* 0\.2\.0"):
        version.notes(copy)


def test_a_changelog_that_starts_no_release_is_named(copy):
    (copy / "CHANGELOG.md").write_text("# Changelog\n")
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md has no line"):
        version.faults(copy)


def test_the_steps_of_a_release():
    ended = dev("release", REPOSITORY, "--print")
    assert (ended.returncode, ended.stderr) == (0, "")
    image = f"{REPOSITORY}:{version.version(ROOT)}"
    steps = ended.stdout.splitlines()
    assert all(it.startswith("+ ") for it in steps)
    order = [
        *(f"+ scripts/build {engine} {image}-{engine}" for engine in ("cpu", "gpu")),
        *(f"+ env IMAGE={image}-{engine} scripts/test image" for engine in ("cpu", "gpu")),
        f"+ docker push {image}-cpu",
        f"+ docker push {image}",
    ]
    assert [it for it in steps if it in order] == order
    made = [it for it in steps if " docs build" in it or " helm package " in it or "+ tar " in it]
    assert len(made) == 3
    pushed = [it.rpartition(":")[2] for it in steps if it.startswith("+ docker push ")]
    signed = [it.rpartition("-OF-")[2] for it in steps if it.startswith("+ cosign sign ")]
    attested = [it.rpartition("-OF-")[2] for it in steps if it.startswith("+ cosign attest ")]
    assert signed == attested == pushed[:-1]
    boms = {it.split()[-1] for it in steps if it.startswith("+ scripts/dev sbom ")}
    assert {it.split("--predicate ")[1].split()[0] for it in steps if "--predicate" in it} == boms


def test_a_dry_run_prints_how_the_commit_is_tagged():
    name = f"v{version.version(ROOT)}"
    steps = dev("release", "tag", "--dry-run").stdout.splitlines()
    assert [it.split()[-1] for it in steps] == [name, name]
    assert [it.split()[1:3] for it in steps] == [["git", "tag"], ["git", "push"]]


def test_a_dry_run_does_all_but_publish(tmp_path):
    """In a copy whose scripts and programs only print their arguments."""
    for name in ("tools/release/release", "tools/release/version.py", "scripts/env.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "CHANGELOG.md", *PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "build" / "site").mkdir(parents=True)
    says = 'echo "ran ${0##*/} $*"\n'
    for name in ("scripts/build", "scripts/test", "scripts/dev", "docker", "helm"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f"#!/bin/sh\necho {tmp_path}/helm\n")
    for it in (*tmp_path.glob("scripts/*"), *tmp_path.glob("*"), tmp_path / ".venv/bin/python"):
        it.chmod(0o755)
    ended = subprocess.run(
        [tmp_path / "tools/release/release", REPOSITORY, "--dry-run"],
        env=os.environ | {"DOCKER": str(tmp_path / "docker"), "ENGINES": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    image = f"{REPOSITORY}:{version.version(ROOT)}"
    ran = [it for it in ended.stdout.splitlines() if it.startswith("ran ")]
    assert ran == [
        f"ran build cpu {image}-cpu",
        "ran test image",
        "ran dev docs build",
        "ran helm package deploy/helm/slipway --destination dist",
        f"ran dev sbom {image}-cpu dist/slipway-{version.version(ROOT)}-cpu.cdx.json",
    ]
    assert f"+ {tmp_path}/docker push {image}-cpu" in ended.stdout
    assert [it.name for it in (tmp_path / "dist").iterdir()] == [
        f"slipway-{version.version(ROOT)}-docs.tar.gz"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"{REPOSITORY}:1.0"], "a repository without a tag"),
        (["--dry-run"], "a repository without a tag"),
        ([REPOSITORY, "--dryrun"], "--dryrun: there is no such option"),
        ([], "Release what is checked out"),
    ],
)
def test_what_cannot_be_released_is_said(arguments, message):
    ended = dev("release", *arguments)
    assert ended.returncode != 0
    assert message in ended.stdout + ended.stderr


def test_every_step_of_a_workflow_is_a_script_that_is_there():
    lines = [
        line
        for file in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in file.read_text().splitlines()
    ]
    used = {it for line in lines for it in re.findall(r"scripts/[\w./]+", line)}
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "uses: ./.github/workflows/ci.yml" in release
    assert "scripts/test nightly" in release
    assert "needs: [suite, nightly]" in release
    assert used >= {"scripts/check", "scripts/test", "scripts/build", "scripts/dev"}
    assert [it for it in used if not (ROOT / it).is_file()] == []
    actions = [line for line in lines if "uses:" in line and "uses: ./" not in line]
    assert [it for it in actions if not re.search(r"@[0-9a-f]{40} # v[\d.]+$", it)] == []
