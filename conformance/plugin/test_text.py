"""What others wrote is shown as data, in a terminal, in Markdown and in JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims.claims import merge, timetable
from pytest_kernel_claims.claims.__main__ import main
from pytest_kernel_claims.claims.text import code, markdown, shown

if TYPE_CHECKING:
    from .conftest import Suite, TimedSuite

pytestmark = pytest.mark.claim("PLUGIN-TEXT", "text of claims, tests and reasons is never markup")

HOSTILE = {
    "tag": "<script>alert(1)</script>",
    "cell": "a | b || c",
    "lines": "one\ntwo\r\nthree\u2028four",
    "escape": "\x1b[2Jgone\x07\x08",
    "end mark": merge.END,
    "end mark of timings": timetable.END,
    "entity": "&lt;&#124;",
    "code": "`` `x` ``",
    "link": "[here](https://example.com)",
    "turned around": "abc\u202edef",
    "surrogate": "a\ud800b",
    "zero width": "a\u200bb",
    "nul": "a\x00b",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_line_without_markup(name: str) -> None:
    text = HOSTILE[name]
    for made in (shown(text), markdown(text), code(text)):
        assert "\n" not in made
        assert made.isprintable()
        made.encode()
    for made in (markdown(text), code(text)):
        inside = made.removeprefix("<code>").removesuffix("</code>")
        assert "<" not in inside
        assert not re.search(r"(?<!\\)\|", inside)
    assert markdown(markdown(text)) == markdown(text)
    cells = merge.row("first", text, code(text))
    assert len(re.findall(r"(?<!\\)\|", cells)) == 4


def test_plain_text_is_as_it_is() -> None:
    for text in (
        "torch.compile(fullgraph=True) gives what eager gives",
        "2^-126 µs > 1.05x, §3 #1",
    ):
        assert shown(text) == markdown(text) == text
        assert code(text) == f"`{text}`"


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - {"surrogate", "nul"}))
def test_a_run_and_its_documents(suite: Suite, name: str) -> None:
    """As id, as text, as a parameter, as a reason and as the name of a figure."""
    text = HOSTILE[name]
    suite.write(f"""
        import pytest
        text = {text!r}

        @pytest.mark.claim(text, text)
        @pytest.mark.parametrize("x", [1], ids=["row"])
        def test_it(x, measured):
            measured(text, 1.0, 2.0)

        @pytest.mark.claim(text, text)
        def test_skips():
            pytest.skip(text)
    """)
    result = suite.run("--claims-json=claims.json")
    printed = result.stdout.str().partition("= claims =")[2].partition("= 1 passed")[0]
    assert all(line.isprintable() for line in printed.splitlines())
    lines = [line for line in printed.splitlines() if "partial" in line]
    assert len(lines) == 2
    found = suite.json("claims.json")
    assert list(found["claims"]) == [text]
    assert found["claims"][text]["text"] == text
    document = suite.pytester.path / "claims.md"
    document.write_text(f"{merge.BEGIN}\n{merge.END}\nbehind\n", encoding="utf-8")
    command = ["merge", str(suite.pytester.path / "claims.json"), "--into", str(document)]
    for _ in range(2):  # the second time over what the first one wrote
        assert main(command) == 0
    made = document.read_text(encoding="utf-8")
    assert made.endswith(f"{merge.END}\nbehind\n")
    assert made.count("<") == 2
    (line,) = [line for line in made.splitlines() if "partial" in line]
    assert len(re.findall(r"(?<!\\)\|", line)) == 4


def test_lone_surrogates_survive_json(tmp_path: Path) -> None:
    from pytest_kernel_claims.claims.report import write_json

    value: dict[str, Any] = {HOSTILE["surrogate"]: HOSTILE["nul"]}
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == value


def test_timings_of_hostile_names(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0).write("""
        import pytest
        from fake_gpu import spend

        @pytest.mark.claim("SPEED", "fast")
        @pytest.mark.timing(processes=1, warmup=1, iterations=2)
        @pytest.mark.parametrize("x", [1], ids=["<b>|`row`"])
        def test_speed(cuda_benchmark, x):
            cuda_benchmark.versus(**{"ours": lambda: lambda: spend(4e-5)}).at_most(us=50.0)
    """)
    timed_suite.run("--claims-json=claims.json").assert_outcomes(passed=1)
    document = timed_suite.pytester.path / "timings.md"
    document.write_text(f"{timetable.BEGIN}\n{timetable.END}\n")
    command = ["timings", str(timed_suite.pytester.path / "claims.json"), "--into", str(document)]
    assert main(command) == 0
    made = document.read_text()
    assert made.count("<") == 2 + made.count("<code>") + made.count("</code>")
    assert "&lt;b>" in made
