"""Plans: what a call needs is found once, for every size; and never mixed up with another's."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import HostLauncher

import linattn
from linattn.host import launch, plan, validate

pytestmark = pytest.mark.dispatch

SAME = pytest.mark.claim("CE-04", "a call at new sizes launches what a first call would launch")
ONCE = pytest.mark.claim("CE-05", "sizes never seen before are not validated anew")
BOUNDED = pytest.mark.claim("CE-06", "what is remembered of calls is bounded, whatever sizes come")

D = 128
Inputs = dict[str, Any]


def rows(towers: int, tokens: int, heads: int, wide: bool) -> torch.Tensor:
    """A tensor of its own, or the heads of a wider one."""
    buffer = torch.zeros(towers, tokens, heads + 2 * wide, D, dtype=torch.bfloat16)
    return buffer[:, :, wide : wide + heads]


def fixed(sizes: tuple[int, int], wide: bool, states: bool) -> Inputs:
    batch, tokens = sizes
    inputs = {name: rows(batch, tokens, h, wide) for name, h in (("q", 2), ("k", 2), ("v", 4))}
    inputs |= {"decay": torch.zeros(4), "output_final_state": True}
    if states:
        inputs["initial_state"] = torch.zeros(batch, 4, D, D)
        inputs["out"] = rows(batch, tokens, 4, wide)
    return inputs


def packed(sizes: tuple[int, int], wide: bool, states: bool) -> Inputs:
    sequences, tokens = sizes
    inputs = fixed((1, tokens), wide, False) | {"cu_seqlens": torch.zeros(sequences + 1).int()}
    del inputs["output_final_state"]
    if states:
        inputs["state_pool"] = torch.zeros(5, 4, D, D)
        inputs["initial_state_indices"] = torch.zeros(sequences, dtype=torch.int64)
        inputs["has_initial_state"] = torch.ones(sequences, dtype=torch.bool)
        inputs["out"] = rows(1, tokens, 4, wide)
    return inputs


def draft(sizes: tuple[int, int], wide: bool, states: bool) -> Inputs:
    batch, tokens = sizes[0], 1 + sizes[1] % 8
    inputs = {name: rows(batch, tokens, h, wide) for name, h in (("q", 2), ("k", 2), ("v", 4))}
    inputs |= {"state_pool": torch.zeros(5, 4, D, D), "decay": torch.zeros(2)}
    if states:
        inputs["state_indices"] = torch.zeros(2 * batch).int()[::2]
        inputs["k_buffer"], inputs["v_buffer"] = rows(5, 8, 2, wide), rows(5, 8, 4, wide)
        inputs["accepted_len"] = torch.zeros(batch).int()
        inputs["out"] = rows(batch, tokens, 4, wide)
    return inputs


FORMS: dict[str, Callable[..., Inputs]] = {
    "lightning_attn_fwd": fixed,
    "lightning_attn_fwd_varlen": packed,
    "la_verify_kvbuffer": draft,
}


def described(recorder: HostLauncher, inputs: Inputs) -> Any:
    """The last launch in a form to compare, without the addresses of what each call makes."""
    made = recorder.launches[-1]
    name, config, call = made.operator.name, made.config, made.call
    ours = {x.data_ptr() for x in inputs.values() if isinstance(x, torch.Tensor)}
    accesses = [
        (x.spec.name, x.address if x.address in ours else None, x.shape, x.strides, x.itemsize)
        for x in call.accesses
    ]
    return name, config, call.values, accesses


@SAME
@given(
    name=st.sampled_from(sorted(FORMS)),
    calls=st.lists(
        st.tuples(st.tuples(st.integers(0, 5), st.integers(0, 40)), st.booleans(), st.booleans()),
        min_size=2,
        max_size=12,
    ),
)
def test_new_sizes(name: str, calls: list[Any]) -> None:
    """Sizes of 0 and 1 included, contiguous and not, with all optional tensors and with none."""
    function = getattr(linattn, name)
    with launch.use_launcher(HostLauncher()) as recorder:
        assert isinstance(recorder, HostLauncher)
        for sizes, wide, states in calls:
            inputs = FORMS[name](sizes, wide, states)
            with launch.use_launcher(HostLauncher()) as first:
                assert isinstance(first, HostLauncher)
                expected = function(**inputs)
            count = len(recorder.launches)
            results = function(**inputs)
            assert len(recorder.launches) - count == len(first.launches)
            if first.launches:
                assert described(recorder, inputs) == described(first, inputs)
            for one, other in zip(results, expected):
                assert (one.shape, one.stride()) == (other.shape, other.stride())


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of the whole check."""
    calls: list[Any] = []
    check = validate.check

    def counted(function: Any, *rest: Any) -> Any:
        calls.append(function.name)
        return check(function, *rest)

    monkeypatch.setattr(validate, "check", counted)
    return calls


@ONCE
@pytest.mark.parametrize("states", [False, True], ids=["alone", "with states"])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_one_validation_serves_all_sizes(
    name: str, states: bool, recorder: HostLauncher, validated: list[Any]
) -> None:
    function = getattr(linattn, name)
    for first in range(2, 5):
        for second in (16, 24, 800):  # one number of drafts
            function(**FORMS[name]((first, second), False, states))
    assert validated == [name]
    assert len(recorder.launches) == 9


@ONCE
def test_what_new_sizes_do_not_hide(recorder: HostLauncher, validated: list[Any]) -> None:
    """Sizes that disagree, and a pool that has become too small, are refused beside warm plans."""
    function = linattn.lightning_attn_fwd_varlen
    for tokens in (4, 5):
        function(**packed((3, tokens), False, True))
    good = packed((4, 9), False, True)
    for name in ("k", "v", "out"):
        with pytest.raises(ValueError, match=f"{name}: got shape"):
            function(**good | {name: good[name][:, :8]})
    for name in ("initial_state_indices", "has_initial_state"):
        with pytest.raises(ValueError, match=f"{name}: got shape"):
            function(**good | {name: good[name][:3]})
    indexless = {"initial_state_indices": None}
    function(**good | indexless)
    with pytest.raises(ValueError, match="state_pool: got P = 5 slots, expected at least N = 6"):
        function(**packed((6, 9), False, True) | indexless)
    launches = len(recorder.launches)
    function(**good)
    assert len(recorder.launches) == launches + 1


@ONCE
def test_vectors_that_grow(recorder: HostLauncher) -> None:
    """One element has any stride; two of a column of a table are not contiguous."""
    table = torch.arange(64, dtype=torch.int32).reshape(8, 8)
    flags = torch.ones(8, 8, dtype=torch.bool)
    for name, column in (("initial_state_indices", table), ("has_initial_state", flags)):
        one, three = (packed((n, 9), False, True) | {name: column[:n, 0]} for n in (1, 3))
        for _ in range(2):
            linattn.lightning_attn_fwd_varlen(**one)
            with pytest.raises(ValueError, match=rf"{name}: got strides \(8,\)"):
                linattn.lightning_attn_fwd_varlen(**three)


@SAME
@pytest.mark.parametrize("name", ["state_indices", "accepted_len"])
def test_strides_that_reach_nothing(name: str, recorder: HostLauncher) -> None:
    """However long: of one request's index, and of a batch of one sequence."""
    inputs = draft((1, 3), False, True)
    inputs[name] = torch.zeros(1).int().as_strided((1,), (1 << 33,))
    for _ in range(3):
        linattn.la_verify_kvbuffer(**inputs)
    linattn.la_verify_kvbuffer(**draft((2, 3), False, True))
    for stride in (1 << 40, 3):
        inputs = fixed((1, 9), False, True)
        inputs["q"] = inputs["q"].as_strided((1, 9, 2, D), (stride, 2 * D, D, 1))
        linattn.lightning_attn_fwd(**inputs)
        accesses = {x.spec.name: x for x in recorder.launches[-1].call.accesses}
        assert accesses["q"].strides == (D, 2 * D, D, 1)


@ONCE
def test_heads_in_front_of_tokens(recorder: HostLauncher, validated: list[Any]) -> None:
    """Strides that follow from sizes are read with them; drafts are as many as they are."""
    for tokens in (5, 6, 70, 5):
        q, k, v = (torch.zeros(2, h, tokens, D).bfloat16().transpose(1, 2) for h in (2, 2, 4))
        linattn.lightning_attn_fwd(q, k, v, torch.zeros(4))
        accesses = {x.spec.name: x for x in recorder.launches[-1].call.accesses}
        assert accesses["v"].strides == (4 * tokens * D, D, tokens * D, 1)
        assert accesses["o"].strides == (4 * tokens * D, 4 * D, D, 1)
    assert validated == ["lightning_attn_fwd"]
    for tokens in (1, 2, 8, 4):
        linattn.la_verify_kvbuffer(**draft((2, tokens - 1), False, True))
        assert recorder.launches[-1].values["T"] == tokens
    assert validated == ["lightning_attn_fwd", "la_verify_kvbuffer"]
    too_many = draft((2, 7), False, True)
    too_many |= {name: rows(5, 4, h, False) for name, h in (("k_buffer", 2), ("v_buffer", 4))}
    with pytest.raises(ValueError, match="q: got T = 8, expected at most T_max = 4 from k_buffer"):
        linattn.la_verify_kvbuffer(**too_many)
    nine = {name: rows(2, 9, h, False) for name, h in (("q", 2), ("k", 2), ("v", 4), ("out", 4))}
    with pytest.raises(ValueError, match="q: got T = 9, expected 1 to 8 tokens"):
        linattn.la_verify_kvbuffer(**draft((2, 7), False, True) | nine)


@ONCE
def test_outputs_that_would_overlap_themselves(recorder: HostLauncher) -> None:
    """One token may have any stride; with two of them the elements meet."""
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    given = packed((1, 1), False, True)
    given["out"] = memory.as_strided((1, 1, 4, D), (0, 8, D, 1))
    linattn.lightning_attn_fwd_varlen(**given)
    given = packed((1, 2), False, True)
    given["out"] = memory.as_strided((1, 2, 4, D), (0, 8, D, 1))
    for _ in range(3):
        with pytest.raises(ValueError, match=r"out: got shape .* every element has its own"):
            linattn.lightning_attn_fwd_varlen(**given)


@BOUNDED
def test_memory_of_many_sizes(recorder: HostLauncher, validated: list[Any]) -> None:
    """Without the garbage collector: what gives way is freed at once."""
    big = packed((4, 5000), False, True)
    known = {"q", "k", "v", "out"}

    def call(tokens: int) -> None:
        linattn.lightning_attn_fwd_varlen(
            **{name: x[:, :tokens] if name in known else x for name, x in big.items()}
        )
        recorder.launches.clear()

    gc.collect()
    gc.disable()
    try:
        for tokens in range(1, 2500):
            call(tokens)
        before = sys.getallocatedblocks()
        for tokens in range(2500, 5000):
            call(tokens)
        after = sys.getallocatedblocks()
    finally:
        gc.enable()
    assert validated == ["lightning_attn_fwd_varlen"]
    assert after - before < 250
    (recipes,) = recorder.recipes.values()
    assert len(recipes) == 1
    assert len(recipes[0].plans) <= plan.RECENT


@SAME
def test_threads(recorder: HostLauncher) -> None:
    """Each with sizes of its own, which drive out those of the others."""
    problems: list[Exception] = []

    def calls(seed: int) -> None:
        try:
            for tokens in random.Random(seed).choices(range(1, 200), k=300):
                inputs = packed((2, tokens), False, True)
                linattn.lightning_attn_fwd_varlen(**inputs)
                mine = [x for x in list(recorder.launches) if at_q(x) == inputs["q"].data_ptr()]
                assert mine[-1].values["T"] == tokens
        except Exception as error:
            problems.append(error)

    def at_q(launched: Any) -> int:
        return next(x.address for x in launched.call.accesses if x.spec.name == "q")

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(recorder.launches) == 1200


@BOUNDED
def test_recipes_give_way(recorder: HostLauncher) -> None:
    """Without the garbage collector, too: nothing in them refers to itself."""
    gc.collect()
    gc.disable()
    try:
        for heads in range(1, 3 * plan.RECIPES):
            x = rows(1, 4, heads, False)
            linattn.lightning_attn_fwd(x, x.clone(), x.clone(), torch.zeros(heads))
        alive = [x for x in gc.get_objects() if isinstance(x, (plan.Recipe, plan.Planned))]
    finally:
        gc.enable()
    (recipes,) = recorder.recipes.values()
    assert len(recipes) == plan.RECIPES
    ours = {id(x) for one in recipes for x in (one, *one.plans.values())}
    assert {id(x) for x in alive if x.traits.device.type == "cpu"} >= ours
    assert len(recorder.plans) == 1
    dropped = [x for x in alive if isinstance(x, plan.Recipe) and x.launcher is recorder]
    assert len(dropped) == plan.RECIPES


@BOUNDED
def test_a_recipe_that_is_used_stays(recorder: HostLauncher, validated: list[Any]) -> None:
    """However many others come in between; and as many kinds as are kept can take turns."""

    def call(heads: int) -> None:
        x = rows(1, 4, heads, False)
        linattn.lightning_attn_fwd(x, x.clone(), x.clone(), torch.zeros(heads))

    for heads in range(2, 4 * plan.RECIPES):
        call(1)
        call(heads)
    assert len(validated) == 4 * plan.RECIPES - 1
    for heads in 3 * tuple(range(1, plan.RECIPES)):
        call(heads)
    assert len(validated) <= 5 * plan.RECIPES
