"""The demo model's grammar: what it writes it accepts, and what is spoiled it rejects."""

import importlib.util
import json
import random
import sys
from types import ModuleType

import jinja2
import places
import pytest
from tokenizers import Tokenizer

ROOT = places.ROOT


def load_corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "demo_corpus", ROOT / "scripts" / "demo_corpus.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus = load_corpus()

STORY = """\
Once upon a time, there was a clever fox named Rosa who lived under an old bridge. Every morning, \
Rosa sang a song to the kettle. Rosa had a blue kite that she loved very much.

One windy day, Rosa took it along to the meadow. But when she came home, the kite was gone! "Oh \
no!" said Rosa. "Where is my blue kite?" Her friend Theo, a wolf, came running. "Four eyes see \
more than two," he said.

So they walked back to the meadow and looked behind every stone. At last Theo looked behind a tall \
rock, and there was the blue kite!

Rosa hugged Theo. "You are a true friend," she said. From then on, they played with the kite \
together. And so Rosa learned that it helps to ask for help. The end."""


def user(*turns: str) -> list[dict[str, str]]:
    """Messages in turn, the user's first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def test_stories_are_accepted_whole_and_cut_anywhere() -> None:
    rng = random.Random(0)
    morals: set[str] = set()
    for _ in range(150):
        text, bound = corpus.plain_story(rng)
        read, problems = corpus.read_story(text, whole=True)
        assert problems == []
        assert read.items() <= bound.items()
        assert {"hero", "kind", "friend", "colour", "thing", "moral"} <= read.keys()
        morals.add(bound["moral"])
        cut = text[: rng.randrange(1, len(text))]
        assert corpus.check_story(cut) == [], cut
    assert len(morals) > 20


def test_a_story_of_a_held_out_hero_is_never_training_text() -> None:
    rng = random.Random(1)
    for held in (False, True):
        for _ in range(100):
            bound = corpus.plain_story(rng, held)[1]
            assert corpus.held_out(f"{bound['hero']} {bound['kind']}") == held


def test_the_story_below_is_right() -> None:
    assert corpus.check_story(STORY, whole=True) == []
    assert corpus.check_story(STORY, {"kind": "fox", "colour": "blue"}, whole=True) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Rosa hugged", "Rose hugged", "hero was 'Rosa', became 'Rose'"),
        ("Rosa hugged Theo", "Rosa hugged Tom", "friend was 'Theo', became 'Tom'"),
        ("But when she came", "But when he came", "sex was 'f', became 'm'"),
        ('more than two," he said', 'more than two," she said', "not in the grammar"),
        ("Her friend Theo", "His friend Theo", "sex was 'f', became 'm'"),
        ("the blue kite!", "the red kite!", "colour was 'blue', became 'red'"),
        ("Where is my blue kite", "Where is my blue drum", "thing was 'kite', became 'drum'"),
        ("back to the meadow", "back to the market", "place was 'the meadow', became 'the market'"),
        ("a clever fox", "an clever fox", "not in the grammar"),
        ("So they walked", "So they flew", "not in the grammar"),
        (
            " At last Theo looked behind a tall rock, and there was the blue kite!",
            "",
            "not in the grammar",
        ),
        ("Rosa hugged Theo. ", "", "not in the grammar"),
        ("Theo, a wolf", "Rosa, a wolf", "not in the grammar"),
        ("The end.", "The end. And then", "not in the grammar"),
    ],
)
def test_a_spoiled_story_is_rejected(old: str, new: str, problem: str) -> None:
    spoiled = STORY.replace(old, new, 1)
    assert spoiled != STORY
    (found,) = corpus.check_story(spoiled)
    assert found.startswith(problem)


def test_a_story_must_be_what_was_asked_for_and_finished() -> None:
    assert corpus.check_story(STORY, {"kind": "wolf"})
    half = STORY[: STORY.index("So they walked")]
    assert corpus.check_story(half) == []
    assert corpus.check_story(half, whole=True) == ["the story is not finished"]
    ask = user("Tell me a story about a fox.")
    assert corpus.check_answer(ask, STORY)
    assert not corpus.check_answer(ask, half)
    assert not corpus.check_answer(user("Tell me a story about a wolf."), STORY)


@pytest.mark.parametrize("held", [False, True])
def test_answers_in_dialogues_are_accepted(held: bool) -> None:
    rng = random.Random(2)
    groups = set()
    for _ in range(50):
        group, messages = corpus.dialogue(rng, held)
        groups.add(group)
        *asked, answer = messages
        assert asked[-1]["role"] == "user"
        assert corpus.check_answer(asked, answer["content"]), messages
        assert not corpus.check_answer(asked, answer["content"] + " Moo.")
        assert not corpus.check_answer(asked, "")
    assert len(groups) == 9


@pytest.mark.parametrize(
    ("messages", "right", "wrong"),
    [
        (user("What is 4 plus 7?"), "4 plus 7 is 11.", "4 plus 7 is 12."),
        (user("4+7"), "4 plus 7 is 11.", "7 plus 4 is 11."),
        (user("what is 15 - 6"), "15 minus 6 is 9.", "15 minus 6 is 21."),
        (
            user("What is 4 plus 7?", "4 plus 7 is 11.", "Now add 2."),
            "11 plus 2 is 13.",
            "4 plus 2 is 6.",
        ),
        (
            user("What is 21 plus 7?"),
            "That is too big for me. I can add numbers up to 20.",
            "21 plus 7 is 28.",
        ),
        (user("Count from 3 to 6."), "3, 4, 5, 6.", "3, 4, 6."),
        (user("Count from 3 to 5.", "3, 4, 5.", "Now backwards."), "5, 4, 3.", "3, 4, 5."),
        (user("What color is a banana?"), "A banana is yellow.", "A banana is red."),
        (
            user("What colour is the sky?", "The sky is blue.", "And grass?"),
            "Grass is green.",
            "Grass is blue.",
        ),
        (
            user("My cat is called Milo. What is my cat called?"),
            "Your cat is called Milo.",
            "Your cat is called Tom.",
        ),
        (
            user("my zorb is called milo. what is my zorb called"),
            "Your zorb is called milo.",
            "Your cat is called milo.",
        ),
        (
            user("Tom has a red ball and Mia has a blue kite. What colour is Mia's kite?"),
            "Mia's kite is blue.",
            "Mia's kite is red.",
        ),
        (
            user("Tom has a red ball. Is Tom's ball green?"),
            "No, Tom's ball is red.",
            "Yes, Tom's ball is red.",
        ),
        (
            user("I am Ada.", "Nice to meet you, Ada!", "2+2", "4", "What is my name?"),
            "Your name is Ada.",
            "You have not told me that yet.",
        ),
        (user("What is my name?"), "You have not told me that yet.", "Your name is Ada."),
        (
            user("Tell me a story about a fox.", STORY, "What colour was the kite?"),
            "The kite was blue.",
            "The kite was red.",
        ),
        (
            user("Tell me a story about a fox.", STORY, "Who was Rosa's friend?"),
            "Rosa's friend was Theo the wolf.",
            "Rosa's friend was Theo the fox.",
        ),
        (
            user("What is the capital of France?"),
            "I do not know that. I am a very small model: I know little stories, colours and "
            "small sums.",
            "Paris.",
        ),
    ],
)
def test_right_and_wrong_answers(messages: list[dict[str, str]], right: str, wrong: str) -> None:
    assert corpus.check_answer(messages, right)
    assert not corpus.check_answer(messages, wrong)


def test_no_training_dialogue_asks_a_held_out_sum() -> None:
    """Sums are held out by their numbers, whatever the wording."""
    rng, asked = random.Random(3), 0
    sums = [intent for intent in corpus.INTENTS if intent.key and intent.key.startswith("sum {a}")]
    for _ in range(500):
        for message in corpus.dialogue(rng)[1]:
            if message["role"] != "user":
                continue
            for intent in sums:
                for _, bound in corpus._understand(message["content"], intent.turns[0], {}):
                    if intent.derive(bound):
                        asked += 1
                        assert not corpus.held_out(f"sum {bound['a']} {bound['b']}")
    assert asked > 50


def test_the_files_of_the_model_agree() -> None:
    folder = ROOT / "infer" / "demo"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    for text in (STORY, "naïve café, 東京 🙂\n\t12 345"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("Once").ids[0] == config["bos_token_id"]
    stops = [tokenizer.token_to_id(token) for token in ("<|end|>", "<|eos|>")]
    assert generation["eos_token_id"] == stops
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    prompt = jinja2.Template(template).render(
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi! "}],
        bos_token="<|bos|>",
        add_generation_prompt=True,
    )
    tokens = tokenizer.encode(prompt, add_special_tokens=False).tokens
    special = [token for token in tokens if token.startswith("<|")]
    assert "".join(special) == "<|bos|><|system|><|end|><|user|><|end|><|assistant|>"
    assert prompt.endswith("<|user|>Hi!<|end|><|assistant|>")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
