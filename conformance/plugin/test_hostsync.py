"""``no_host_sync`` and ``graph_safe``: what is found, by which layer, and what is left alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pytest_kernel_claims import hostsync

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = pytest.mark.claim(
    "PLUGIN-SYNC", "host waits and reads are found in every layer, with operation and line"
)

META = torch.device("meta")


def audited(call: Callable[[], object], **options: Any) -> list[hostsync.Violation]:
    """Violations of one call under the layer that needs no GPU."""
    audit = hostsync.Audit("dispatch", hostsync.Rules(**options))
    with contextlib.suppress(Exception), audit:
        call()
    return audit.violations


def values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.empty(8, device=META)
    return x, torch.empty(8, dtype=torch.int64, device=META), x > 0


X, N, B = values()

READS: dict[str, Callable[[], object]] = {
    "item": lambda: X.sum().item(),
    "float": lambda: float(X[0]),
    "int": lambda: int(N.max()),
    "bool": lambda: bool(X[0]),
    "if": lambda: 1 if X.any() else 2,
    "tolist": N.tolist,
    "cpu": X.cpu,
    "to": lambda: X.to("cpu"),
    "copy": lambda: torch.empty(8).copy_(X),
    "numpy": X.numpy,
    "nonzero": B.nonzero,
    "where": lambda: torch.where(B),
    "unique": N.unique,
    "unique_consecutive": N.unique_consecutive,
    "masked_select": lambda: X.masked_select(B),
    "mask": lambda: X[B],
    "mask = values": lambda: X.__setitem__(B, torch.empty_like(X)),
    "mask = scalar of the device": lambda: X.clone().__setitem__(B, X[0].clone()),
    "repr": lambda: repr(X),
    "format of a tensor": lambda: f"{X}",
    "mask and slice = value": lambda: torch.empty(8, 8, device=META).__setitem__((B, N), 1.0),
    "allclose": lambda: torch.allclose(X, X),
    "equal": lambda: torch.equal(X, X),
    "repeat_interleave": lambda: torch.repeat_interleave(X, N),
    "bincount": N.bincount,
    "histc of the range that is there": lambda: X.histc(4),
    "pageable": lambda: torch.ones(2).to(META),
    "pageable copy": lambda: X.copy_(torch.ones(8)),
    "range": lambda: range(N[0]),  # type: ignore[call-overload]
    "format": lambda: f"{X[0].item():.3f}",
    "cuda.synchronize": lambda: torch.cuda.synchronize(),
    "event": lambda: torch.cuda.Event.synchronize(object()),  # type: ignore[arg-type]
    "stream": lambda: torch.cuda.Stream.synchronize(object()),  # type: ignore[arg-type]
}

FINE: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (X + 1)[N].cumsum(0),
    "allocation": lambda: torch.empty(3, device=META).zero_(),
    "shapes": lambda: (X.shape, X.stride(), X.dtype, X.device, X.numel(), len(X)),
    "views": lambda: X.as_strided((2, 2), (4, 1)).transpose(0, 1).reshape(4),
    "mask = value": lambda: X.clone().__setitem__(B, 1.0),
    "histc of a range": lambda: X.histc(4, 0, 1),
    "multinomial": lambda: torch.multinomial(X, 2),
    "element = value": lambda: X.clone().__setitem__(3, 1.0),
    "where with values": lambda: torch.where(B, X, 0.0),
    "masked_fill": lambda: X.masked_fill(B, 0.0),
    "repeat_interleave of known size": lambda: torch.repeat_interleave(X, N, output_size=9),
    "host only": lambda: torch.ones(3).sum().item(),
    "host mask": lambda: torch.ones(3)[torch.ones(3, dtype=torch.bool)],
    "host copy": lambda: torch.ones(3).to(torch.float64).tolist(),
    "matmul": lambda: X.view(2, 4) @ X.view(4, 2),
    "device copy": lambda: X.copy_(X.clone()),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_found(name: str) -> None:
    found = audited(READS[name])
    assert found
    assert all(one.where.startswith("conformance/plugin/test_hostsync.py:") for one in found)


@pytest.mark.parametrize("name", FINE)
def test_what_does_not_wait_is_left_alone(name: str) -> None:
    audit = hostsync.Audit("dispatch", hostsync.Rules())
    with audit:
        FINE[name]()
    assert audit.violations == []


def wait_without_error() -> None:
    torch.ones(2).to(META)


def audit_of(*calls: Callable[[], object]) -> None:
    with hostsync.Audit("dispatch", hostsync.Rules()):
        for call in calls:
            call()


def test_the_line_of_the_caller_is_named() -> None:
    source = Path(__file__).read_text().splitlines()
    line = source.index("    torch.ones(2).to(META)") + 1
    with pytest.raises(hostsync.HostSync) as error:
        audit_of(wait_without_error)
    text = str(error.value)
    assert text.startswith("1 host sync(s)\n")
    assert f"conformance/plugin/test_hostsync.py:{line}: aten::_to_copy: copies from the" in text


def test_all_violations_are_listed_and_the_cause_is_kept() -> None:
    with pytest.raises(hostsync.HostSync, match=r"(?s)^2 host.*_to_copy.*_local_scalar") as error:
        audit_of(wait_without_error, X[0].item)
    assert isinstance(error.value.__cause__, RuntimeError)


def test_swallowing_the_error_hides_nothing() -> None:
    def swallowing() -> None:
        with contextlib.suppress(RuntimeError):
            X[0].item()

    with pytest.raises(hostsync.HostSync, match="_local_scalar_dense"):
        audit_of(swallowing)


@pytest.mark.parametrize(
    "error",
    [ValueError("on the meta device"), RuntimeError("out of memory"), KeyError("q")],
    ids=str,
)
def test_other_errors_pass_unchanged(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as seen:
        audit_of(fail)
    assert seen.value is error


def test_a_skip_passes_unchanged() -> None:
    with pytest.raises(pytest.skip.Exception):
        audit_of(wait_without_error, lambda: pytest.skip("not here"))


def test_an_allowed_operation_passes_and_is_told() -> None:
    audit = hostsync.Audit("dispatch", hostsync.Rules())
    with audit:
        audit.allow("aten::_to_copy", "the checked mode copies on purpose")
        wait_without_error()
    assert len(audit.violations) == 1
    assert "allowed: aten::_to_copy (the checked mode copies on purpose)" in audit.report()
    with pytest.raises(ValueError, match="reason"):
        audit.allow("aten::_to_copy", "")


def test_host_tensors_may_stand_for_the_device() -> None:
    assert audited(lambda: torch.ones(3).sum().item()) == []
    assert audited(lambda: torch.ones(3).sum().item(), on=("cpu",)) != []


HOST = torch.ones(3)
METHODS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to by name": lambda x: x.to(device="cpu"),
    "to a tensor": lambda x: x.to(torch.ones(1)),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0]),
    "if": lambda x: 1 if x[0] else 2,
    "index": lambda x: range(x.long()[0]),
    "item": lambda x: x[0].item(),
    "repr": repr,
    "format": lambda x: f"{x[0]:.3f}",
    "print": print,
}


@pytest.mark.parametrize("name", METHODS)
def test_reads_of_tensors_that_stand_for_a_devices(name: str) -> None:
    """As an emulator has them: such reads never reach the dispatcher."""
    (found, *_) = audited(lambda: METHODS[name](HOST), on=("cpu",))
    assert found.where.startswith("conformance/plugin/test_hostsync.py:")
    assert audited(lambda: METHODS[name](HOST)) == []
    METHODS[name](HOST)
    assert "tolist" not in vars(torch.Tensor)


@pytest.mark.parametrize("name", ["item", "tolist", "float", "repr"])
@pytest.mark.parametrize("x", [HOST, X], ids=["host", "meta"])
def test_a_read_in_another_thread(name: str, x: torch.Tensor) -> None:
    """Its exception is lost with it."""

    def swallowing() -> None:
        with contextlib.suppress(Exception):
            METHODS[name](x)

    def call() -> None:
        thread = threading.Thread(target=swallowing)
        thread.start()
        thread.join()

    assert audited(call, on=("cpu",))


def test_an_audit_that_watches_nothing_shows_nothing(suite: Suite) -> None:
    suite.write("""
        import pytest, torch
        pytestmark = [pytest.mark.no_host_sync, pytest.mark.claim("S", "text")]

        def test_nothing(): pass

        def test_host(no_host_sync):
            with no_host_sync():
                torch.ones(3).sum().item()

        def test_fails(): assert False

        def test_meta(): torch.empty(3, device="meta")
    """)
    result = suite.run("-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=2)
    result.stdout.fnmatch_lines(["S  failed  *1/4 *", "*worst: host syncs (dispatch) 0 *"])
    result.stdout.fnmatch_lines(
        ["SKIPPED *no_host_sync watched no tensor of a device and no launch; GPU here: none*"]
    )


def test_everything_is_put_back() -> None:
    before = (torch.cuda.synchronize, torch.cuda.Event.synchronize)
    during: list[object] = []
    with pytest.raises(hostsync.HostSync):
        audit_of(lambda: during.append(torch.cuda.synchronize), X[0].item)
    assert during[0] is not before[0]
    assert (torch.cuda.synchronize, torch.cuda.Event.synchronize) == before
    assert audited(lambda: None) == []


SUITE = """
    import pytest
    import torch
    X = torch.empty(4, device="meta")

    @pytest.mark.claim("S", "text")
    def test_clean(no_host_sync):
        with no_host_sync() as audit:
            X + 1
        assert audit.violations == []

    def test_read(no_host_sync):
        with no_host_sync():
            X[0].item()

    @pytest.mark.no_host_sync
    def test_whole_clean(): X + 1

    @pytest.mark.no_host_sync
    def test_whole_read(): torch.ones(2).to("meta")

    @pytest.mark.no_host_sync
    def test_outside_of_its_own_block(no_host_sync):
        with no_host_sync():
            X + 1
        torch.ones(2).to("meta")

    @pytest.mark.no_host_sync(level="deep")
    def test_deep(no_host_sync):
        with no_host_sync():
            X + 1

    @pytest.mark.no_host_sync
    def test_skips(): pytest.skip("why")

    @pytest.mark.no_host_sync(level="deeper")
    def test_typo(): pass

    def test_graph(graph_safe): pass
"""


def test_fixture_and_mark(suite: Suite) -> None:
    suite.write(SUITE)
    result = suite.run("-rsf", "--claims-json=claims.json")
    result.assert_outcomes(passed=3, failed=3, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "*1 host sync(s)",
            "*test_it.py:*: aten::_local_scalar_dense: reads a device value on the host",
            "SKIPPED * a deep audit needs a GPU; GPU here: none (*)",
            "SKIPPED * graph capture needs a GPU; GPU here: none (*)",
        ]
    )
    result.stdout.fnmatch_lines(["FAILED *test_whole_read - *", "*level: got 'deeper'*"])
    row = suite.json("claims.json")["claims"]["S"]
    assert '"host syncs (dispatch)", "value": 0.0, "limit": 0.0' in str(row).replace("'", '"')


def test_a_blind_layer_fails_the_test(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hostsync._READING, "aten::_local_scalar_dense", "x")
    monkeypatch.delitem(hostsync._READING, "aten::_local_scalar_dense")
    monkeypatch.setattr(hostsync, "_violation_of", lambda error, trace: None)
    suite.write(SUITE)
    result = suite.run("-k", "test_clean")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a planted .item() was not found by dispatch"])


def test_under_an_emulator_its_own_work_does_not_count(suite: Suite) -> None:
    suite.write(
        """
        import pytest
        import some_emulator

        @pytest.mark.sm90
        def test_launches(device, no_host_sync):
            x = some_emulator.tensor()
            with no_host_sync():
                some_emulator.launch(x)

        @pytest.mark.sm90
        def test_reads(device, no_host_sync):
            x = some_emulator.tensor()
            with no_host_sync():
                x.sum().item()
        """,
        some_emulator="""
        import contextlib
        import torch

        class Provider:
            name = "some emulator"
            capabilities = ((9, 0),)

            @contextlib.contextmanager
            def open(self, node, capability):
                yield torch.device("cpu")

            def launched(self, node): return ("sm_90a",)

        def tensor(): return torch.ones(3)
        def launch(x): return x.sum().item()
        """,
        conftest="""
        import pytest, some_emulator

        @pytest.hookimpl(optionalhook=True)
        def pytest_kernel_claims_device(config, arch): return some_emulator.Provider()
        """,
    )
    result = suite.run("--gpu-arch=emulated")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_it.py:*: aten::_local_scalar_dense*"])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat([x, x]),
        lambda x: torch.add(x, other=x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.split(1),
        lambda x: torch.ops.conformance.steps(state=x),
    ],
    ids=["in a list", "by name", "nothing returned", "several results", "an operator of a project"],
)
def test_tensors_are_seen_wherever_an_operation_has_them(call: Any) -> None:
    """A step of a state in place takes it by name and returns nothing."""
    with torch.library._scoped_library("conformance", "DEF") as library:
        library.define("steps(Tensor(a!) state) -> ()")
        library.impl("steps", lambda state: None, "Meta")
        x = torch.empty(4, device="meta")
        with hostsync.Audit("dispatch", hostsync.Rules()) as audit:
            call(x)
        assert audit.watched
    with hostsync.Audit("dispatch", hostsync.Rules()) as audit:
        torch.ones(4).sum()
    assert not audit.watched
