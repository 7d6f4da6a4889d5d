"""Options that end an answer, or say which tokens and words may be in it.

vLLM's names and meanings. What the GPU does is compared with logits processors in numpy, which read
the same rules in their plainest form, and with those of transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from marks import others_full
from numpy.typing import NDArray

import infer
from infer import LLM, RequestError, Result, SamplingParams
from infer.engine.bad_words import BadWords
from infer.hub import DEMO
from infer.text.detokenizer import StopStrings

pytestmark = pytest.mark.demo

COUNT = [{"role": "user", "content": "Count from 1 to 9."}]
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9."
STORY = "Once upon a time"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "seed": 4},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 5},
}
Rule = Callable[[Sequence[int]], Sequence[int]]
"""Returns the tokens that may not come next, from the tokens of an answer so far."""


def without(prompt: Sequence[int], rule: Rule) -> Any:
    def process(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[list(rule(ids[len(prompt) :].tolist()))] = -np.inf
        return logits

    return process


def by_rule(llm: LLM, prompt: Any, rule: Rule, **options: Any) -> list[int]:
    processor = without(llm.encode(prompt), rule)
    return llm.generate(prompt, logits_processor=processor, **options).token_ids


def completed(words: Sequence[Sequence[int]]) -> Rule:
    """Returns vLLM's rule: the last token of a word may not follow the word's other tokens."""

    def rule(output: Sequence[int]) -> list[int]:
        return [w[-1] for w in words if list(output[len(output) - len(w) + 1 :]) == list(w[:-1])]

    return rule


def forms(llm: LLM, *words: str) -> list[list[int]]:
    """Returns the token ids of each word at the beginning of a text, and after a space."""
    texts = [text for word in words for text in (word, f" {word}")]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


# min_tokens


@others_full("way", WAYS, ["penalized"])
def test_nothing_ends_an_answer_before_min_tokens(llm: LLM, way: str) -> None:
    own = {"max_tokens": 60, "min_tokens": 40, **WAYS[way]}
    ends = sorted(llm.tokenizer.eos_token_ids)
    result = llm.generate(COUNT, **own)
    assert len(result.token_ids) >= 40
    assert not {*result.token_ids} & {*ends}
    del own["min_tokens"]
    expected = by_rule(llm, COUNT, lambda out: ends if len(out) < 40 else [], **own)
    assert result.token_ids == expected
    both = {"logits_processor": lambda ids, logits: logits, "min_tokens": 40}
    assert llm.generate(COUNT, **own, **both).token_ids == expected


def test_min_tokens_end_before_the_end(llm: LLM) -> None:
    """The token after them may be the end."""
    count = llm.generate(COUNT).completion_tokens
    assert llm.generate(COUNT, min_tokens=count).completion_tokens == count
    assert llm.generate(COUNT, min_tokens=count + 1, max_tokens=60).completion_tokens > count
    beside = llm.generate([COUNT, COUNT], [SamplingParams(), SamplingParams(min_tokens=30)])
    assert beside[0].text == COUNTED
    assert beside[1].completion_tokens >= 30


def test_stop_strings_count_from_min_tokens_on(llm: LLM) -> None:
    text = llm.generate(STORY, max_tokens=60).text
    ids = llm.generate(STORY, max_tokens=60).token_ids
    assert text.count(" a") > 2
    for least in (1, 5, 12, 20):
        result = llm.generate(STORY, stop=" a", min_tokens=least, max_tokens=60)
        sure = len(llm.decode([*llm.encode(STORY), *ids[:least]])) - len(STORY)
        ended = next(m for m in re.finditer(" a", text) if m.end() > sure)
        assert result.text == text[: ended.start()]
        assert (result.finish_reason, result.stop_string) == ("stop", " a")
        assert result.completion_tokens > least


def test_a_stop_string_may_begin_before_it_counts() -> None:
    stop = StopStrings("abc")
    assert stop.add("xabcab", may_end=False) == "xabc"
    assert stop.add("c") == ""
    assert stop.hit == "abc"
    both = StopStrings(["abc", "b"], include=True)
    assert both.add("xa") == "x"
    assert both.add("bcd") == "ab"
    assert both.hit == "b"


# stop_token_ids, include_stop_str_in_output


def test_stop_token_ids_end_an_answer(llm: LLM) -> None:
    ids = llm.generate(COUNT).token_ids
    four = ids[9]
    assert llm.decode(four) == "4"
    for given in ([four], four, {four}, np.array([four, four]), (2000, four)):
        result = llm.generate(COUNT, stop_token_ids=given)  # type: ignore[arg-type]
        assert (result.text, result.finish_reason) == ("1, 2, 3, ", "stop")
        assert result.token_ids == ids[:9]
    assert llm.generate(COUNT, stop_token_ids=[four], ignore_eos=True).token_ids == ids[:9]
    shown = llm.generate(COUNT, stop_token_ids=[four], include_stop_str_in_output=True, logprobs=0)
    assert (shown.text, shown.token_ids) == ("1, 2, 3, 4", ids[:10])
    assert shown.logprobs is not None
    assert len(shown.logprobs) == 10
    later = llm.generate(COUNT, stop_token_ids=[ids[1]], min_tokens=5, max_tokens=20)
    assert ids[1] not in later.token_ids[:5]
    assert later.completion_tokens >= 5


def test_the_models_own_end_is_never_shown(llm: LLM) -> None:
    result = llm.generate(COUNT, include_stop_str_in_output=True)
    assert result.text == COUNTED
    assert not {*result.token_ids} & llm.tokenizer.eos_token_ids


@pytest.mark.parametrize("stop", ["4, 5", ["9", "5"], "5, 6, 7, 8"])
def test_a_stop_string_in_the_text(llm: LLM, stop: Any) -> None:
    result = llm.generate(COUNT, stop=stop, include_stop_str_in_output=True)
    assert result.stop_string is not None
    assert result.text == COUNTED[: COUNTED.index(result.stop_string) + len(result.stop_string)]
    with llm.stream(COUNT, stop=stop, include_stop_str_in_output=True) as stream:
        assert "".join(map(str, stream)) == result.text


# allowed_token_ids


@others_full("way", WAYS, ["sampled"])
def test_only_allowed_tokens_come(llm: LLM, way: str) -> None:
    allowed = [2, 5, 44, 45, 46, 300, 301, 302, 1999, 2047]
    own = {"max_tokens": 12, **WAYS[way]}
    result = llm.generate(STORY, allowed_token_ids=allowed, **own)
    assert {*result.token_ids} <= {*allowed}
    others = [i for i in range(2048) if i not in allowed]
    assert result.token_ids == by_rule(llm, STORY, lambda out: others, **own)
    same = llm.generate(
        STORY, allowed_token_ids=allowed, logits_processor=lambda ids, logits: logits, **own
    )
    assert same.token_ids == result.token_ids
    biased = llm.generate(STORY, allowed_token_ids=allowed, logit_bias={300: 90}, max_tokens=3)
    assert biased.token_ids == [300] * 3
    assert llm.generate(COUNT).text == COUNTED  # what was forbidden is free for the next answer


# bad_words


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with infer.load(DEMO, max_batch=4, context=512, speculate="lookup") as llm:
        yield llm


@others_full("way", WAYS, ["filtered"])
@pytest.mark.parametrize("drafts", [False, True])
def test_bad_words_do_not_come(llm: LLM, drafting: LLM, way: str, drafts: bool) -> None:
    llm = drafting if drafts else llm
    own = {"max_tokens": 40, **WAYS[way]}
    ids = llm.generate(STORY, **own).token_ids
    several = [ids[2:4], ids[5:8], ids[12:14]]  # of which the first tokens may come
    words = ["Rosa", "witch", "cle ver", *several]
    result = llm.generate(STORY, bad_words=words, **own)
    expected = by_rule(
        llm, STORY, completed([*forms(llm, "Rosa", "witch", "cle ver"), *several]), **own
    )
    assert result.token_ids == expected != ids
    beside = llm.generate(
        [STORY, STORY, COUNT],
        [
            SamplingParams(**own),
            SamplingParams(bad_words=words, **own),
            SamplingParams(),
        ],
    )
    assert [each.token_ids for each in beside[:2]] == [ids, expected]
    assert beside[2].text == COUNTED
    both = llm.generate(STORY, bad_words=several, logits_processor=lambda i, x: x, **own)
    assert both.token_ids == by_rule(llm, STORY, completed(several), **own)


def test_a_bad_word_at_the_beginning_and_after_a_space(llm: LLM) -> None:
    for prompt in (STORY, "Who are you?\n\n"):
        for word in (" there", ","):
            text = llm.generate(prompt, bad_words=[word], max_tokens=30).text
            assert not re.search(rf"(^|\s){word.strip()}\b", text)
    assert llm.generate(STORY, bad_words="Rosa", max_tokens=30).text.count("Rosa") == 0


def test_bad_words_need_no_library(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    ids = llm.generate(STORY, max_tokens=8).token_ids
    assert llm.generate(STORY, bad_words=[ids[:2]], max_tokens=8).token_ids[:1] == ids[:1]
    assert llm.generate(STORY, bad_words=[ids[:2]], max_tokens=8).token_ids[:2] != ids[:2]


def test_what_holds_an_answer_goes_before_bad_words(llm: LLM) -> None:
    """And before min_tokens: where a schema leaves nothing else, it is followed."""
    pytest.importorskip("llguidance")
    pattern = "[a-z ]{12,30}"
    ids = llm.chat("Who?", regex=pattern).token_ids
    words = [ids[i : i + 2] for i in range(len(ids) - 1)]
    held = llm.chat("Who?", regex=pattern, bad_words=words)
    assert re.fullmatch(pattern, held.text)
    pairs = [*map(list, zip(held.token_ids, held.token_ids[1:], strict=False))]
    assert len(pairs) > 3
    assert not [pair for pair in pairs if pair in words]
    one = llm.chat("Who?", regex="cat and sun", bad_words=["cat", ids[:2]], min_tokens=30)
    assert (one.text, one.finish_reason) == ("cat and sun", "stop")
    number = llm.chat("Which?", regex="[0-9]{1,40}", min_tokens=9)
    assert 9 <= number.completion_tokens <= 40


def test_the_last_token_of_a_word_depends_on_those_before() -> None:
    words = BadWords([(1, 2), (3, 1, 4), (5, 1, 2), (7, 7, 7)])
    assert words.longest == 2
    cases: dict[tuple[int, ...], list[int]] = {
        (): [],
        (1,): [2],
        (3, 1): [2, 4],
        (5, 1): [2, 2],
        (7,): [],
        (7, 7): [7],
        (2, 3): [],
    }
    for tokens, expected in cases.items():
        assert words.after(tokens) == expected
    mask = np.array([0b10110], np.uint32)
    words.forbid(mask, [3, 1])
    assert mask[0] == 0b00010
    only = np.array([0b10100], np.uint32)
    words.forbid(only, [3, 1])
    assert only[0] == 0b10100  # nothing else would be left


# choices


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["maybe so", "surely not", "maybe"],
        ["a.b*c", "[x]", "1+1=2", "$", "(", "\\d"],
        ["ünïcode", "猫", "🙂 ok"],
        ["line\nbreak", "tab\tstop", " leading", "trailing ", "a/b", '"quoted"', "#-&~<>"],
        [f"option {i}" for i in range(300)],
    ],
)
def test_an_answer_is_one_of_the_choices(llm: LLM, choices: list[str]) -> None:
    pytest.importorskip("llguidance")
    for seed in range(3):
        result = llm.chat("Which one?", choices=choices, temperature=2.0, seed=seed)
        assert result.finish_reason == "stop"
        assert result.text in choices
    assert llm.generate(STORY, choices=tuple(choices)).text in choices


def test_one_choice_is_written(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    for choice in ("a.b*c", " x ", "a\nb", "é\\", "<tag>", "100%"):
        assert llm.chat("What?", choices=[choice]).text == choice


# In a process of its own


@pytest.mark.full
def test_all_of_it_in_a_process_of_its_own(llm: LLM) -> None:
    options: list[dict[str, Any]] = [
        {"bad_words": ["Rosa", [*llm.generate(STORY, max_tokens=4).token_ids[1:4]]]},
        {"min_tokens": 25, "stop": "."},
        {"allowed_token_ids": range(300, 900)},
        {"choices": ["yes", "no"]},
        {"stop_token_ids": [44], "include_stop_str_in_output": True},
    ]
    expected = [llm.generate(STORY, **{"max_tokens": 30, **each}).text for each in options]
    with infer.load(DEMO, isolate=True) as other:
        assert [
            other.generate(STORY, **{"max_tokens": 30, **each}).text for each in options
        ] == expected


# Processors of other libraries, with the same options


@pytest.mark.live
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_bad_words_and_least_lengths_are_those_of_transformers(llm: LLM, way: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation import (
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
    )

    own = {"max_tokens": 40, **WAYS[way]}
    prompt = llm.encode(COUNT)
    ids = llm.generate(COUNT, min_tokens=30, **own).token_ids
    words = [ids[i : i + 2] for i in (1, 7, 20, 27)]
    ends = sorted(llm.tokenizer.eos_token_ids)
    theirs = [
        NoBadWordsLogitsProcessor(words, ends),
        MinNewTokensLengthLogitsProcessor(len(prompt), 30, ends),
    ]

    def process(so_far: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        scores = torch.tensor(logits[None])
        for each in theirs:
            scores = each(torch.tensor(so_far[None]), scores)
        return scores[0].numpy()  # type: ignore[no-any-return]

    result: Result = llm.generate(COUNT, bad_words=words, min_tokens=30, **own)
    assert result.token_ids == llm.generate(COUNT, logits_processor=process, **own).token_ids
    assert result.token_ids != ids


# Options that are refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, "min_tokens must be an integer from 0 .* up, not -1"),
        ({"min_tokens": 2.5}, "min_tokens must be an integer"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens, 8, not 9"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids must be a list of token ids, not \['a'\]"),
        ({"stop_token_ids": [2048]}, "stop_token_ids must name token ids from 0 to 2047, not 2048"),
        ({"stop_token_ids": range(60)}, "stop_token_ids must be at most 49 token ids, not 60"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name a token"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be a list of token ids"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids must name token ids from 0 to 2047"),
        ({"allowed_token_ids": [5], "regex": "a"}, "allowed_token_ids leave no room"),
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, "min_tokens asks for tokens that end"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be True or False"),
        ({"bad_words": [""]}, "bad_words must be a list of texts"),
        ({"bad_words": ["  "]}, "bad_words must be a list of texts"),
        ({"bad_words": [[]]}, "bad_words must be a list of texts"),
        ({"bad_words": [[1, -2]]}, "bad_words must be a list of texts"),
        ({"bad_words": [[1, 2048]]}, "bad_words must name token ids from 0 to 2047, not 2048"),
        ({"choices": []}, "choices must be a list of texts"),
        ({"choices": "yes"}, "choices must be a list of texts"),
        ({"choices": ["yes", ""]}, "choices must be a list of texts"),
        ({"choices": ["yes"], "regex": "a"}, "regex and choices were given"),
        ({"choices": ["yes"], "ignore_eos": True}, "ignore_eos leaves no end"),
        ({"choices": ["x" * 70000]}, "choices must have at most 65,536 characters"),
    ],
)
def test_what_cannot_be_served(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.stream(STORY, **options)
