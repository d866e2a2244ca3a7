"""The sampler against exact distributions, float64 references and itself in other company."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from twinfer.core.params import SamplingParams
from twinfer.core.request import Request
from twinfer.core.runtime.sampler import SampleEntry, Sampler
from twinfer.core.seeds import draw

VOCAB = 8
# 99.9 % quantiles of chi-square by degrees of freedom (tables); draws are fixed by seeds, so this cannot flake.
CHI2_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def entry(
    params: SamplingParams,
    *,
    position: int = 10,
    seed: int = 0,
    output: list[int] | None = None,
    prompt: list[int] | range = range(3),
    eos: tuple[int, ...] = (),
    num_drafts: int = 0,
) -> SampleEntry:
    request = Request(id="r", prompt=prompt, params=params, eos_token_ids=eos)
    return SampleEntry("r", request, 0, position, seed, output or [], prompt, num_drafts)


def reference(logits: torch.Tensor, p: SamplingParams) -> list[float]:
    """The distribution by the definitions, in float64, one token at a time."""
    x = [v / p.temperature for v in logits.double().tolist()]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k:
        order = order[: p.top_k]
    weight = {i: math.exp(x[i] - x[order[0]]) for i in order}
    total, kept, mass = sum(weight.values()), [], 0.0
    for i in order:
        if mass >= p.top_p * total:
            break
        kept.append(i)
        mass += weight[i]
    kept = [i for i in kept if weight[i] >= p.min_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


def draws(logits: torch.Tensor, p: SamplingParams, count: int, seed: int = 1) -> list[int]:
    entries = [entry(p, position=i, seed=seed) for i in range(count)]
    results = Sampler(logits.shape[0]).sample(logits.expand(count, -1), entries)
    return [r.tokens[0] for r in results]


def chi_square(counts: list[int], probs: list[float]) -> tuple[float, int]:
    total = sum(counts)
    cells = [(c, q * total) for c, q in zip(counts, probs, strict=True) if q > 0]
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


LOGITS = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -0.5, 0.25])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options: dict[str, float]) -> None:
    params = SamplingParams(**options)
    probs = reference(LOGITS, params)
    tokens = draws(LOGITS, params, 20_000)
    counts = [tokens.count(i) for i in range(VOCAB)]
    assert all(c == 0 for c, q in zip(counts, probs, strict=True) if q == 0)
    chi2, freedom = chi_square(counts, probs)
    assert chi2 < CHI2_999[freedom], (counts, probs)


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([draw(7, i) for i in range(20_000)], [draw(i, 7) for i in range(20_000)]):
        assert all(0 <= u < 1 for u in numbers)
        counts = [0] * 8
        for u in numbers:
            counts[int(u * 8)] += 1
        assert chi_square(counts, [1 / 8] * 8)[0] < CHI2_999[7]
        mean = sum(numbers) / len(numbers)
        lag = sum((a - mean) * (b - mean) for a, b in pairwise(numbers)) / len(numbers)
        assert abs(lag) < 4 / 12 / math.sqrt(len(numbers))  # 4 standard errors of a product of uniforms


def test_neighbouring_keys_give_different_numbers() -> None:
    keys = {(s, p) for s in range(60) for p in range(60)} | {(2**63 - 1, 0), (2**63 - 1, 10**6)}
    assert len({draw(s, p) for s, p in keys}) == len(keys)
    assert draw(3, 5) == draw(3, 5)


def test_top_k_and_top_p_ties_keep_the_smaller_ids() -> None:
    flat = torch.zeros(VOCAB)
    assert set(draws(flat, SamplingParams(temperature=1.0, top_k=3), 400)) == {0, 1, 2}
    assert set(draws(flat, SamplingParams(temperature=1.0, top_p=0.5), 400)) == {0, 1, 2, 3}
    step = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    assert set(draws(step, SamplingParams(temperature=1.0, top_k=5), 800)) == {0, 1, 3, 5, 7}
    greedy = Sampler(VOCAB).sample(step[None], [entry(SamplingParams())])
    assert greedy[0].tokens == (1,)


def test_smallest_nucleus_and_smallest_k_leave_the_best_token() -> None:
    for options in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-300}):
        assert set(draws(LOGITS, SamplingParams(**{"temperature": 1.0, **options}), 100)) == {2}


def test_top_p_beyond_the_head_equals_the_full_sort() -> None:
    """Flat distributions need more than the 1024 tokens that are looked at first."""
    torch.manual_seed(0)
    logits = torch.randn(5_000) * 0.05
    params = SamplingParams(temperature=1.0, top_p=0.5)
    probs = reference(logits, params)
    assert sum(q > 0 for q in probs) > 1024
    tokens = draws(logits, params, 3_000)
    assert all(probs[t] > 0 for t in tokens)
    assert len({t for t in tokens}) > 1024 // 2


@pytest.mark.parametrize("vocab", [7, 129, 3001])
def test_edge_31_a_row_never_depends_on_its_neighbours(vocab: int) -> None:
    """Alone, in a batch, in another order, with greedy, filtered and penalised neighbours: one and the same token."""
    torch.manual_seed(vocab)
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=min(5, vocab)),
        SamplingParams(temperature=1.2, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=-0.3),
        SamplingParams(temperature=3.0, top_p=0.99, logprobs=3),
    ]
    entries = [entry(kinds[i % len(kinds)], position=100 + i, seed=i * i, output=[i % vocab, 1, 1]) for i in range(35)]
    logits = torch.randn(len(entries), vocab) * 3
    sampler = Sampler(vocab)
    alone = [sampler.sample(logits[i : i + 1], [e])[0] for i, e in enumerate(entries)]
    assert sampler.sample(logits, entries) == alone
    order = torch.randperm(len(entries)).tolist()
    shuffled = sampler.sample(logits[order], [entries[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(entries))] == alone


def test_seed_decides_and_nothing_else() -> None:
    flat = torch.zeros(64)
    params = SamplingParams(temperature=1.0)
    assert draws(flat, params, 50, seed=1) == draws(flat, params, 50, seed=1)
    assert draws(flat, params, 50, seed=1) != draws(flat, params, 50, seed=2)


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0, 1.0, 0.0, 0.0, 0.0]])
    prompt, output = [0, 1], [3, 3, 4]
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    expected = torch.tensor([1.0, -2.0, 0.5, 3 / 2 - 2 * 0.5 - 0.25, 1 / 2 - 0.5 - 0.25, 0.0, 0.0, 0.0])
    count = 20_000
    entries = [entry(params, position=i, output=output, prompt=prompt) for i in range(count)]
    tokens = [r.tokens[0] for r in Sampler(VOCAB).sample(logits.expand(count, -1), entries)]
    chi2, freedom = chi_square([tokens.count(i) for i in range(VOCAB)], torch.softmax(expected.double(), 0).tolist())
    assert chi2 < CHI2_999[freedom]


def test_penalties_act_on_greedy_rows_and_leave_the_logits_alone() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9, 0.0]])
    before = logits.clone()
    params = SamplingParams(frequency_penalty=0.2)
    result = Sampler(4).sample(logits, [entry(params, output=[1])])
    assert result[0].tokens == (2,)
    assert torch.equal(logits, before)


def test_min_tokens_masks_end_of_sequence_and_stop_ids_until_enough_have_come() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0, 1.0, 1.0, 1.0, 1.0]])
    sampler = Sampler(VOCAB)

    def best(output: list[int], **options: object) -> int:
        params = SamplingParams(min_tokens=2, stop_token_ids=(2,), **options)  # type: ignore[arg-type]
        return sampler.sample(logits, [entry(params, output=output, eos=(1,))])[0].tokens[0]

    assert best([]) == 3
    assert best([4]) == 3
    assert best([4, 4]) == 1
    assert best([], ignore_eos=True) == 1  # then end-of-sequence ends nothing and need not be avoided
    drawn = SamplingParams(min_tokens=2, temperature=1.0)
    tokens = {sampler.sample(logits, [entry(drawn, position=i, eos=(1, 2))])[0].tokens[0] for i in range(200)}
    assert not tokens & {1, 2}


def test_logprobs_are_of_the_raw_logits_and_hold_the_sampled_token() -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 50) * 2
    exact = torch.log_softmax(logits.double(), -1)
    params = [
        SamplingParams(logprobs=3),
        SamplingParams(logprobs=0, temperature=1.0),
        SamplingParams(),
        SamplingParams(logprobs=2, temperature=5.0, repetition_penalty=4.0, presence_penalty=2.0),
    ]
    results = Sampler(50).sample(logits, [entry(p, position=9, output=[1, 2]) for p in params])
    assert [len(r.logprobs) for r in results] == [1, 1, 0, 1]
    for i in (0, 1, 3):
        (token,), (table,) = results[i].tokens, results[i].logprobs
        assert next(iter(table)) == token
        top = exact[i].topk(params[i].logprobs or 0).indices.tolist()
        assert set(table) == {token, *top}
        for t, value in table.items():
            assert value == pytest.approx(float(exact[i, t]), abs=1e-5)


def test_a_row_without_finite_logits_fails_alone() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 3] = float("nan")
    logits[3, 2] = float("inf")
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)):
        results = Sampler(VOCAB).sample(logits, [entry(params)] * 4)
        assert [r.failure is None for r in results] == [True, False, True, False]
        assert "finite" in (results[1].failure or "") and not results[1].tokens
    masked = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert Sampler(VOCAB).sample(logits[:1], [entry(masked)])[0].failure


def test_padding_columns_are_never_drawn() -> None:
    logits = torch.zeros(200, VOCAB)
    logits[:, 5:] = 50.0
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=7)):
        results = Sampler(5).sample(logits, [entry(params, position=i) for i in range(200)])
        assert all(r.tokens[0] < 5 for r in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)[None]
    results = Sampler(VOCAB).sample(
        logits.expand(2, -1), [entry(SamplingParams()), entry(SamplingParams(temperature=1.0, logprobs=1))]
    )
    assert results[0].tokens == (2,) and results[1].logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_edge_13_drafts_are_accepted_exactly_when_they_are_what_would_be_sampled(temperature: float, good: int) -> None:
    """Ragged drafts beside rows without any; the tokens equal those of one-by-one sampling."""
    torch.manual_seed(5)
    logits = torch.randn(4, 30)
    params = SamplingParams(temperature=temperature, frequency_penalty=0.5, logprobs=1)
    sampler = Sampler(30)
    truth: list[int] = []
    for j in range(4):
        truth += sampler.sample(logits[j : j + 1], [entry(params, position=20 + j, output=[7, *truth])])[0].tokens
    drafts = [t if j < good else (t + 1) % 30 for j, t in enumerate(truth[:3])]
    batch = [entry(params), entry(params, position=20, output=[7, *drafts], num_drafts=3), entry(params)]
    results = sampler.sample(torch.cat([logits[:1], logits, logits[:1]]), batch)
    assert list(results[1].tokens) == truth[: good + 1]
    assert len(results[1].logprobs) == good + 1
    assert results[0] == results[2]


def test_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 positions"):
        Sampler(VOCAB).sample(torch.zeros(2, VOCAB), [entry(SamplingParams())])
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), []) == []
