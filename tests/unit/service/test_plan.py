"""How many calls a request becomes, what each of them asks for, and whose choices they return."""

from __future__ import annotations

import pytest

from completions.domain.catalog import Abilities, Capability, Parameter
from completions.domain.completion import CompletionRequest, SamplingParams
from completions.domain.errors import InvalidRequestError
from completions.service.plan import planned
from fakes import request, route

ALL = dict.fromkeys(Parameter, Capability.HONOURED)


def able(*emulated: Parameter, max_stops: int | None = 4) -> Abilities:
    return Abilities({**ALL, **dict.fromkeys(emulated, Capability.EMULATED)}, max_stops=max_stops)


ONE_AT_A_TIME = able(Parameter.N, Parameter.PROMPT_BATCH, Parameter.BEST_OF)
BATCH = request(prompts=("p", "q"), n=3, best_of=3)


def calls(canonical: CompletionRequest, abilities: Abilities) -> list[tuple[tuple[object, ...], int, tuple[int, ...]]]:
    plan = planned(canonical, route(), abilities)
    return [(call.request.prompts, call.request.n, call.choices) for call in plan.calls]


def test_a_container_that_can_do_it_all_is_asked_once() -> None:
    assert calls(BATCH, able()) == [(("p", "q"), 3, (0, 1, 2, 3, 4, 5))]


def test_one_choice_at_a_time_is_one_call_a_choice() -> None:
    assert calls(BATCH, ONE_AT_A_TIME) == [
        *[(("p",), 1, (number,)) for number in (0, 1, 2)],
        *[(("q",), 1, (number,)) for number in (3, 4, 5)],
    ]


def test_one_prompt_at_a_time_is_one_call_a_prompt() -> None:
    assert calls(BATCH, able(Parameter.PROMPT_BATCH)) == [(("p",), 3, (0, 1, 2)), (("q",), 3, (3, 4, 5))]


def test_one_candidate_at_a_time_may_still_be_a_batch() -> None:
    both = ("p", "q")
    assert calls(BATCH, able(Parameter.N)) == [(both, 1, (0, 3)), (both, 1, (1, 4)), (both, 1, (2, 5))]


def test_a_single_choice_needs_no_emulation() -> None:
    assert calls(request(), ONE_AT_A_TIME) == [(("def f(",), 1, (0,))]


def test_each_candidate_has_a_seed_of_its_own_and_each_prompt_the_same_ones() -> None:
    plan = planned(request(prompts=("p", "q"), n=2, best_of=2, sampling=SamplingParams(seed=7)), route(), ONE_AT_A_TIME)
    assert [call.request.sampling.seed for call in plan.calls] == [7, 8, 7, 8]


def test_a_seed_at_the_end_of_its_range_goes_on_at_the_beginning() -> None:
    plan = planned(request(n=2, best_of=2, sampling=SamplingParams(seed=2**63 - 1)), route(), ONE_AT_A_TIME)
    assert [call.request.sampling.seed for call in plan.calls] == [2**63 - 1, -(2**63)]


def test_candidates_without_a_seed_stay_without() -> None:
    plan = planned(request(n=2, best_of=2), route(), ONE_AT_A_TIME)
    assert [call.request.sampling.seed for call in plan.calls] == [None, None]


def test_ranked_candidates_are_calls_with_logprobs() -> None:
    plan = planned(request(n=1, best_of=3), route(), ONE_AT_A_TIME)
    assert plan.ranked
    assert [(call.request.n, call.request.best_of, call.request.logprobs) for call in plan.calls] == [(1, 1, 0)] * 3


def test_more_calls_than_a_request_may_become_are_refused_by_name() -> None:
    planned(request(n=128, best_of=128), route(), ONE_AT_A_TIME)
    with pytest.raises(InvalidRequestError, match="129") as caught:
        planned(request(n=129, best_of=129), route(), ONE_AT_A_TIME)
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequestError) as caught:
        planned(request(prompts=("p",) * 129), route(), able(Parameter.PROMPT_BATCH))
    assert caught.value.param == "prompt"


def test_a_container_that_leaves_stop_texts_in_is_told_what_it_takes_and_all_are_cut_here() -> None:
    plan = planned(request(stop=("a", "b", "c")), route(), able(Parameter.STOP, max_stops=2))
    assert (plan.calls[0].request.stop, plan.cut) == (("a", "b"), ("a", "b", "c"))


def test_a_container_that_cuts_is_trusted_with_what_it_is_told() -> None:
    plan = planned(request(stop=("a", "b", "c")), route(), able(max_stops=2))
    assert (plan.calls[0].request.stop, plan.cut) == (("a", "b"), ("c",))


def test_a_models_own_stop_tokens_are_always_cut() -> None:
    plan = planned(request(), route(stop_tokens=("<|im_end|>",)), able())
    assert (plan.calls[0].request.stop, plan.cut) == ((), ("<|im_end|>",))


def test_an_echo_of_ours_is_not_asked_for() -> None:
    plan = planned(request(echo=True), route(), able(Parameter.ECHO))
    assert (plan.calls[0].request.echo, plan.echoed) == (False, True)
    plan = planned(request(echo=True), route(), able())
    assert (plan.calls[0].request.echo, plan.echoed) == (True, False)
