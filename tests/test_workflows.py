"""The workflows call what runs anywhere: targets of the Makefile and scripts in .ci/."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import launch

ROOT = launch.ROOT
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# An action is a commit, which nobody can change, with its version for who reads it.
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_says_what_never_ran_and_pins_its_actions(workflow):
    text = workflow.read_text()
    comment = text[: text.index("name:")]
    assert "never run" in comment
    used = re.findall(r"uses: .*", text)
    assert [line for line in used if not PINNED.match(line)] == []
    assert len(used) >= sum("uses" in step for step in steps(workflow))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_step_is_a_target_or_a_script(workflow):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(workflow):
        for command in re.split(r" && |\n", step.get("run", "true").strip()):
            words = command.split()
            if words[0] == "make":
                assert words[1].startswith("${{") or words[1] in targets, command
            elif words[0].startswith(".ci/"):
                assert os.access(ROOT / words[0], os.X_OK), command
            else:
                assert words[:2] == ["sudo", "apt-get"] or words == ["true"], command


@pytest.mark.parametrize(
    ("tag", "code", "said"),
    [("v{}", 0, ""), ("v9.{}", 1, "pyproject.toml has another version")],
)
def test_a_tag_is_the_version(tag, code, said):
    declared = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', declared, re.M)
    done = subprocess.run(
        [ROOT / ".ci" / "check-tag", tag.format(version)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
