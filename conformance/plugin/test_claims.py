"""Claims: from marks and reports to verdicts, the table, the JSON and the matrix."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims import arch, provenance
from pytest_kernel_claims.claims import merge
from pytest_kernel_claims.claims.__main__ import main
from pytest_kernel_claims.claims.model import SCHEMA, Measurement
from pytest_kernel_claims.claims.report import write_json

from .conftest import elsewhere

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = pytest.mark.claim("PLUGIN-CLAIMS", "a claim is verified only when all of it was shown")

ONE = """
    import pytest

    @pytest.mark.claim("A", "text")
    def test_a(): pass
"""


def outcomes(body: str) -> str:
    """A module with fixtures that fail in either phase and one claim over the tests in body."""
    return f"""
import pytest
pytestmark = pytest.mark.claim("A", "text")

@pytest.fixture
def bad_setup(): raise RuntimeError("planted")

@pytest.fixture
def bad_teardown():
    yield
    raise RuntimeError("planted")

def test_sound(): pass
{body}
"""


@pytest.mark.parametrize(
    ("body", "verdict", "counts"),
    [
        ("", "verified", {"passed": 1}),
        ("def test_b(): assert False", "failed", {"passed": 1, "failed": 1}),
        ("def test_b(bad_setup): pass", "failed", {"passed": 1, "error": 1}),
        ("def test_b(bad_teardown): pass", "failed", {"passed": 1, "error": 1}),
        ("def test_b(): pytest.skip('why')", "partial", {"passed": 1, "skipped": 1}),
        ("@pytest.mark.sm90\ndef test_b(): pass", "partial", {"passed": 1, "skipped": 1}),
        (
            "@pytest.mark.xfail\ndef test_b(): assert False",
            "partial",
            {"passed": 1, "xfailed": 1},
        ),
        ("@pytest.mark.xfail\ndef test_b(): pass", "partial", {"passed": 1, "xpassed": 1}),
        (
            "@pytest.mark.xfail(strict=True)\ndef test_b(): pass",
            "failed",
            {"passed": 1, "failed": 1},
        ),
        (
            "@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_b(n): assert n < 3",
            "failed",
            {"passed": 3, "failed": 1},
        ),
    ],
)
def test_verdicts(suite: Suite, body: str, verdict: str, counts: dict[str, int]) -> None:
    claim = suite.write(outcomes(body)).claims()["claims"]["A"]
    assert claim["verdict"] == verdict
    assert claim["counts"] == counts
    assert claim["selected"] == sum(counts.values())


@pytest.mark.parametrize("body", ["pytest.skip('no peer')", "pytest.importorskip('no_such')"])
def test_a_claim_without_a_passing_test_is_not_run(suite: Suite, body: str) -> None:
    suite.write(f"import pytest\n@pytest.mark.claim('A', 'text')\ndef test_a(): {body}\n")
    assert suite.claims()["claims"]["A"]["verdict"] == "not run"


def test_an_early_stop_is_not_verified(suite: Suite) -> None:
    suite.write("""
        import pytest

        @pytest.mark.claim("A", "four rows")
        @pytest.mark.parametrize("n", range(4))
        def test_a(n): pass

        def test_b(): pass
    """)
    assert suite.claims()["claims"]["A"]["verdict"] == "verified"
    suite.pytester.makeconftest("""
        def pytest_runtest_logfinish(nodeid):
            if nodeid.endswith("[1]"):
                session.shouldstop = "planted stop"

        def pytest_sessionstart(session):
            globals()["session"] = session
    """)
    result = suite.run("--claims-json=claims.json")
    claim = suite.json("claims.json")["claims"]["A"]
    assert (claim["verdict"], claim["counts"]) == ("partial", {"not run": 2, "passed": 2})
    result.stdout.fnmatch_lines(["*2 tests of 1 claim: the run ended before it came to them [[]A]"])


def test_deselected_tests_are_named_and_not_counted(suite: Suite) -> None:
    suite.write("""
        import pytest

        @pytest.mark.claim("A", "two rows")
        @pytest.mark.parametrize("n", [1, 2])
        def test_a(n): assert n == 1

        @pytest.mark.claim("B", "other")
        def test_b(): pass
    """)
    found = suite.claims("-k", "1")["claims"]
    assert found.keys() == {"A"}
    assert (found["A"]["verdict"], found["A"]["selected"], found["A"]["deselected"]) == (
        "partial",
        1,
        1,
    )
    assert found["A"]["left_out"] == ["test_it.py::test_a[2]"]
    suite.run("-k", "1").stdout.fnmatch_lines(["A  partial  *1/1  any  two rows (1 deselected)"])


def test_module_class_and_function_claims_add_up(suite: Suite) -> None:
    suite.write("""
        import pytest
        pytestmark = [pytest.mark.claim("M", "module"), pytest.mark.bitwise]

        @pytest.mark.claim("C", "class")
        class TestGroup:
            @pytest.mark.claim("F", "one")
            @pytest.mark.claim(id="G", text="two")
            @pytest.mark.sm90
            def test_in(self): pass

        @pytest.mark.claim("M", "module")
        def test_out(): pass
    """)
    found = suite.on("h200").claims()["claims"]
    assert {key: (claim["text"], claim["selected"]) for key, claim in found.items()} == {
        "M": ("module", 2),
        "C": ("class", 1),
        "F": ("one", 1),
        "G": ("two", 1),
    }
    assert found["G"]["kinds"] == ["bitwise"]
    assert found["G"]["arches"] == ["sm90"]


@pytest.mark.parametrize(
    ("marks", "line"),
    [
        ("claim('A', 'other')", "claim A has two texts: 'text' and (in *test_b) 'other'"),
        ("claim('A')", "*test_b: got claim with ('A',) {}, expected claim(id, text)"),
        ("claim('B', 'text', 3)", "*expected claim(id, text)"),
        ("claim('B', id='C')", "*expected claim(id, text)"),
        ("claim('B', '')", "*expected claim(id, text)"),
    ],
)
def test_a_wrong_claim_stops_the_run(suite: Suite, marks: str, line: str) -> None:
    suite.write(outcomes(f"@pytest.mark.{marks}\ndef test_b(): pass"))
    result = suite.run("--claims-json=claims.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {line}"])
    assert not (suite.pytester.path / "claims.json").exists()


def test_table_and_closing_words(suite: Suite) -> None:
    suite.write("""
        import pytest

        @pytest.mark.claim("LA-1", "needs a GPU")
        @pytest.mark.sm90
        @pytest.mark.parametrize("n", [1, 2])
        def test_a(n): pass

        @pytest.mark.claim("LA-2", "also")
        @pytest.mark.sm90
        def test_b(): pass

        @pytest.mark.claim("LA-30", "measured")
        @pytest.mark.parametrize("n", [2, 4, 3])
        def test_c(n, measured): measured("error", n, limit=5, unit="us")
    """)
    suite.pytester.makepyfile(test_broken="import no_such_module")
    result = suite.run("--continue-on-collection-errors")
    result.stdout.fnmatch_lines(
        [
            "*= claims =*",
            "LA-1   not run       0/2  sm90  needs a GPU (2 skipped)",
            "LA-2   not run       0/1  sm90  also (1 skipped)",
            "LA-30  verified      3/3  any   measured",
            "       worst: error 4 us (limit 5)",
            "3 claims: 1 verified, 2 not run",
            "not shown by this run:",
            "  3 tests of 2 claims: needs sm90; GPU here: none (*) [[]LA-1 LA-2[]]",
            "  claims in 1 module(s) that failed at import are not counted",
        ]
    )


def test_workers_report_as_one(suite: Suite, load_plugin: tuple[str, ...]) -> None:
    pytest.importorskip("xdist")
    suite.write(
        outcomes("""
@pytest.mark.sm90
def test_gpu(): pass

@pytest.mark.claim("B", "rows")
@pytest.mark.parametrize('n', range(5))
def test_rows(n, measured, codegen):
    measured("n", n, limit=4)
    codegen.record_cubin(f"cubin {n}", bytes([n]))
""")
    )
    alone = suite.claims("-p", "no:xdist")
    suite.pytester.runpytest_subprocess(
        *load_plugin, "-n", "2", "--gpu-arch=none", "--claims-json=x.json"
    ).assert_outcomes(passed=6, skipped=1)
    spread = suite.json("x.json")
    for run in (alone, spread):
        for claim in run["claims"].values():
            claim["tests"] = {
                test: {**row, "reason": ""} for test, row in sorted(claim["tests"].items())
            }
    assert spread["claims"] == alone["claims"]
    assert spread["cubins"] == alone["cubins"]
    assert len(spread["cubins"]) == 5
    assert spread["claims"]["B"]["worst"]["n"]["value"] == 4


def test_a_wrong_claim_on_a_worker_fails_the_run(
    suite: Suite, load_plugin: tuple[str, ...]
) -> None:
    pytest.importorskip("xdist")
    suite.write(outcomes("@pytest.mark.claim('A', 'other')\ndef test_b(): pass"))
    result = suite.pytester.runpytest_subprocess(*load_plugin, "-n", "1", "--claims-json=x.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["ERROR: claim A has two texts*"])
    assert not (suite.pytester.path / "x.json").exists()


def test_a_lost_worker_is_a_failure(suite: Suite, load_plugin: tuple[str, ...]) -> None:
    pytest.importorskip("xdist")
    suite.write(outcomes("def test_crash():\n    import os\n    os._exit(7)"))
    suite.pytester.runpytest_subprocess(*load_plugin, "-n", "1", "--claims-json=x.json")
    claim = suite.json("x.json")["claims"]["A"]
    assert claim["verdict"] == "failed"


# --- measured -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "passes"),
    [
        ("'x', 1.0", True),
        ("'x', 1.0, limit=1.0", True),
        ("'x', 1.1, limit=1.0", False),
        ("'x', 0.9, limit=1.0, better='higher'", False),
        ("'x', 1.0, limit=1.0, better='higher'", True),
        ("'x', float('nan'), limit=1.0", False),
        ("'x', float('nan'), limit=1.0, better='higher'", False),
        ("'x', float('nan')", False),
        ("'x', 1.0, limit=float('nan')", False),
        ("'x', float('inf'), limit=1.0", False),
        ("'x', 1.0, better='faster'", False),
    ],
)
def test_measured_judges(suite: Suite, call: str, passes: bool) -> None:
    suite.write(outcomes(f"def test_b(measured): measured({call})"))
    claim = suite.claims()["claims"]["A"]
    assert claim["verdict"] == ("verified" if passes else "failed")
    assert len(claim["tests"]["test_it.py::test_b"]["measured"]) == ("faster" not in call)


def test_the_worst_figure_is_the_one_closest_to_its_limit(suite: Suite) -> None:
    suite.write("""
        import pytest
        ROWS = [(1.0, 10.0), (0.5, 0.6), (5.0, 100.0)]

        @pytest.mark.claim("A", "text")
        @pytest.mark.parametrize("value, limit", ROWS)
        def test_a(measured, value, limit):
            measured("error", value, limit)
            measured("rate", value, limit / 100, better="higher")
            measured("seen", value)
            measured("seen", 2.0, better="higher")
    """)
    worst = suite.claims()["claims"]["A"]["worst"]
    assert (worst["error"]["value"], worst["error"]["limit"]) == (0.5, 0.6)
    assert (worst["rate"]["value"], worst["rate"]["limit"]) == (5.0, 1.0)
    assert worst["error"]["test"] == "test_it.py::test_a[0.5-0.6]"


def test_a_violation_outranks_everything() -> None:
    near = Measurement("x", 0.99, 1.0)
    beyond = Measurement("x", 1.01, 1.0)
    nothing = Measurement("x", float("nan"), 1.0)
    free = Measurement("x", 1e9)
    assert free.badness < near.badness < beyond.badness < nothing.badness


# --- JSON -----------------------------------------------------------------------------------


def test_provenance(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINATTN_COMMIT", "feedbeef")
    monkeypatch.setattr(provenance, "_git", lambda root, *args: None)
    monkeypatch.setattr(arch, "driver_version", lambda: "580.95.05")
    suite.on("h200").write("""
        import pytest

        @pytest.mark.claim("A", "text")
        def test_a(codegen): codegen.record_cubin("prefill", b"machine code")
    """)
    found = suite.claims("--gpu-arch=sm90", str(suite.pytester.path / "test_it.py"))
    assert (found["commit"], found["dirty"]) == ("feedbeef", None)
    assert found["gpu"] == {"name": "NVIDIA H200", "sm": "sm90", "driver": "580.95.05"}
    assert found["cubins"] == {"prefill": hashlib.sha256(b"machine code").hexdigest()}
    assert found["args"][-2:] == ["--gpu-arch=sm90", "test_it.py"]
    assert found["schema"] == SCHEMA
    assert found["emulator"] is None
    assert {"torch", "cutlass_dsl", "python", "when", "exitstatus"} <= found.keys()


def test_the_commit_comes_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINATTN_COMMIT", "feedbeef")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*args: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True)

    assert provenance.source_state(tmp_path) == {"commit": "feedbeef", "dirty": None}
    git("init")
    (tmp_path / "a").write_text("a")
    git("add", "a")
    git("commit", "-m", "a")
    clean = provenance.source_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("b")
    assert provenance.source_state(tmp_path) == {**clean, "dirty": True}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    write_json(path, {"figure": float("nan"), "list": [float("inf")]})
    assert json.loads(path.read_text()) == {"figure": "nan", "list": ["inf"]}
    before = path.read_text()
    with pytest.raises(TypeError):
        write_json(path, {"not JSON": object()})
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_one_name_for_two_cubins_is_told(suite: Suite) -> None:
    suite.write(
        outcomes("def test_b(codegen):\n    for x in b'ab': codegen.record_cubin('k', bytes([x]))")
    )
    suite.run().stdout.fnmatch_lines(["cubin k came in 2 versions*"])
    assert len(suite.claims()["cubins"]["k"].split()) == 2


def test_junit_carries_claims_and_figures(suite: Suite) -> None:
    suite.write(outcomes("def test_b(measured): measured('error', 0.25, limit=1)"))
    suite.run("--junitxml=junit.xml")
    text = (suite.pytester.path / "junit.xml").read_text()
    assert text.count('<property name="claim"') == 2
    assert text.count('<property name="measured"') == 1
    assert "0.25" in text


@pytest.mark.parametrize(
    ("required", "status", "told"),
    [
        ("A  # a comment\n\n# another\n", 0, None),
        ("A\nB\n", 1, "required claims not verified: B (not run)"),
        ("A\nC\n", 1, "required claims not verified: C (no test ran)"),
        ("# only a comment\n", 4, None),
        (None, 4, None),
    ],
)
def test_required_claims(suite: Suite, required: str | None, status: int, told: str | None) -> None:
    suite.write(
        ONE
        + "\n    @pytest.mark.claim('B', 'gpu')\n    @pytest.mark.sm90\n    def test_b(): pass\n"
    )
    if required is not None:
        (suite.pytester.path / "required.txt").write_text(required)
    result = suite.run("--require-claims=required.txt", "--claims-json=claims.json")
    assert result.ret == status
    if told:
        result.stdout.fnmatch_lines([told])
    if status < 4:
        assert suite.json("claims.json")["exitstatus"] == status


def test_ids_with_a_hash_can_be_required(suite: Suite) -> None:
    suite.write(ONE.replace('"A"', '"GH-#12"'))
    path = suite.pytester.path / "required.txt"
    for text, status in (
        ("GH-#12", 0),
        ("GH-#12 # issue 12", 0),
        ("#GH\n \t# GH\nGH-#12\t#", 0),
        ("GH-#1", 1),
    ):
        path.write_text(text)
        assert suite.run("--require-claims=required.txt").ret == status, text


def test_special_files_are_no_claims_files(suite: Suite) -> None:
    """A reader waits at the other end of a pipe; replacing it would leave it waiting."""
    suite.write(ONE)
    fifo = suite.pytester.path / "pipe"
    os.mkfifo(fifo)
    result = suite.run("--claims-json=pipe")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*cannot write pipe: it is no regular file"])
    assert fifo.is_fifo()
    (suite.pytester.path / "link").symlink_to(fifo)
    assert suite.run("--claims-json=link").ret == pytest.ExitCode.USAGE_ERROR


def test_a_link_to_a_claims_file_stays_one(suite: Suite) -> None:
    target = suite.write(ONE).pytester.path / "elsewhere.json"
    for name in ("link", "dangling"):
        (suite.pytester.path / name).symlink_to(target)
        target.unlink(missing_ok=name == "link")
        assert suite.run(f"--claims-json={name}").ret == 0
        assert (suite.pytester.path / name).is_symlink()
        assert suite.json("elsewhere.json")["exitstatus"] == 0


def test_a_document_survives_a_write_that_fails(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.write(ONE).run("--claims-json=claims.json")
    document = suite.pytester.path / "claims.md"
    text = f"# Ours\n{merge.BEGIN}\nold\n{merge.END}\n"
    document.write_text(text)
    document.chmod(0o600)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    command = ["merge", str(suite.pytester.path / "claims.json"), "--into", str(document)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SystemExit, match="2"):
            main(command)
    assert document.read_text() == text
    assert (
        sorted(path.suffix for path in suite.pytester.path.iterdir() if "part" in path.name) == []
    )
    assert main(command) == 0
    assert "old" not in document.read_text()
    assert document.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("path", "told"), [("no/such/claims.json", "there is no folder"), (".", "it is a directory")]
)
def test_a_file_that_cannot_be_written_stops_the_run_at_its_start(
    suite: Suite, path: str, told: str
) -> None:
    result = suite.write(ONE).run(f"--claims-json={path}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --claims-json: cannot write {path}: {told}*"])
    assert "collected" not in result.stdout.str()


SLEEPER = """
    import os, pathlib, pytest, signal, time

    pytestmark = pytest.mark.claim("A", "text")

    def test_passes(): pass

    def test_a_fork_ends_as_ever():
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b".")  # from here on the interpreter handles signals
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM

    @pytest.fixture
    def slow_end():
        yield
        time.sleep(0.5)

    def test_sleeps(slow_end):
        pathlib.Path("asleep").touch()
        time.sleep(60)
"""


@pytest.mark.parametrize("options", [["--claims-json=claims.json"], []])
def test_a_time_limit_leaves_the_claims(
    suite: Suite, load_plugin: tuple[str, ...], options: list[str]
) -> None:
    folder = suite.write(SLEEPER).pytester.path
    command = [sys.executable, "-m", "pytest", *load_plugin, "-p", "no:cacheprovider", *options]
    with subprocess.Popen(
        command, cwd=folder, env=elsewhere(), stdout=subprocess.DEVNULL
    ) as running:
        deadline = time.monotonic() + 50
        while not (folder / "asleep").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        # As `timeout` does: the second one arrives while the first is dealt with.
        running.terminate()
        time.sleep(0.2)
        running.terminate()
    if not options:
        assert running.returncode == -signal.SIGTERM
        return
    assert running.returncode == pytest.ExitCode.INTERRUPTED
    run = suite.json("claims.json")
    claim = run["claims"]["A"]
    assert (claim["verdict"], claim["counts"]) == ("partial", {"not run": 1, "passed": 2})
    assert claim["tests"]["test_it.py::test_passes"]["outcome"] == "passed"
    assert run["exitstatus"] == pytest.ExitCode.INTERRUPTED


LEAVING = """
    import os, time
    import pytest

    @pytest.mark.claim("A", "text")
    def test_passes():
        time.sleep(1.1)

    @pytest.mark.claim("A", "text")
    def test_leaves():
        {leave}

    @pytest.mark.claim("A", "text")
    def test_never_comes(): pass
"""


def apart(suite: Suite, load_plugin: tuple[str, ...], *options: str) -> Any:
    """Run in a process that may end as it likes."""
    command = [sys.executable, "-m", "pytest", *load_plugin, "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, "--claims-json=claims.json"],
        cwd=suite.pytester.path,
        env=elsewhere(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("leave", "status"),
    [("os._exit(0)", 1), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_a_test_that_ends_the_run(
    suite: Suite, load_plugin: tuple[str, ...], leave: str, status: int
) -> None:
    """It is no success, what was shown is kept, and the file says that the run has no end."""
    suite.write(LEAVING.format(leave=leave))
    done = apart(suite, load_plugin)
    assert done.returncode == status
    assert ("os._exit" in leave) == ("test_it.py::test_leaves (call): no claim" in done.stderr)
    run = suite.json("claims.json")
    assert run["exitstatus"] is None
    assert run["claims"]["A"]["verdict"] == "partial"
    assert run["claims"]["A"]["tests"]["test_it.py::test_passes"]["outcome"] == "passed"
    assert main(["verdict", str(suite.pytester.path / "claims.json")]) == 1
    assert main(["audit", str(suite.pytester.path / "claims.json")]) == 1


def test_a_fork_may_leave(suite: Suite, load_plugin: tuple[str, ...]) -> None:
    child = "pid = os.fork()\n        if not pid: os._exit(0)\n        os.waitpid(pid, 0)"
    suite.write(LEAVING.format(leave=child))
    done = apart(suite, load_plugin)
    assert (done.returncode, done.stderr) == (0, "")
    assert suite.json("claims.json")["exitstatus"] == 0
    assert os._exit is EXIT


EXIT = os._exit


@pytest.mark.parametrize("hook", ["sessionfinish", "unconfigure", "terminal_summary"])
@pytest.mark.parametrize("how", ["raise RuntimeError('planted')", "pytest.exit('planted', 7)"])
def test_what_pytest_returns_is_recorded(
    suite: Suite, load_plugin: tuple[str, ...], hook: str, how: str
) -> None:
    """As when a comparison of timings fails behind the last test."""
    suite.write(ONE).pytester.makeconftest(f"""
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_{hook}():
            {how}
    """)
    done = apart(suite, load_plugin)
    assert done.returncode != 0
    assert suite.json("claims.json")["exitstatus"] == done.returncode


@pytest.mark.parametrize("theirs", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_handler_of_sigterm_is_the_old_one_afterwards(suite: Suite, theirs: Any) -> None:
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        suite.write(f"""
            import signal
            def test_it():
                changed = signal.getsignal(signal.SIGTERM) is not signal.{theirs.name}
                assert changed == {theirs is signal.SIG_DFL}
        """)
        suite.run("--claims-json=claims.json").assert_outcomes(passed=1)
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
