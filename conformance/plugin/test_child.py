"""The re-exec engine: what a child is given, and what comes back from one that ends badly."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_kernel_claims import child

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = pytest.mark.claim(
    "PLUGIN-CHILD", "a child re-runs exactly its tests, and all that they said comes back"
)

PARENT = """
    import os
    import pytest
    from pytest_kernel_claims import child

    seen = []

    def pytest_addoption(parser):
        parser.addoption("--problem", default="none")

    @pytest.hookimpl(optionalhook=True)
    def pytest_kernel_claims_child_options(config):
        return ["--problem=" + config.getoption("--problem")]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session):
        if child.order(session.config) is not None:
            return None
        seconds = float(os.environ.get("SECONDS", 60))
        back = child.run_child(
            session.config, session.items, role="look", payload={"n": [1, 2]}, timeout=seconds,
            env={"GIVEN": "yes", "TAKEN": None},
        )
        print(back.explain())
        for item in session.items:
            for report in back.of(item):
                item.ihook.pytest_runtest_logreport(report=report)
        print("\\nrecords", back.records)
        return True
"""

TESTS = """
    import os, sys
    import pytest
    from pytest_kernel_claims import child

    @pytest.mark.parametrize("what", ["a/b c", "[x]", "p::q", "-k"])
    def test_odd_names(what): pass

    def test_orders(request, pytestconfig, record_property):
        orders = child.order(pytestconfig)
        assert (orders.role, orders.payload) == ("look", {"n": [1, 2]})
        assert child.VARIABLE not in os.environ
        assert (os.environ["GIVEN"], "TAKEN" in os.environ) == ("yes", False)
        assert pytestconfig.getoption("--problem") == "hard"
        assert pytestconfig.getoption("--gpu-arch") == "none"
        assert not pytestconfig.getoption("--claims-json")
        child.send(pytestconfig, {"sample": 1.5})
        child.send(pytestconfig, {"sample": 2.5})
        record_property("object", pytest)

    def test_fails():
        left, right = [1, 2], [1, 3]
        print("said before")
        assert left == right

    @pytest.mark.skip(reason="not today")
    def test_skipped(): pass

    @pytest.mark.xfail(reason="known")
    def test_expected(): assert False
"""


def test_reports_come_back_whole(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", "here")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    suite.write(TESTS, conftest=PARENT).pytester.makeini("[pytest]\naddopts = --problem=easy\n")
    monkeypatch.delenv("PYTEST_ADDOPTS")
    options = ("--problem=hard", "--gpu-arch=none", "--claims-json=c.json", "--junitxml=j.xml")
    result = suite.run("-rsfx", "-s", *options)
    result.assert_outcomes(passed=5, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "child: exit 1 after *",
            "records [[]{'sample': 1.5}, {'sample': 2.5}[]]",
            "E * assert [[]1, 2] == [[]1, 3]",
            "E * At index 1 diff: 2 != 3",
            "*said before*",
            "SKIPPED [[]1] *: not today",
            "XFAIL test_it.py::test_expected*known",
        ]
    )
    assert "<module 'pytest'" in (suite.pytester.path / "j.xml").read_text().replace("&lt;", "<")


def test_a_crash_leaves_what_was_said_before(suite: Suite) -> None:
    suite.write(
        """
        import os, sys
        from pytest_kernel_claims import child

        def test_first(): pass

        def test_dies(pytestconfig):
            child.send(pytestconfig, {"last": "words"})
            os._exit(7)
        """,
        conftest=PARENT,
    )
    result = suite.run("-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["child: exit 7 after *", "records [[]{'last': 'words'}[]]"])


def test_a_collection_error_in_the_child_is_told(suite: Suite) -> None:
    suite.write(
        """
        import os
        if "GIVEN" in os.environ:
            raise RuntimeError("planted in the child")
        def test_it(): pass
        """,
        conftest=PARENT,
    )
    result = suite.run("-s")
    result.stdout.fnmatch_lines(["collecting test_it.py", "*RuntimeError: planted in the child*"])
    assert "passed" not in result.parseoutcomes()


def test_a_hang_is_killed_with_all_it_started(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS", "2.5")
    suite.write(
        """
        import pathlib, subprocess, sys, time

        def test_hangs():
            code = "import time, pathlib; time.sleep(4); pathlib.Path('survivor').touch()"
            subprocess.Popen([sys.executable, "-c", code])
            time.sleep(60)
        """,
        conftest=PARENT,
    )
    start = time.monotonic()
    result = suite.run("-s")
    assert time.monotonic() - start < 20
    result.stdout.fnmatch_lines(["child: killed at its time limit after *"])
    time.sleep(max(0.0, start + 7 - time.monotonic()))
    assert not (suite.pytester.path / "survivor").exists()


def test_a_pytest_that_a_test_starts_is_no_child(suite: Suite) -> None:
    suite.write(
        """
        import subprocess, sys

        def test_outer(pytester, pytestconfig):
            pytester.makepyfile("def test_inner(): assert False")
            assert pytester.runpytest_subprocess().ret == 1
            assert pytester.runpytest_inprocess().ret == 1
        """,
        conftest=PARENT,
    )
    result = suite.run("-s", "-p", "pytester")
    result.assert_outcomes(passed=1)


def test_sending_outside_a_child_is_refused(pytestconfig: pytest.Config) -> None:
    with pytest.raises(RuntimeError, match="nobody's child"):
        child.send(pytestconfig, {})


def test_a_command_that_leaves_a_process_behind_does_not_block(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = child.run_command(
        ["sh", "-c", "sleep 30 & echo done"], env={}, timeout=20, cwd=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert time.monotonic() - start < 15


def test_what_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTEST_PLUGINS", "kept")
    inherited = child.inherited_environment()
    assert not {name for name in inherited if name.startswith(("PYTEST_XDIST", "PYTEST_ADD"))}
    assert inherited["PYTEST_PLUGINS"] == "kept"
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST_CURRENT_TEST" not in inherited
