#!/usr/bin/env python3
"""A compute-sanitizer for tests: runs the target and reports what the target asks it to report.

The target asks by appending lines to the file named by FAKE_FAULTS, which stand for faults. The
environment plays the tool's moods: FAKE_VERSION, FAKE_OPTIONS (its help), FAKE_BLIND (sees no
fault), FAKE_SILENT (no summary line), FAKE_DOUBT (a line of the log), FAKE_SPY (a file that
receives each command line as JSON).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main(arguments: list[str]) -> int:
    mood = os.environ
    if arguments == ["--version"]:
        version = mood.get("FAKE_VERSION", "2026.4.0.0")
        sys.stdout.write(f"Some Compute Sanitizer\nVersion {version} (build)\n")
        return 0
    if arguments == ["--help"]:
        sys.stdout.write(mood.get("FAKE_OPTIONS", "--check-tensor-ops arg (=no)"))
        return 0
    if "FAKE_SPY" in mood:
        with open(mood["FAKE_SPY"], "a") as spy:
            spy.write(json.dumps({"arguments": arguments, "environment": dict(mood)}) + "\n")
    options: dict[str, str] = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        options[name] = value
    with tempfile.TemporaryDirectory() as folder:
        faults = os.path.join(folder, "faults")
        code = _run(arguments, faults)
        found = Path(faults).read_text().splitlines() if os.path.exists(faults) else []
    if "FAKE_BLIND" in mood:
        found = []
    with open(options["--log-file"], "w") as log:
        log.write(_log(options["--tool"], found, mood))
    return int(options["--error-exitcode"]) if found else code


def _run(arguments: list[str], faults: str) -> int:
    if "pytest_kernel_claims.planted" in arguments:
        with open(faults, "w") as file:
            file.write(f"planted_{arguments[-1]}\n")
        return 0
    return subprocess.call(arguments, env={**os.environ, "FAKE_FAULTS": faults})


def _log(tool: str, found: list[str], mood: "os._Environ[str]") -> str:
    lines = ["========= COMPUTE-SANITIZER"]
    for kernel in found:
        lines += [
            "========= Invalid __global__ write of size 4 bytes",
            f"=========     at {kernel}+0x90 in kernel.py:12",
        ]
    if "FAKE_DOUBT" in mood:
        lines.append(f"========= {mood['FAKE_DOUBT']}")
    count = f"{len(found)} {'hazards displayed' if tool == 'racecheck' else 'errors'}"
    if "FAKE_SILENT" not in mood:
        kind = "RACECHECK" if tool == "racecheck" else "ERROR"
        lines.append(f"========= {kind} SUMMARY: {count}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
