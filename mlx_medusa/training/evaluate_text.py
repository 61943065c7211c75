"""Measure text heads with the real engine: chains and trees against plain decoding, on prompts."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, chain_pass, prefill
from mlx_medusa.medusa.trees import Tree, chain, grow
from mlx_medusa.medusa.vocabulary import DraftVocabulary
from mlx_medusa.text.generator import TextGenerator
from mlx_medusa.text.results import TextResult
from mlx_medusa.training.data import Batch
from mlx_medusa.training.data_text import find_matches
from mlx_medusa.training.harvest_text import Messages
from mlx_medusa.training.objective import Scores, Target

Report = dict[str, Any]


def evaluate_text(
    generator: TextGenerator,
    prompts: Sequence[Messages],
    *,
    max_tokens: int = 128,
    width: int | None = None,
    nodes: int = 8,
    progress: bool = False,
) -> Report:
    """Answer prompts without heads, with a chain of guesses, and with the best tree of ``nodes`` guesses.

    The report holds for each way ``tokens_per_verify``, ``accepted_per_head`` (of all rounds) and milliseconds a token
    after the prompt, and whether the texts are those of plain decoding; ``expected`` holds the accuracies per guess and
    the tokens per verify of a chain that follow from them. The tree is grown from the accuracies in the heads' file,
    or, where there are none, from those of the first third of the prompts.
    """
    drafter: Any = generator.drafter
    if drafter is None:
        raise OptionError("there are no heads to evaluate: name some with --heads")
    scores = Scores(drafter.max_drafts)
    target = _target(generator)
    ways = {"plain": chain(0), "chain": chain(min(width or 99, drafter.max_drafts + 1) - 1)}
    answers: list[Report] = []
    bar = tqdm(prompts, unit="prompt", disable=None if progress else True)
    for number, messages in enumerate(bar):
        plain = generator.generate(messages, max_tokens=max_tokens, medusa=False)
        scores.add(drafter.heads, _batch(generator, messages, plain.tokens, scores.guesses), target)
        if "tree" not in ways and (drafter.accuracies or 3 * (number + 1) >= len(prompts)):
            ways["tree"] = grow(drafter.accuracies or scores.accuracies(), nodes)
        results = {
            way: plain if way == "plain" else _generate(generator, messages, max_tokens, tree)
            for way, tree in ways.items()
        }
        answers.append({way: _answer(result, plain) for way, result in results.items()})
    return {
        "prompts": len(answers),
        "paths": [list(path) for path in ways["tree"].paths],
        "expected": scores.to_dict(),
        **{way: _total([answer[way] for answer in answers if way in answer]) for way in ways},
    }


def _generate(generator: TextGenerator, messages: Messages, max_tokens: int, tree: Tree) -> TextResult:
    paths = [list(path) for path in tree.paths]
    return generator.generate(messages, max_tokens=max_tokens, tree=paths)


def _answer(result: TextResult, plain: TextResult) -> Report:
    return {
        "tokens": result.medusa.tokens,
        "rounds": result.medusa.rounds,
        "accepted_per_head": result.medusa.accepted_per_head,
        "seconds": result.medusa.decode_seconds,
        "draft_seconds": result.medusa.draft_seconds,
        "same_text": result.tokens == plain.tokens,
    }


def _total(answers: Sequence[Report]) -> Report:
    """The sums over the answers, and what follows from them."""
    names = ("tokens", "rounds", "seconds", "draft_seconds", "same_text")
    sums = {name: sum(answer[name] for answer in answers) for name in names}
    rounds, tokens = max(sums["rounds"], 1), max(sums["tokens"], 1)
    heads = np.sum([answer["accepted_per_head"] for answer in answers], axis=0)
    return {
        "answers": len(answers),
        "tokens": sums["tokens"],
        "rounds": sums["rounds"],
        "same_text": sums["same_text"],
        "tokens_per_verify": round(sums["tokens"] / rounds, 3),
        "accepted_per_head": np.round(heads / rounds, 4).tolist(),
        "milliseconds_per_token": round(1000 * sums["seconds"] / tokens, 2),
        "draft_milliseconds_per_round": round(1000 * sums["draft_seconds"] / rounds, 2),
    }


def _target(generator: TextGenerator) -> Target:
    """What the heads can guess."""
    guess: Any = generator.drafter.guess  # type: ignore[union-attr]
    size = generator.model.args.vocab_size
    ids = np.unique(np.array(guess.ids)) if isinstance(guess, DraftVocabulary) else np.arange(size)
    return Target(generator.model, ids.astype(np.int32), size)


def _batch(generator: TextGenerator, messages: Messages, answer: list[int], guesses: int) -> Batch:
    """What training would read of a prompt and its answer: one pass of the model over both."""
    model, prompt = generator.model, generator.tokens(messages)
    cache = KVCache(model.num_layers)
    state, _ = prefill(model, prompt, cache, Limits(frozenset(), 1))
    after = chain_pass(model, answer[:-1], cache) if len(answer) > 1 else state.hidden[:, :0]
    hidden = mx.concatenate([state.hidden, after], axis=1).astype(mx.float32)
    before, rows = len(prompt) - 1, max(1, len(answer) - 1)
    tokens = np.zeros((1, rows + guesses), dtype=np.int32)
    tokens[0, : len(answer)] = answer
    args = generator.drafter.heads.args  # type: ignore[union-attr]
    whole = np.array(prompt + answer)
    longest = max(getattr(args, "match_length", 0), 1)
    places, lengths = find_matches(whole, len(prompt), guesses, longest)
    return Batch(
        hidden[:, :before],
        hidden[:, before : before + rows],
        tokens,
        np.array([len(answer)]),
        memory_lengths=np.array([before]),
        matches=places[:, None],
        followed=whole[np.minimum(places + 1, len(whole) - 1)][:, None],
        match_lengths=lengths[:, None],
    )


def table(report: Report) -> str:
    """The report in words."""
    expected = report["expected"]
    percent = lambda rates: " ".join(f"{rate:.0%}" for rate in rates)  # noqa: E731
    lines = [
        f"{report['prompts']} prompts; top-1: {percent(expected['top1'])}; top-5: {percent(expected['top5'])}; "
        f"expected {expected['tokens_per_verify']:.3f} tokens per verify in a chain"
    ]
    for way in ("plain", "chain", "tree"):
        one = report[way]
        heads = f", accepted per head: {percent(one['accepted_per_head'])}" if way != "plain" else ""
        lines.append(
            f"{way}: {one['tokens_per_verify']} tokens per verify, {one['milliseconds_per_token']} ms per token, "
            f"drafting {one['draft_milliseconds_per_round']} ms a round, same text in {one['same_text']} of "
            f"{one['answers']}{heads}"
        )
    return "\n".join([*lines, f"tree: {report['paths']}"])
