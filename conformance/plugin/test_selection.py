"""A part of a suite, however it was selected, verifies no claim that has more tests."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING

import pytest

from .conftest import LOAD, elsewhere

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = pytest.mark.claim("PLUGIN-SELECTION", "a part of a claim's tests is not the claim")

SELECTED = """
    import pytest

    @pytest.mark.claim("A", "three tests")
    @pytest.mark.parametrize("n", [1, 2])
    def test_a(n): pass
"""
OTHER = """
    import pytest

    @pytest.mark.claim("A", "three tests")
    def test_other(): pass
"""
DROPS = """
    def pytest_collection_modifyitems(items):
        del items[0]  # as some plugins do, without a word to others
"""


@pytest.fixture
def selected(suite: Suite) -> Suite:
    """A claim in two files of a project; the cache is there for what selects by it."""
    suite.pytester.makeini("[pytest]\ntestpaths = tests\naddopts = -ra")
    suite.pytester.mkdir("tests")
    for name, text in (("test_it", SELECTED), ("test_other", OTHER)):
        (suite.pytester.path / "tests" / f"{name}.py").write_text(textwrap.dedent(text))
    return suite


@pytest.mark.parametrize(
    ("arguments", "verdict", "left_out"),
    [
        ([], "verified", 0),
        (["tests"], "verified", 0),
        (["."], "verified", 0),
        (["tests", "tests/test_it.py"], "verified", 0),
        (["-k", "test_a"], "partial", 1),
        (["--deselect=tests/test_it.py::test_a[1]"], "partial", 1),
        (["tests/test_it.py"], "partial", 0),
        (["tests/test_it.py", "tests/test_other.py"], "partial", 0),
        (["tests/test_it.py::test_a"], "partial", 0),
        (["--ignore=tests/test_other.py"], "partial", 0),
        (["--ignore-glob=*other*"], "partial", 0),
        (["-n2"], "verified", 0),
        (["-n2", "-k", "test_a"], "partial", 1),
        (["-n2", "tests/test_it.py"], "partial", 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_part_is_not_verified(
    selected: Suite, arguments: list[str], verdict: str, left_out: int
) -> None:
    pytest.importorskip("xdist")
    claim = selected.claims(*arguments)["claims"]["A"]
    assert (claim["verdict"], claim["deselected"]) == (verdict, left_out)
    assert claim["counts"] == {"passed": claim["selected"]}


@pytest.mark.parametrize(("arguments", "verdict"), [((), "verified"), (("tests",), "partial")])
def test_paths_that_are_not_there_are_none(
    selected: Suite, arguments: tuple[str, ...], verdict: str
) -> None:
    """pytest collects all of the project then."""
    selected.pytester.makeini("[pytest]\ntestpaths = elsewhere")
    assert selected.claims(*arguments)["claims"]["A"]["verdict"] == verdict


def test_tests_that_a_plugin_drops_are_left_out(selected: Suite) -> None:
    selected.pytester.makeconftest(DROPS)
    claim = selected.claims()["claims"]["A"]
    assert (claim["verdict"], claim["left_out"]) == ("partial", ["tests/test_it.py::test_a[1]"])


@pytest.mark.parametrize("option", ["--lf", "--stepwise"])
def test_what_an_earlier_run_selects_is_a_part(selected: Suite, option: str) -> None:
    """``--lf`` does not even collect files whose tests passed."""
    path = selected.pytester.path / "tests" / "test_it.py"
    path.write_text(path.read_text().replace("(n): pass", "(n): assert n == 1"))
    run = partial(selected.pytester.runpytest_inprocess, *LOAD, "-p", "no:ptx_emulator")
    run("--stepwise")
    path.write_text(path.read_text().replace("assert n == 1", "pass"))
    run(option, "--claims-json=claims.json")
    claim = selected.json("claims.json")["claims"]["A"]
    assert claim["verdict"] == "partial"
    assert claim["selected"] < 3


@pytest.mark.parametrize("stop", ["-x", "--maxfail=1"])
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "worker"])
def test_what_a_stop_leaves_is_not_run(suite: Suite, workers: tuple[str, ...], stop: str) -> None:
    pytest.importorskip("xdist")
    suite.write("""
        import pytest

        @pytest.mark.claim("A", "one")
        def test_a(): assert False

        @pytest.mark.claim("B", "two")
        @pytest.mark.parametrize("n", range(20))
        def test_b(n): pass
    """)
    result = suite.run(stop, *workers, "--claims-json=claims.json")
    claims = suite.json("claims.json")["claims"]
    assert claims["A"]["verdict"] == "failed"
    assert claims["B"]["verdict"] in ("not run", "partial")
    assert claims["B"]["selected"] == 20
    assert claims["B"]["counts"].get("not run", 0) > 10
    result.stdout.fnmatch_lines(["*1 claim: the run ended before it came to them [[]B]"])


def test_what_is_only_collected_has_no_verdict(selected: Suite) -> None:
    result = selected.run("--collect-only", "--claims-json=claims.json")
    assert "claim" not in result.stdout.str().partition("collected")[2]
    assert not (selected.pytester.path / "claims.json").exists()


def test_an_index_tells_what_a_part_lacks(
    selected: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = selected.pytester.path
    command = [sys.executable, "-m", "pytest_kernel_claims.claims", "index"]
    for arguments, status in ((["tests/test_it.py"], 2), ([], 0)):
        done = subprocess.run(
            [*command, "index.json", "--", *arguments],
            cwd=folder, env=elsewhere(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert ("expected the whole suite" in done.stderr) == bool(status)
    index = json.loads((folder / "index.json").read_text())
    assert index["claims"] == {
        "A": [
            *(f"tests/test_it.py::test_a[{n}]" for n in (1, 2)),
            "tests/test_other.py::test_other",
        ]
    }
    with_index = partial(selected.claims, "--claims-index=index.json")
    claim = with_index("tests/test_it.py")["claims"]["A"]
    assert (claim["verdict"], claim["left_out"]) == (
        "partial",
        ["tests/test_other.py::test_other"],
    )
    both = with_index("tests/test_it.py", "tests/test_other.py")["claims"]["A"]
    assert (both["verdict"], both["deselected"]) == ("verified", 0)
    # What collects all needs no index, whatever an old one has.
    index["claims"]["A"].append("tests/test_it.py::test_that_was")
    (folder / "index.json").write_text(json.dumps(index))
    assert with_index()["claims"]["A"]["verdict"] == "verified"
    # An index of other sources, which lacks a test, tells nothing.
    (folder / "tests" / "test_new.py").write_text(textwrap.dedent(OTHER))
    claim = with_index("tests/test_new.py")["claims"]["A"]
    assert (claim["verdict"], claim["deselected"], claim["whole"]) == ("partial", 0, False)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "other"}', '{"claims": {}}', None])
def test_what_is_no_index(suite: Suite, text: str | None) -> None:
    if text is not None:
        (suite.pytester.path / "index.json").write_text(text)
    result = suite.write("def test_it(): pass").run("--claims-index=index.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--claims-index: cannot read index.json: *"])
