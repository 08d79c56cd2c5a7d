"""Runs side by side: the matrix of claims and machines, and the counts of a front page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims.claims import merge
from pytest_kernel_claims.claims.__main__ import main
from pytest_kernel_claims.claims.model import SCHEMA

pytestmark = pytest.mark.claim("PLUGIN-CLAIMS", "a claim is verified only when all of it was shown")


def entry(text: str, verdict: str, arches: list[str]) -> dict[str, Any]:
    """A claim of three tests."""
    first, others = {
        "verified": ("passed", "passed"),
        "failed": ("failed", "passed"),
        "partial": ("skipped", "passed"),
        "not run": ("skipped", "skipped"),
    }[verdict]
    rows = {"a": first, "b": others, "c": others}
    return {
        "text": text,
        "arches": arches,
        "verdict": verdict,
        "selected": 3,
        "deselected": 0,
        "whole": True,
        "counts": {"passed": [first, others, others].count("passed")},
        "tests": {test: {"outcome": outcome, "reason": ""} for test, outcome in rows.items()},
    }


def run_file(path: Path, where: str, **verdicts: str) -> str:
    """A claims file; the claims G* need a GPU."""
    machines: dict[str, dict[str, Any]] = {
        "gpu": {"gpu": {"name": "NVIDIA H200", "sm": "sm90", "driver": "580"}, "emulator": None},
        "emulated": {"gpu": None, "emulator": {"name": "ptx_emulator", "sm": ["sm90"]}},
        "cpu": {"gpu": None, "emulator": None},
    }
    found = {
        key: entry(f"text of {key} | bar", verdict, ["sm90"] * key.startswith("G"))
        for key, verdict in verdicts.items()
    }
    about = {"commit": "0123456789abcdef", "dirty": True, "torch": "2.11", "cutlass_dsl": "4.8.1"}
    when = "2026-05-01T10:00:00+00:00"
    run = {"schema": SCHEMA, **about, "when": when, **machines[where], "claims": found}
    name = path / f"{where}{len(list(path.iterdir()))}.json"
    name.write_text(json.dumps(run))
    return str(name)


def test_merge_sets_machines_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        run_file(tmp_path, "cpu", C1="verified", G1="not run", G2="not run", G3="not run"),
        run_file(tmp_path, "emulated", G1="verified", G2="verified"),
        run_file(tmp_path, "gpu", C1="verified", G1="verified"),
    ]
    assert main(["merge", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| claim | statement | NVIDIA H200 (sm90) | emulated sm90 | no GPU |"
    assert lines[2] == r"| C1 | text of C1 \| bar | verified 3/3 |  | verified 3/3 |"
    assert lines[3] == r"| G1 | text of G1 \| bar | verified 3/3 | verified 3/3 | not run 0/3 |"
    assert lines[-3:] == [
        "Verified in emulation only, on no GPU: G2.",
        "",
        "Verified nowhere: G3.",
    ]
    origin = "commit 0123456789ab with local changes, torch 2.11, driver 580, CuTe DSL 4.8.1"
    assert f"- NVIDIA H200 (sm90), {Path(files[2]).name}: {origin}, 2026-05-01" in lines


@pytest.mark.parametrize(
    ("verdicts", "cell"),
    [
        (["verified", "not run"], "verified 3/3"),
        (["verified", "partial"], "verified 3/3"),
        (["not run", "partial"], "partial 2/3"),
        (["verified", "failed", "partial"], "failed 2/3"),
    ],
)
def test_runs_on_one_gpu_share_a_column(tmp_path: Path, verdicts: list[str], cell: str) -> None:
    runs = [merge.load(run_file(tmp_path, "gpu", G1=verdict)) for verdict in verdicts]
    (column,) = merge.columns(runs)
    assert column.cell("G1")[1] == cell


def test_merge_tells_runs_that_state_a_claim_in_other_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latest words are in the table, whatever the order of the files."""
    files = [run_file(tmp_path, where, G1="verified", G2="verified") for where in ("gpu", "cpu")]
    run = json.loads(Path(files[0]).read_text())
    run["claims"]["G1"]["text"] = "what it said before"
    Path(files[0]).write_text(json.dumps(run | {"when": "2026-04-30T10:00:00+00:00"}))
    for order in (files, files[::-1]):
        assert main(["merge", *order]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert r"| G1 | text of G1 \| bar | verified 3/3 | verified 3/3 |" in lines
        told = [line for line in lines if " says of " in line]
        assert told == [f"{Path(files[0]).name} says of G1: what it said before."]


def test_merge_tells_files_of_one_name_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(run_file(tmp_path / folder, "gpu", G1="verified"))
    assert main(["merge", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": commit")[0] for line in lines if ": commit" in line] == [
        f"- NVIDIA H200 (sm90), {file}" for file in files
    ]


def test_a_statement_cannot_break_the_document(tmp_path: Path) -> None:
    file = Path(run_file(tmp_path, "gpu", G1="verified"))
    run = json.loads(file.read_text())
    run["claims"]["G1"]["text"] = f"two\nlines {merge.END} | bar"
    file.write_text(json.dumps(run))
    readme = tmp_path / "README.md"
    readme.write_text(f"{merge.BEGIN}\n{merge.END}\n")
    for _ in range(2):
        assert main(["merge", "--into", str(readme), str(file)]) == 0
        assert (
            r"| G1 | two lines &lt;!-- claims:end --> \| bar | verified 3/3 |" in readme.read_text()
        )


def test_merge_into_a_document(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    file = run_file(data, "gpu", G1="verified")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{merge.BEGIN}\nold\n{merge.END}\nafter\n")
    arguments = ["merge", "--into", str(readme), file]
    assert main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text()
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{merge.BEGIN}\n| claim |")
    assert text.endswith(f"2026-05-01\n{merge.END}\nafter\n")
    assert "old" not in text


def test_merge_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_file(tmp_path, "gpu", G1="verified", G2="verified")
    assert main(["merge", "--leave-out=G2", "--leave-out=G2", file]) == 0
    text = capsys.readouterr().out
    assert "| G1 |" in text
    assert "| G2 |" not in text
    assert text.endswith("\nLeft out by hand: G2.\n")
    with pytest.raises(SystemExit) as stop:
        main(["merge", "--leave-out=G3", file])
    assert stop.value.code == 2
    assert "--leave-out G3: no run has that claim" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "content", "told"),
    [
        ("no markers", None, "expected one <!-- claims:begin -->"),
        (f"{merge.END}{merge.BEGIN}", None, "before <!-- claims:end -->"),
        (f"{merge.BEGIN}{merge.END}", "{}", "expected a claims file of schema"),
        (f"{merge.BEGIN}{merge.END}", "not JSON", "Expecting value"),
    ],
)
def test_merge_refuses(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    document: str,
    content: str | None,
    told: str,
) -> None:
    file = run_file(tmp_path, "gpu", G1="verified")
    if content is not None:
        Path(file).write_text(content)
    readme = tmp_path / "README.md"
    readme.write_text(document)
    with pytest.raises(SystemExit) as stop:
        main(["merge", "--into", str(readme), file])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err
    assert readme.read_text() == document


def test_a_failure_is_told_before_what_another_machine_verified() -> None:
    """In the list under the matrix and on a front page."""
    from pytest_kernel_claims.claims import summary

    def run(machine: str, **verdicts: str) -> dict[str, Any]:
        claims = {key: entry("t", verdict, ["sm90"]) for key, verdict in verdicts.items()}
        gpu = None if machine == "emulated" else {"name": machine, "sm": "sm90", "driver": "1"}
        emulator = {"sm": ["sm90"]} if gpu is None else None
        about = {"commit": None, "dirty": None, "torch": "2", "cutlass_dsl": "4", "file": machine}
        when = "2026-12-01T00:00:00+00:00"
        return {"claims": claims, "gpu": gpu, "emulator": emulator, "when": when, **about}

    runs = [
        run("H200", A="failed", B="verified", C="verified", D="not run"),
        run("H100", A="verified", B="failed", C="verified", D="not run"),
        run("emulated", A="verified", B="verified", C="verified", D="not run"),
    ]
    for order in (runs, runs[::-1]):
        found = merge.standing(order)
        assert (found.failed, found.on_gpu, found.nowhere) == (["A", "B"], ["C"], ["D"])
        assert "\nFailed: A, B.\n\nVerified nowhere: D.\n" in merge.matrix(order)
        lines = list(summary.counts(order))
        assert lines[0] == "4 claims:"
        assert lines[-2:] == ["- 2 (A, B) failed, see their rows;", "- 1 (D) verified nowhere."]
