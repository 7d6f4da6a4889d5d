"""The grammar behind the demo model: it writes the training text and judges what the model says.

One set of templates serves both directions. `story` and `dialogue` fill the fields of templates
with random values; `check_story` and `check_answer` match text against the same templates, with
every field bound to one value for the whole text. A story in which the fox changes its name, its
pronoun or the colour of its kite has no parse, and neither has an answer with the wrong sum.

Template markup: `{hero}` is a field, `{a kind}` its value with the indefinite article, a capital
(`{Kind}`, `{A kind}`) its value at the start of a sentence. `{he}`, `{him}`, `{his}`, `{himself}`
are the hero's pronouns and `{fhe}`, `{fhim}`, `{fhis}` the friend's.

Everything is written for this project; no outside text is used.

    python scripts/demo_corpus.py        # print a few samples
"""

import re
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random

Bound = dict[str, str]
Message = dict[str, str]
Words = dict[str, tuple[str, ...]]
Draw = Callable[[Random], Bound]
Derive = Callable[[Bound], Bound | None]

MODEL_NAME = "Thimble"
LARGEST_ADDEND = 20
LARGEST_NUMBER = 30
LONGEST_COUNT = 15


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _list(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split(";"))


def _pairs(text: str) -> dict[str, str]:
    return {first: second for first, second in (pair.split("/") for pair in text.split())}


# ---------------------------------------------------------------------------------- words

GIRLS = _words(
    """Ada Amara Anja Clara Daisy Ella Freya Greta Hazel Ivy Leila Lily Luna Mei Maya Mia Nina
    Nora Pearl Poppy Rosa Ruby Sara Tess Tilda Una Wren Yuki Zoe Anna"""
)
BOYS = _words(
    """Arlo Ben Bruno Diego Emil Felix Finn Gus Hugo Jack Jonas Kofi Kwame Leo Max Milo Ned Noah
    Omar Oscar Otto Pablo Ravi Rufus Sam Theo Toby Tom Walter Bob"""
)
SEX = (
    dict.fromkeys(GIRLS, "f")
    | dict.fromkeys(BOYS, "m")
    | dict.fromkeys(("girl", "princess", "queen", "witch"), "f")
    | dict.fromkeys(("boy", "prince", "king", "wizard"), "m")
)
PRONOUNS = {
    "he": {"m": "he", "f": "she"},
    "him": {"m": "him", "f": "her"},
    "his": {"m": "his", "f": "her"},
    "himself": {"m": "himself", "f": "herself"},
}

WORDS: Words = {
    "sex": ("f", "m"),
    "name": GIRLS + BOYS,
    "kind": _words(
        """fox rabbit bear mouse hedgehog owl duck frog squirrel badger cat dog puppy kitten goat
        lamb pig pony donkey elephant lion tiger monkey penguin otter beaver mole hen goose sparrow
        turtle snail bee ant bat wolf deer camel panda koala giraffe zebra crow robin lizard hamster
        parrot dragon robot giant knight pirate baker farmer unicorn troll ghost elf fairy gardener
        girl boy princess prince king queen witch wizard horse cow sheep bird bunny dinosaur"""
    ),
    "trait": _words(
        """little small young kind shy curious cheerful clever gentle sleepy merry quiet busy funny
        tiny happy careful dreamy polite hungry"""
    ),
    "colour": _words("red blue green yellow purple orange pink white silver golden brown black"),
    "thing": _words(
        """kite ball scarf hat drum boat bell button ribbon spoon whistle umbrella teapot lantern
        balloon blanket mitten marble bucket book bag cup box bike doll coat sock pencil ring"""
    ),
    "home": _list(
        """in a small house by the sea; in a hollow tree; at the edge of a deep forest; on top of a
        windy hill; in a crooked cottage; near a quiet river; under an old bridge; in a village
        with only one street; beside a busy mill; in a cave with a round door; in a tower with a
        hundred steps; behind a bakery; in a boat that never sailed; at the end of a long lane;
        in a garden full of bees; by a pond full of lilies; in a barn with a squeaky door;
        between two mountains; in a little town by a lake"""
    ),
    "place": _list(
        """the old forest; the market; the river; the meadow; the beach; the hill; the orchard; the
        village square; the pond; the windmill; the harbour"""
    ),
    "family": _words("mother father grandmother grandfather aunt uncle"),
    "day": _list(
        """One day; One sunny morning; One windy day; One quiet afternoon; One cold morning; One
        rainy Tuesday; One fine day in spring"""
    ),
    "habit": _list(
        """said good morning to the sun; counted the clouds; ate toast with honey; sang a song to
        the kettle; danced twice around the table; told a joke to the snails; watered the one
        flower by the door; practised standing on one leg; looked for the smallest stone on the
        path; waved at the milk cart"""
    ),
    "food": _list(
        """a cheese sandwich; a warm bun; an apple pie; a bowl of soup; a honey cake; a jam tart; a
        pot of porridge; a bag of nuts; a pancake as big as a hat"""
    ),
    "spot": _list(
        """under a fallen leaf; behind a tall rock; inside an empty flowerpot; between two
        mushrooms; on top of a tree stump; beside a sleepy toad; in the arms of a scarecrow; in
        an old nest; under a wooden bench; behind the garden gate; under the bed; on the table;
        in the kitchen; next to the lamp"""
    ),
    "searcher": _list(
        """They even asked a toad, but the toad was asleep.; They even asked a beetle, but the
        beetle only spoke Beetle.; They even asked the wind, but the wind was in a hurry.; They
        even asked a very old fish, but it had forgotten the question."""
    ),
    "fear": _list(
        """the dark; thunder; the creaky stairs; the shadows on the wall; the wind in the chimney"""
    ),
    "trap": _list(
        """in a deep hole; in a muddy ditch; in a prickly bush; at the bottom of a dry well; in a
        barrel with steep sides"""
    ),
    "hideout": _list(
        """under the rug; behind the curtain; in an old boot; at the back of the cupboard"""
    ),
    "noise": _list(
        """Tap, tap, tap; Thump, thump, thump; Scritch, scratch, scritch; Clonk, clonk, clonk"""
    ),
    "doing": _list(
        """building a very small house; learning to dance in very big boots; cracking walnuts with
        a stone; playing a drum made from a nutshell"""
    ),
    # Chats
    "hi": _list(
        """hello; hi; hey; good morning; good afternoon; good evening; hello there; hi there"""
    ),
    "pet": _words(
        """cat dog rabbit hamster horse fish parrot turtle mouse goat pony kitten puppy brother
        sister friend teacher cousin doll bear robot boat village street school"""
    ),
    "fruit": _words("apples pears plums nuts cakes stones shells books stars coins buttons eggs"),
    "treat": _list(
        """apples; plums; pancakes; honey; soup; cheese; music; rain; long walks; old maps;
        swimming; drawing; chocolate; pizza"""
    ),
}

# Names, numbers and, in prompts, some nouns are open: any word can stand there, so that the model
# learns to copy. No two fields of one distinct domain have the same value.
_NAME = r"[A-Za-z]+"
_NUMBER = r"[0-9]+"
_OPEN_NOUNS = {"kind", "pet", "thing", "noun"}
_DISTINCT = {"name", "kind", "colour", "thing", "pet", "object", "animal"}
_DOMAINS = {"hero": "name", "friend": "name", "town": "name", "fkind": "kind", "fsex": "sex"}
_DOMAINS |= dict.fromkeys(("a", "b", "c", "d", "e"), "number")

_ONSETS = _words(
    """b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl fr gl gr kl kn pl pr qu sh sk sl sm
    sn sp st str th tr tw wh"""
)
_VOWELS = _words("a a a e e e i i o o o u u y ai ay ea ee ia ie oo ou ow")
_CODAS = _words("b ck d g k l ll m m n n nd ng nk p r r rd rk s sh ss st t tt x z")
_RUDE = re.compile(
    "ass|cock|coon|crap|cum|cunt|damn|dick|fag|fuck|nig|piss|rap|sex|shit|slut|tit|who"
)


def _domain(variable: str) -> str:
    stem = variable.rstrip("0123456789")
    return _DOMAINS.get(stem, stem)


def _invented(rng: Random) -> str:
    """A word of no language, of two or three syllables. It is there to be copied."""
    while True:
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(("", "", rng.choice(_CODAS)))
            for _ in range(rng.choice((2, 2, 2, 3)))
        )
        if not _RUDE.search(word):
            return word


# ------------------------------------------------------------------------------ templates


@dataclass(frozen=True)
class Slot:
    """One piece of a template: a literal, or a variable and how its value is spelled there."""

    literal: str = ""
    variable: str = ""
    pronoun: str = ""
    article: bool = False
    capital: bool = False

    def spell(self, value: str) -> str:
        text = PRONOUNS[self.pronoun][value] if self.pronoun else value
        if self.article:
            text = ("an " if text[0].lower() in "aeiou" else "a ") + text
        return text[0].upper() + text[1:] if self.capital else text


@cache
def _slots(template: str) -> tuple[Slot, ...]:
    slots = []
    for literal, markup, _, _ in string.Formatter().parse(template):
        if literal:
            slots.append(Slot(literal=literal))
        if markup:
            name = markup.lower().removeprefix("a ")
            article = name != markup.lower()
            pronoun = name.removeprefix("f") if name.removeprefix("f") in PRONOUNS else ""
            variable = name.removesuffix(pronoun) + "sex" if pronoun else name
            slots.append(Slot("", variable, pronoun, article, markup[0].isupper()))
    return tuple(slots)


def _values(variable: str, bound: Bound, words: Words) -> tuple[str, ...]:
    """The values a variable may take, given the variables that have theirs."""
    if variable in ("sex", "fsex"):
        who = ("kind", "hero") if variable == "sex" else ("fkind", "friend")
        known = [SEX[bound[w]] for w in who if bound.get(w) in SEX]
        return (known[0],) if known else words["sex"]
    values = words.get(variable) or words[_domain(variable)]
    kind = bound.get({"hero": "kind", "friend": "fkind"}.get(variable, ""))
    if kind in SEX:
        values = tuple(value for value in values if SEX[value] == SEX[kind])
    return values


def _free(variable: str, value: str, bound: Bound) -> bool:
    domain = _domain(variable)
    return domain not in _DISTINCT or all(
        value.lower() != other.lower() for key, other in bound.items() if _domain(key) == domain
    )


def fill(
    rng: Random,
    template: str,
    bound: Bound,
    words: Words = WORDS,
    invent_name: float = 0.5,
    invent_noun: float = 0.15,
) -> str:
    """The template as text. Variables without a value get a random one, which `bound` keeps."""
    text = []
    for slot in _slots(template):
        variable, domain = slot.variable, _domain(slot.variable)
        while variable and variable not in bound:
            if domain == "name" and rng.random() < invent_name:
                value = _invented(rng).capitalize()
            elif domain in _OPEN_NOUNS and rng.random() < invent_noun:
                value = _invented(rng)
            else:
                value = rng.choice(_values(variable, bound, words))
            if _free(variable, value, bound):
                bound[variable] = value
        text.append(slot.spell(bound[variable]) if variable else slot.literal)
    return "".join(text)


def _candidates(
    slot: Slot, rest: str, bound: Bound, words: Words, prompt: bool
) -> tuple[str, ...] | None:
    """The values an unbound slot can have at the start of `rest`; None where `rest` is too short
    to tell."""
    domain = _domain(slot.variable)
    if domain in ("number", "name") or (prompt and domain in _OPEN_NOUNS):
        article = "(?:[Aa]n? )?" if slot.article else ""
        found = re.match(f"{article}({_NUMBER if domain == 'number' else _NAME})", rest)
        if not found:
            return () if rest else None
        if found.end() == len(rest) and not prompt:
            return None
        return (found[1],)
    return _values(slot.variable, bound, words)


def _match(
    template: str, text: str, start: int, bound: Bound, words: Words = WORDS, prompt: bool = False
) -> Iterator[tuple[int, Bound]]:
    """Each way to read the template at text[start:]: where it ends and the values of its variables.

    The end is -1 where the text stops inside the template. A `prompt` is read without regard to
    case, and with any word for a noun.
    """
    slots = _slots(template)

    def walk(index: int, at: int, bound: Bound) -> Iterator[tuple[int, Bound]]:
        if index == len(slots):
            yield at, bound
            return
        slot = slots[index]
        values: tuple[str, ...] | None = ("",)
        if slot.variable:
            known = bound.get(slot.variable)
            values = (known,) if known else _candidates(slot, text[at:], bound, words, prompt)
        if values is None:
            yield -1, bound
            return
        for value in values:
            part = slot.spell(value) if slot.variable else slot.literal
            seen = text[at : at + len(part)]
            if (seen.lower() != part[: len(seen)].lower()) if prompt else not part.startswith(seen):
                continue
            if len(seen) < len(part):
                yield -1, bound
            elif not slot.variable or slot.variable in bound:
                yield from walk(index + 1, at + len(part), bound)
            elif _free(slot.variable, value, bound):
                yield from walk(index + 1, at + len(part), bound | {slot.variable: value})

    yield from walk(0, start, bound)


# -------------------------------------------------------------------------------- stories


@dataclass(frozen=True)
class Plot:
    """Paragraphs of sentences; a sentence is its alternative templates, "" if it may be left out.

    `own_words` overrides the vocabulary; `topic` is how a request names the plot.
    """

    topic: str
    paragraphs: tuple[tuple[tuple[str, ...], ...], ...]
    own_words: dict[str, tuple[str, ...]]

    @cached_property
    def words(self) -> Words:
        return WORDS | self.own_words

    @cached_property
    def sentences(self) -> tuple[tuple[str, ...], ...]:
        """All sentences in order, each alternative with the white space before it."""
        begin, *middle, end = self.paragraphs
        paragraphs = ((OPENING, HABIT, *begin), *middle, (*end, MORAL, ("", "The end.")))
        sentences = []
        for number, paragraph in enumerate(paragraphs):
            for at, sentence in enumerate(paragraph):
                space = " " if at else "\n\n" if number else ""
                sentences.append(tuple(template and space + template for template in sentence))
        return tuple(sentences)


OPENING = _list(
    """Once upon a time, there was {a trait} {kind} named {hero}. {He} lived {home}.; Once upon a
    time, there was {a trait} {kind} named {hero} who lived {home}.; Once upon a time, there was
    {a kind} named {hero} who lived {home}.; Once upon a time there was {a trait} {kind} called
    {hero}. {He} lived {home}.; Once upon a time there was {a kind}. {His} name was {hero}, and
    {he} lived {home}.; Once upon a time there lived {a trait} {kind} named {hero}. {His} home
    was {home}.; Once upon a time, {a trait} {kind} named {hero} lived {home}.; Once upon a
    time, {home}, there lived {a trait} {kind} named {hero}."""
)
HABIT = (
    "",
    "Every morning, {hero} {habit}.",
    "Every morning, {he} {habit} before breakfast.",
    "{hero} was {a trait2} {kind} who {habit} each day.",
)
MORAL = (
    "{hero} learned that {moral}.",
    "And so {hero} learned that {moral}.",
    "That is how {hero} learned that {moral}.",
    "From that day on, {hero} knew that {moral}.",
)


def _plot(topic: str, story: str, **own_words: str) -> Plot:
    """A plot from text: a blank line ends a paragraph, "-" starts the alternatives of a sentence,
    "|" adds another, and "?" says that the sentence may be left out."""
    paragraphs = []
    for block in story.strip().split("\n\n"):
        sentences: list[list[str]] = []
        for line in block.splitlines():
            mark, template = line.strip().split(" ", 1)
            if mark == "|":
                sentences[-1].append(template)
            else:
                sentences.append([""] * (mark == "?") + [template])
        paragraphs.append(tuple(tuple(sentence) for sentence in sentences))
    return Plot(topic, tuple(paragraphs), {k: _list(v) for k, v in own_words.items()})


PLOTS = (
    _plot(
        "a lost treasure",
        """
        - {hero} had {a colour} {thing} that {he} loved very much.
        | The thing {he} loved best was {his} {colour} {thing}.
        | {His} greatest treasure was {a colour} {thing}, and {he} took it everywhere.

        - {day}, {hero} took it along to {place}.
        | {day}, {hero} went to {place}, and of course the {thing} came too.
        - But when {he} came home, the {thing} was gone!
        | But on the way back {he} looked down, and the {thing} was not there.
        - {hero} looked in every pocket and under every chair. Then {he} sat down and cried.
        | "Oh no!" said {hero}. "Where is my {colour} {thing}?"
        | "My {thing}!" cried {hero}, and two big tears rolled down {his} nose.
        - {A fkind} named {friend} heard {him}. "Do not cry," {fhe} said. "We will look together."
        | {His} friend {friend}, {a fkind}, came running. "Four eyes see more than two," {fhe} said.
        | Just then {friend} the {fkind} came by. "I am good at finding things," {fhe} said.

        - So they walked back to {place} and looked behind every stone.
        | They went all the way back to {place} and searched high and low.
        ? {searcher}
        - At last {friend} looked {spot}, and there was the {colour} {thing}!
        | Then {friend} gave a shout. The {thing} was {spot}, as {colour} as ever!

        - {hero} hugged {friend}. "You are a true friend," {he} said.
        | "Thank you!" said {hero}, and {he} hugged the {thing} and {friend} at the same time.
        | {hero} was so happy that {he} jumped three times, twice for {friend} and once for joy.
        - From then on, they played with the {thing} together.
        | They took turns carrying the {thing} home.
        """,
        moral="""two friends find more than one; a good friend is better than any treasure; it helps
            to ask for help""",
    ),
    _plot(
        "sharing",
        """
        - {day}, {hero} packed {food} for lunch and walked to {place}.
        | {day}, {his} {family} gave {him} {food}, and {he} carried it to {place}.

        - There {he} met {a fkind} named {friend}, who looked very sad.
        | On a bench sat {a fkind} named {friend} with a long face.
        - "What is the matter?" asked {hero}.
        | "Why are you so sad?" asked {hero}.
        - "I have had nothing to eat all day," said {friend}, and {fhis} tummy rumbled like thunder.
        | "I dropped my lunch in the water," said {friend}, "and the fish said thank you."
        - {hero} looked at {his} lunch. It smelled so good! Then {he} looked at {friend}.
        | {hero} was hungry too, and for a moment {he} said nothing.
        - So {he} shared it: one half for {hero} and one half for {friend}.
        | "Half for you and half for me," said {hero}, and {he} gave {friend} the bigger half.
        - They ate side by side and told jokes until the sun went down.
        | It was the best lunch that {hero} had ever had.

        - The next day, there was a knock at the door. It was {friend}, with {a colour} {thing}.
        | The next morning, {friend} came to visit, and {fhe} carried {a colour} {thing}.
        - "You shared with me," {fhe} said, "so I want to share with you."
        | "This is for you," {fhe} said, "because you were kind to me."
        - {hero} danced around the room with the {colour} {thing}.
        | All day long, {hero} and {friend} played with the {colour} {thing}.
        """,
        moral="""sharing makes everything taste better; what you give comes back to you; half a
            lunch and a friend are more than a whole lunch""",
    ),
    _plot(
        "being brave",
        """
        - {hero} was afraid of only one thing: {fear}.
        | But at night, {hero} was afraid of {fear}.
        - When evening came, {he} hid under {his} blanket and did not even peep out.
        | Every evening, {he} pulled {his} hat over {his} ears and closed {his} eyes.

        - One day, {his} friend {friend} the {fkind} came to visit with {a colour} {thing}.
        | {day}, {a fkind} named {friend} knocked at the door and held up {a colour} {thing}.
        - "I get scared too," said {friend}. "Then I hold something bright and sing."
        | "Take this," said {friend}. "When you are scared, hold it and sing."
        - "Does that work?" asked {hero}. "It works for me," said {friend}, "and I sing very badly."
        | "But I only know one song," said {hero}. "One is enough," said {friend}.

        - That night, {hero} felt {his} knees shake. {He} held the {colour} {thing} and sang.
        | When it grew late, {hero} took the {colour} {thing} and began to sing, very quietly.
        - The song grew louder and louder, and soon the mice in the wall were humming along.
        | First it was a small song. Then it was a big song. Then it was almost a concert.
        - {hero} peeped out. There was nothing to be afraid of, only the moon looking in.
        | At the end of the song {he} opened {his} eyes, and everything was just as it always was.

        - In the morning, {he} ran to {friend}. "I was scared," {he} said, "and I was brave too!"
        | The next day, {hero} told {friend} all about it, and they sang the song together.
        - {friend} smiled. "Keep the {thing}," {fhe} said. "You have earned it."
        | The {colour} {thing} still stands by the bed, just in case.
        """,
        thing="lantern; lamp; torch; candle",
        moral="""being brave means trying when you are scared; a small light can chase away a big
            fear; fears get smaller when you sing to them""",
    ),
    _plot(
        "not giving up",
        """
        - More than anything, {hero} wanted to build {a colour} {thing}.
        | {day}, {hero} decided to build {a colour} {thing}.
        - {He} found some wood, some string and a pot of {colour} paint.
        | {He} drew a plan, sharpened {his} pencil and drew a better plan.

        - The first {thing} fell apart at once. The second one fell on {his} foot.
        | The first {thing} was too big, and the second one was too small.
        - "I will never do it," said {hero}, and {he} kicked the bucket of nails.
        | "It is no use," said {hero}, and {he} sat down in the sawdust.
        - {A fkind} named {friend} looked over the fence. "Try again," {fhe} said. "I will help."
        | {friend} the {fkind} had watched it all. "You are nearly there," {fhe} said.

        - So {hero} tried again, slowly this time, while {friend} held the corners.
        | {hero} took a deep breath and began again, and {friend} counted the nails.
        - It took all afternoon and most of the biscuits.
        | They worked until the first star came out.
        - And then the {colour} {thing} was finished, and it did not fall apart at all!
        | At last {he} tied the last knot, and there stood a fine {colour} {thing}.

        - They took it to {place}, and everyone clapped.
        | They carried it all the way to {place}, so that everyone could see it.
        - "We made it together," said {hero}, and {he} gave {friend} the first turn.
        | "It is the best {thing} I ever saw," said {friend}, "and I have seen three."
        """,
        thing="kite; boat; wagon; raft; sledge; swing; cart; drum",
        moral="""it is all right to fail if you try again; the third time can be the best; patience
            builds what hurry breaks""",
    ),
    _plot(
        "helping others",
        """
        - {day}, {hero} was walking to {place} with {his} {colour} {thing}.
        | {day}, {hero} took {his} {colour} {thing} and set out for {place}.

        - Suddenly {he} heard a voice. "Help!" it called. "Help, please!"
        | Near {place}, {he} heard somebody shout, "Is anybody there?"
        - It was {friend} the {fkind}, stuck {trap}.
        | And there, {trap}, sat {a fkind} named {friend}.
        - "How did you get in there?" asked {hero}. "Very quickly," said {friend}.
        | "I was looking at a cloud," said {friend}, "and not at my feet."
        - {hero} thought hard and held out the {colour} {thing}. "Hold on tight!" {he} called.
        | "Take hold of my {thing}!" called {hero}, and {he} let it down.
        - {He} pulled and pulled, and {friend} wiggled and wiggled. Pop! Out came {friend}.
        | One, two, three! {hero} pulled with all {his} might, and out came {friend} with a plop.

        - "You saved me!" said {friend}. "How can I thank you?"
        | {friend} shook the dust from {fhis} ears. "Thank you! What can I do for you?"
        - "Come home with me and have {food}," said {hero}.
        | "You can walk with me," said {hero}. "It is more fun with two."
        - The {colour} {thing} was a little muddy after that, but nobody minded.
        | So they walked on side by side, and {friend} carried the {colour} {thing}.
        """,
        thing="rope; scarf; ladder; umbrella; blanket; fishing rod",
        moral="""helping someone is the quickest way to make a friend; a kind deed never takes too
            long; you are strong when somebody needs you""",
    ),
    _plot(
        "telling the truth",
        """
        - On the highest shelf stood {a colour} {thing}. It belonged to {his} {family}.
        | {His} {family} had {a colour} {thing} and was very proud of it.
        - {day}, {hero} was dancing, and bump! The {thing} fell down and broke in two.
        | {day}, {hero} only wanted to look at it, but the {thing} slipped and broke.

        - {hero} was so frightened that {he} hid the pieces {hideout}.
        | Quickly, {he} swept up the pieces and put them {hideout}.
        - "Where is my {colour} {thing}?" asked {his} {family} that evening. {hero} said nothing.
        | At supper, {his} {family} looked at the empty shelf. {hero} looked at {his} shoes.
        - But {his} tummy felt as if it was full of stones.
        | That night, {he} could not sleep at all.

        - In the morning, {he} went to see {his} friend {friend}, a wise {fkind}.
        | {He} asked {friend} the {fkind} what to do.
        - "Tell the truth," said {friend}. "It is hard for a minute, and then it is easy."
        | "The truth is like cold water," said {friend}. "Jump in, and soon it feels fine."

        - So {hero} took a deep breath. "I broke the {thing}," {he} said, "and I am sorry."
        | {hero} went home and told {his} {family} everything, even about hiding the pieces.
        - {His} {family} gave {him} a hug. "I am glad that you told me," said {his} {family}.
        | "Thank you for telling me," said {his} {family}. "A {thing} can be mended."
        - Together they glued the {colour} {thing}, and it looked even better than before.
        | They glued the {colour} {thing}, and only a fly could see the crack.
        """,
        thing="vase; teapot; cup; plate; bowl; jug; clock; mirror",
        moral="""the truth makes the heart light; telling the truth is easier than hiding; a mistake
            gets smaller when you say it""",
    ),
    _plot(
        "a race",
        """
        - {day}, there was a race to {place}, and the prize was {a colour} {thing}.
        | Once a year there was a great race to {place}. The winner got {a colour} {thing}.
        - {hero} wanted to win more than anything, so {he} practised every day, even in the rain.
        | {hero} looked at the {thing} and wished very hard.

        - "I am the fastest," said {friend} the {fkind}, and {fhe} stretched {fhis} legs.
        | Next to {him} stood {a fkind} named {friend}, who had never lost a race.
        - Ready, steady, go! Off they all ran.
        | The bell rang, and everyone ran as fast as the wind.
        - Halfway there, {friend} tripped over a root and hurt {fhis} foot.
        | Then {friend} looked back, slipped on a plum and fell down.
        - {hero} could already see the {colour} {thing}. But {he} stopped and turned around.
        | {hero} was in front now! But {he} heard {friend} cry, and {he} ran back.

        - "Lean on me," {he} said, and they went on together, step by step.
        | "Come," {he} said, "we will do it on three legs."
        - They were the very last, but everyone cheered louder than for the first.
        | They came in last of all, just before supper.
        - The judge wiped her glasses and gave the {colour} {thing} to both of them.
        | "The {thing} goes to these two," said the judge, "because they ran the best race."
        """,
        thing="cup; ribbon; crown; flag; medal; trumpet",
        moral="""being kind matters more than winning; nobody is last who helps a friend; a race is
            short but a friend is for long""",
    ),
    _plot(
        "waiting",
        """
        - {day}, {his} {family} gave {him} a tiny seed. "Plant it and wait," said {his} {family}.
        | {day}, {hero} found a tiny seed and planted it by the door.

        - {hero} waited one day. Nothing. {He} waited two days. Still nothing.
        | The next morning, {hero} looked for a flower, but there was only mud.
        - {He} told it a joke. {He} read it a story. It did not even laugh.
        | {He} gave it water, and then some soup, and then {he} said please.
        - "It must be broken," {he} said to {friend} the {fkind}.
        | "My seed does not work," {he} told {his} friend {friend}, {a fkind}.
        - "Good things take time," said {friend}. "I will wait with you. I am good at waiting."
        | "It is only sleeping," said {friend}. "Let us sit here and be quiet."

        - So they waited together, through the sun and the rain, and played cards.
        | Every day, they sat beside it and told each other what the clouds looked like.
        - Then, one morning, a little leaf peeped out. "Good morning," said {hero}.
        | One week went by, and another, and then there was a leaf as small as a tear.
        - And when summer came, there stood {a colour} {thing}, as tall as {hero}.
        | It grew and grew, and at last it was {a colour} {thing}, the finest for miles.

        - "It was worth it," said {hero}, and {he} gave the {colour} {thing} some water.
        | "I knew it," said {friend}, and they danced around the {colour} {thing}.
        """,
        thing="flower; rose; tulip; poppy; lily",
        moral="good things take time; waiting is easier with a friend; nobody can hurry a flower",
    ),
    _plot(
        "a birthday",
        """
        - {day}, it was {his} birthday, but nobody said a word about it.
        | It was {his} birthday at last, but the morning was as quiet as a sock.

        - {He} went to see {friend} the {fkind}. "Not now," said {friend}. "I am very busy."
        | {He} ran to {his} friend {friend}, {a fkind}, but {friend} only closed the curtains.
        - {He} went to {place}, but nobody was there.
        | {He} walked to {place} and back again, and met nobody but a puddle.
        - "They have all forgotten me," thought {hero}, and {he} went home very slowly.
        | {hero} sang a birthday song to {himself}, but it was a sad one.

        - {He} opened the door. It was dark inside. Then everybody shouted, "Surprise!"
        | Behind the door somebody giggled. "Surprise!" called a hundred voices.
        - There were paper stars on the wall, and on the table stood {food}.
        | {His} {family} had made {food} with a candle on top.
        - "We were busy because of you," said {friend}, and {fhe} gave {him} {a colour} {thing}.
        | And {friend} held out {a colour} {thing}. "I had to wrap it," {fhe} said.

        - {hero} laughed and laughed, and {he} played with the {colour} {thing} until bedtime.
        | "It is just what I wanted," said {hero}, and the {colour} {thing} stayed by {him} all day.
        """,
        moral="""friends do not forget you; a quiet morning can hide a loud evening; the best
            surprise is to be loved""",
    ),
    _plot(
        "a strange noise",
        """
        - One night, a strange noise woke {hero}. {noise}! What could it be?
        | {noise}! In the middle of the night, {hero} sat up in bed.
        - "It must be a monster," {he} thought, "with very big feet."
        | "A monster!" {he} thought, and {he} hid under the pillow.
        - But {he} wanted to know. So {he} took {his} {colour} {thing} and tiptoed outside.
        | Then {he} took {his} {colour} {thing} in one hand and all {his} courage in the other.

        - The noise came from behind a bush. {noise}! It was louder now.
        | Step by step, {he} followed the noise. {noise}!
        - {hero} lifted the {colour} {thing} and looked. It was no monster at all.
        | "Who is there?" called {hero}, and {he} waved the {colour} {thing}.
        - It was {a fkind} named {friend}, {doing}.
        | There sat {friend} the {fkind}, {doing}.
        - "Oh dear, did I wake you?" asked {friend}. "I am new here, and I have no friends yet."
        | "Please do not be cross," said {friend}. "I am shy, so I do it at night."

        - "Now you have one," said {hero}, and {he} sat down beside {fhim}.
        | "Show me how it goes," said {hero}, and soon there were two of them making noise.
        - In the morning, they had {food} together, and both of them yawned.
        | They laughed so much that they woke {his} {family}.
        """,
        thing="lantern; torch; umbrella; spoon; broom; ladle",
        moral="""a stranger may be a friend you have not met; things look less scary when you look
            closely; most monsters only want company""",
    ),
    _plot(
        "the moon",
        """
        - {hero} wanted to catch the moon, so {he} took {a colour} {thing} and waited for the night.
        | {day}, {hero} looked at {his} {colour} {thing} and had an idea. "I will catch the moon!"

        - {He} climbed up high near {place} and jumped. The moon was too far.
        | When it was dark, {he} went to {place} and reached up as high as {he} could.
        - {He} tried standing on a chair. {He} tried asking nicely.
        | {He} stood on one leg, and on a stone, and on one leg on a stone.
        - "What are you doing?" asked {friend} the {fkind}.
        | {A fkind} named {friend} had been watching. "May I help?" {fhe} asked.
        - "I want to bring the moon home," said {hero}, "but it does not fit in my arms."
        | "The moon will not come down," said {hero}, and {he} sighed.

        - {friend} smiled. {Fhe} filled the {colour} {thing} with water and set it on the grass.
        | "Fill your {thing} with water," said {friend}, "and look into it."
        - {hero} looked into the {thing}, and there was the moon, round and bright.
        | And there, in the middle of the {thing}, swam the moon, and it seemed to wink.
        - "Hello, moon," whispered {hero}, and the moon shivered a little.
        | "It fits!" said {hero}. "It fits and there is room for a star."

        - They sat beside the {colour} {thing} until the moon had to go to bed.
        | They carried the {colour} {thing} home, very slowly, and did not spill one drop of moon.
        """,
        thing="bucket; bowl; pan; tub; jug; barrel",
        moral="""sometimes you find what you want by looking down; a friend may see what you do not;
            far things can be close if you look again""",
    ),
)


def _plots(bound: Bound) -> tuple[Plot, ...]:
    """The plots that can be told with these values: a thing that was asked for needs a plot in
    which anything can stand."""
    return tuple(
        plot
        for plot in PLOTS
        if bound.get("topic", plot.topic) == plot.topic
        and not ("thing" in bound and "thing" in plot.own_words)
    )


def story(rng: Random, bound: Bound | None = None) -> tuple[str, Bound]:
    """A random story and the values of its variables. Values in `bound` are told as they are.

    Each kind of hero has its favourite plot, name, home and so on, told half of the time. So even
    the most likely story, which greedy decoding finds, is another one for each kind.
    """
    bound = dict(bound or {})
    kind = bound.setdefault("kind", rng.choice(WORDS["kind"]))
    taste = Random(kind)
    plots = _plots(bound)
    favourite = taste.choice(plots)
    plot = favourite if rng.random() < 0.5 else rng.choice(plots)
    for variable in ("hero", "home", "habit", "day", "place", "fkind", "friend", "colour", "thing"):
        value = taste.choice(_values(variable, bound, plot.words))
        if rng.random() < 0.5 and variable not in bound and _free(variable, value, bound):
            bound[variable] = value
    sentences = (rng.choice(sentence) for sentence in plot.sentences)
    text = "".join([fill(rng, s, bound, plot.words, 0.15, 0.0) for s in sentences])
    return text, bound


class _Parser:
    """Reads a text by one plot, and remembers how far it came."""

    def __init__(self, text: str, plot: Plot, whole: bool) -> None:
        self.text, self.plot, self.whole = text, plot, whole
        self.furthest: tuple[int, int, Bound] = (0, 0, {})  # end, sentence, values

    def read(self, index: int, at: int, bound: Bound) -> Bound | None:
        """The values if the text from `at` on agrees with the plot from sentence `index` on."""
        self.furthest = max(self.furthest, (at, index, bound), key=lambda state: state[:2])
        rest = self.plot.sentences[index:]
        if at == len(self.text) and (not self.whole or all("" in sentence for sentence in rest)):
            return bound
        for template in rest[0] if rest else ():
            for end, new in _match(template, self.text, at, bound, self.plot.words):
                if end == -1 and not self.whole:
                    return new
                found = self.read(index + 1, end, new) if end != -1 else None
                if found is not None:
                    return found
        return None

    def problems(self) -> list[str]:
        at, index, bound = self.furthest
        if at == len(self.text):
            return ["the story is not finished"]
        for sentence in self.plot.sentences[index : index + 2]:
            for template in filter(None, sentence):
                for _, other in _match(template, self.text, at, {}, self.plot.words):
                    changed = [k for k in other if bound.get(k, other[k]) != other[k]]
                    if changed:
                        return [f"{k} was {bound[k]!r}, became {other[k]!r}" for k in changed]
        return [f"not in the grammar: {self.text[at : at + 80].strip()!r}"]


def read_story(
    text: str, bound: Bound | None = None, whole: bool = False
) -> tuple[Bound, list[str]]:
    """The values of a story's variables, and what is wrong with it: nothing if it follows the
    grammar. Unless it must be `whole`, it may stop anywhere, as at a limit of tokens."""
    bound, text = bound or {}, text.rstrip()
    parsers = [_Parser(text, plot, whole) for plot in _plots(bound)]
    for parser in parsers:
        found = parser.read(0, 0, bound)
        if found is not None:
            return found, []
    best = max(parsers, key=lambda parser: parser.furthest[0])
    return best.furthest[2], best.problems()


def check_story(text: str, bound: Bound | None = None, whole: bool = False) -> list[str]:
    """Returns the faults of a story, which `read_story` finds."""
    return read_story(text, bound, whole)[1]


# ---------------------------------------------------------------------------------- chats

COLOUR_OF = {
    thing: colour
    for colour, things in {
        "blue": "the sky; the sea",
        "green": "grass; a leaf in spring; a frog; a cucumber; a pea; spinach; a tree",
        "yellow": "a banana; a lemon; the sun; a canary; a sunflower; butter",
        "red": "a strawberry; a tomato; a ladybird; a cherry; blood; a fire engine; a rose",
        "orange": "a carrot; a pumpkin; a tangerine; a fox",
        "white": "snow; milk; salt; a swan; a cloud; a polar bear; the moon",
        "black": "coal; a raven; the night sky; a panther",
        "brown": "chocolate; earth; a chestnut; a brown bear",
        "pink": "a flamingo; a pig",
        "grey": "an elephant; a mouse",
        "purple": "an aubergine; a plum; lavender",
        "golden": "gold; honey",
    }.items()
    for thing in _list(things)
}
SOUND_OF = _pairs(
    """cow/moo dog/woof cat/meow duck/quack sheep/baa pig/oink hen/cluck rooster/cock-a-doodle-doo
    owl/hoo frog/ribbit bee/buzz horse/neigh crow/caw lion/roar mouse/squeak snake/hiss
    donkey/hee-haw turkey/gobble"""
)
OPPOSITE_OF = _pairs(
    """big/small hot/cold day/night up/down happy/sad fast/slow old/young wet/dry light/dark
    open/closed full/empty long/short loud/quiet high/low hard/soft early/late left/right
    near/far rich/poor strong/weak clean/dirty sweet/sour thick/thin true/false"""
)
OPPOSITE_OF |= {second: first for first, second in OPPOSITE_OF.items()}
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

WORDS |= {
    "asked": WORDS["colour"],
    "object": tuple(COLOUR_OF),
    "animal": tuple(SOUND_OF),
    "adjective": tuple(OPPOSITE_OF),
    "weekday": WEEKDAYS,
    "topic": tuple(plot.topic for plot in PLOTS),
    "noun": _words(
        """volcano guitar computer engine planet atom bank passport tractor telescope lawyer novel
        violin battery tax hotel magnet satellite dentist museum keyboard stock tank vaccine"""
    ),
    "country": _words("France Spain Japan Brazil Canada Egypt India Norway Peru Kenya China Italy"),
    "language": _words("French Spanish Japanese German Latin Hindi Polish Arabic Chinese Greek"),
    "text": _list(
        """a poem; an email; a letter; a song; an essay; a Python program; a recipe; a speech; a
        list of ideas"""
    ),
    "task": _list(
        """fix a bicycle; bake bread; learn the piano; write a program; tie a tie; build a house;
        lose weight; get rich; drive a car; grow tomatoes"""
    ),
    "subject": _list(
        """gravity; love; time; history; football; the stars; the weather; the internet; quantum
        physics; the economy; dinosaurs; money; politics; electricity; climate; medicine"""
    ),
}

STORY = "{story}"
DONT_KNOW = """I do not know that. I am a very small model: I know little stories, colours and small
    sums.; That is too hard for me. I am a very small model: I know little stories, colours and
    small sums."""
NOT_TOLD = "You have not told me that yet."
TOO_BIG = f"That is too big for me. I can add numbers up to {LARGEST_ADDEND}."
SYSTEM_PROMPTS = _list(
    f"""You are a helpful assistant.; You are a friendly assistant.; You are {MODEL_NAME}, a very
    small language model.; Answer in one short sentence.; You are a kind storyteller for
    children."""
)


@dataclass(frozen=True)
class Intent:
    """One thing to ask: what the user says and what is answered, turn by turn.

    `draw` makes values for a random prompt. `derive` adds those of the answer to the values read
    from a prompt, or returns None where the prompt asks for something else. `key` says what is held
    out from training: a template (the first counts, if "; " separates several), None for the
    wording of the prompts, "" for nothing.
    """

    group: str
    turns: tuple[tuple[str, ...], ...]
    replies: tuple[tuple[str, ...], ...]
    weight: float
    draw: Draw
    derive: Derive
    key: str | None
    unless_told: bool  # counts only if no earlier turn bears on the question
    may_wait: bool  # other questions may come between the turns


def _intent(
    group: str,
    asks: str,
    replies: str,
    weight: float,
    draw: Draw = lambda rng: {},
    derive: Derive = dict,
    key: str | None = None,
    unless_told: bool = False,
    may_wait: bool = False,
) -> Intent:
    """An intent from text: ";" separates alternatives and ">>" turns."""
    turns, answers = (tuple(map(_list, text.split(">>"))) for text in (asks, replies))
    return Intent(group, turns, answers, weight, draw, derive, key, unless_told, may_wait)


def _each(first: str, second: str) -> str:
    """Every alternative of the first text followed by every one of the second."""
    return "; ".join(f"{a} {b}" for a in _list(first) for b in _list(second))


# Values that follow from those in a prompt.


def _derive_sum(bound: Bound) -> Bound | None:
    a, b = int(bound["a"]), int(bound["b"])
    if max(a, b) > LARGEST_ADDEND:
        return None
    return bound | {"c": str(a + b), "e": str(a + b + int(bound.get("d", 0)))}


def _derive_difference(bound: Bound) -> Bound | None:
    a, b = int(bound["a"]), int(bound["b"])
    return bound | {"c": str(a - b)} if b <= a <= LARGEST_ADDEND else None


def _derive_too_big(bound: Bound) -> Bound | None:
    return bound if max(int(bound["a"]), int(bound["b"])) > LARGEST_ADDEND else None


def _derive_count(bound: Bound) -> Bound | None:
    first, last = int(bound.get("a", 1)), int(bound["b"])
    if max(first, last) > LARGEST_NUMBER or not 1 <= abs(last - first) <= LONGEST_COUNT:
        return None
    step = 1 if first < last else -1
    numbers = [str(n) for n in range(first, last + step, step)]
    return bound | {"list": ", ".join(numbers), "back": ", ".join(numbers[::-1])}


def _derive_count_up(bound: Bound) -> Bound | None:
    return _derive_count(bound) if int(bound.get("a", 1)) < int(bound["b"]) else None


def _derive_count_down(bound: Bound) -> Bound | None:
    return _derive_count(bound) if int(bound["a"]) > int(bound["b"]) else None


def _derive_neighbours(bound: Bound) -> Bound | None:
    a = int(bound["a"])
    return bound | {"b": str(a + 1), "c": str(a - 1)} if 1 <= a <= LARGEST_NUMBER else None


def _derive_bigger(bound: Bound) -> Bound | None:
    low, high = sorted((int(bound["a"]), int(bound["b"])))
    return bound | {"c": str(high), "d": str(low)} if low < high <= LARGEST_NUMBER else None


def _derive_day(bound: Bound) -> Bound:
    at = WEEKDAYS.index(bound["weekday"])
    return bound | {"next": WEEKDAYS[(at + 1) % 7], "previous": WEEKDAYS[at - 1]}


def _derive_yes_no(bound: Bound) -> Bound:
    return bound | {"yes": "Yes" if bound["asked"] == bound["colour"] else "No"}


def _derive_from(question: str, answer: str, table: dict[str, str], first: Derive = dict) -> Derive:
    """Adds what a table says about the value that was asked for, once that value is known."""

    def derive(bound: Bound) -> Bound | None:
        known = first(bound)
        if known is None or question not in known:
            return known
        return known | {answer: table[known[question]]}

    return derive


def _derive_unknown(bound: Bound) -> Bound | None:
    nouns = (bound["noun"], f"a {bound['noun']}", f"an {bound['noun']}")
    known = any(noun in table for noun in nouns for table in (COLOUR_OF, SOUND_OF, OPPOSITE_OF))
    return None if known else bound


# Numbers for a random prompt.


def _numbers(first: int, last: int, *names: str) -> Draw:
    return lambda rng: {name: str(rng.randint(first, last)) for name in names}


def _draw_difference(rng: Random) -> Bound:
    a = rng.randint(0, LARGEST_ADDEND)
    return {"a": str(a), "b": str(rng.randint(0, a))}


def _draw_span(rng: Random) -> Bound:
    a = rng.randint(0, LARGEST_NUMBER - 1)
    return {"a": str(a), "b": str(rng.randint(a + 1, min(a + LONGEST_COUNT, LARGEST_NUMBER)))}


def _draw_span_down(rng: Random) -> Bound:
    span = _draw_span(rng)
    return {"a": span["b"], "b": span["a"]}


def _draw_too_big(rng: Random) -> Bound:
    big = str(rng.choice((rng.randint(LARGEST_ADDEND + 1, 99), rng.randint(100, 9999))))
    other = str(rng.randint(1, 99))
    return {"a": big, "b": other} if rng.random() < 0.5 else {"a": other, "b": big}


def _draw_asked(rng: Random) -> Bound:
    colour = rng.choice(WORDS["colour"])
    return {"colour": colour, "asked": rng.choice((colour, rng.choice(WORDS["colour"])))}


SMALL_TALK = (
    (
        """What is your name?; What's your name?; Who are you?; What are you called?; Tell me your
        name.; Do you have a name?""",
        f"My name is {MODEL_NAME}. I am a very small language model.",
    ),
    (
        "How are you?; How are you today?; Are you well?; How do you do?",
        "I am very well, thank you. How are you?",
    ),
    (
        "I am fine.; I am fine, thanks.; I am well, thank you.; Very well, thank you.",
        "That is good to hear.",
    ),
    (
        """What can you do?; Help!; What do you know?; How can you help me?; What can I ask you?;
        Can you help me?""",
        """I can tell little stories, name colours, count, do small sums and remember what you tell
        me.""",
    ),
    (
        "What are you?; Are you a person?; Are you human?; Are you a robot?; Are you alive?",
        "I am a very small language model. I learned to speak from made-up stories.",
    ),
    (
        "How big are you?; Are you big?; How many parameters do you have?",
        "I am very small. I have less than four million parameters.",
    ),
    (
        "Thank you!; Thanks!; Thank you very much!; That was nice.; Well done!",
        "You are welcome!",
    ),
    (
        "Goodbye!; Bye!; See you later!; Good night!; See you tomorrow!",
        "Goodbye! Come back soon.",
    ),
    (
        "Tell me a joke.; Do you know a joke?; Make me laugh.; Say something funny.",
        """What did the teapot say to the cup? I am falling for you, a little at a time.; Why did
        the kite stay at school? It wanted to go higher.""",
    ),
)
# Facts: what is held out, how the fact is told, how it is asked for, and the answer.
FACTS = (
    (
        "{pet} {name}",
        """My {pet} is called {name}.; I have {a pet} called {name}.; The name of my {pet} is
        {name}.; I have {a pet} named {name}.; My {pet}'s name is {name}.""",
        """What is my {pet} called?; What is the name of my {pet}?; What's my {pet} called?; What is
        my {pet}'s name?""",
        "Your {pet} is called {name}.",
    ),
    *(
        (
            "{name} {colour} {thing}",
            """{name} has {a colour} {thing}.; {name} has got {a colour} {thing}.; {name} bought
            {a colour} {thing}.; {name} found {a colour} {thing}.""",
            asks,
            answer,
        )
        for asks, answer in (
            (
                """What colour is {name}'s {thing}?; What color is {name}'s {thing}?; Which colour
                is {name}'s {thing}?; What is the colour of {name}'s {thing}?""",
                "{name}'s {thing} is {colour}.",
            ),
            (
                """What does {name} have?; What has {name} got?; Who has {a colour} {thing}?; Who
                has the {thing}?""",
                "{name} has {a colour} {thing}.",
            ),
            ("Is {name}'s {thing} {asked}?", "{yes}, {name}'s {thing} is {colour}."),
        )
    ),
    *(
        (
            "{name1} {thing1} {name2}",
            """{name1} has {a colour1} {thing1} and {name2} has {a colour2} {thing2}.; {name1} has
            {a colour1} {thing1}. {name2} has {a colour2} {thing2}.""",
            asks.replace("#", number),
            answer.replace("#", number),
        )
        for number in "12"
        for asks, answer in (
            (
                """What colour is {name#}'s {thing#}?; What color is {name#}'s {thing#}?""",
                "{name#}'s {thing#} is {colour#}.",
            ),
            ("Who has the {thing#}?", "{name#} has the {thing#}."),
            ("What does {name#} have?", "{name#} has {a colour#} {thing#}."),
        )
    ),
    (
        "{thing} {spot}",
        """The {thing} is {spot}.; My {thing} is {spot}.; I put the {thing} {spot}.; I left my
        {thing} {spot}.""",
        "Where is the {thing}?; Where is my {thing}?; Where can I find the {thing}?",
        "The {thing} is {spot}.",
    ),
    (
        "{name} {home}",
        "{name} lives {home}.; My friend {name} lives {home}.",
        "Where does {name} live?; Tell me where {name} lives.; Who lives {home}?",
        "{name} lives {home}.",
    ),
    (
        "{name} {treat}",
        "{name} likes {treat}.; {name} loves {treat}.; My friend {name} likes {treat}.",
        """What does {name} like?; What does {name} love?; Who likes {treat}?; Who loves
        {treat}?""",
        "{name} likes {treat}.",
    ),
    (
        "i {treat} {colour}",
        """I like {treat} and my favourite colour is {colour}.; My favourite colour is {colour} and
        I love {treat}.; My favorite color is {colour} and I like {treat}.""",
        "What is my favourite colour?; What is my favorite color?; Which colour do I like best?",
        "Your favourite colour is {colour}.",
    ),
    (
        "i {treat}",
        "I like {treat}.; I love {treat}.; I like {treat} very much.",
        "What do I like?; What do I love?",
        "You like {treat}.",
    ),
    (
        "i {a}",
        "I am {a} years old.; I am {a}.; I am {a} years old and I live in {town}.",
        "How old am I?; What is my age?",
        "You are {a} years old.",
    ),
    (
        "i {town}",
        "I live in {town}.; I am from {town}.; I live in {town} and I am {a} years old.",
        "Where do I live?; Where am I from?; In which town do I live?",
        "You live in {town}.",
    ),
)


def _small_talk() -> Iterator[Intent]:
    group = "greetings and small talk"
    hello = f"{{Hi}}! I am {MODEL_NAME}. Shall I tell you a story?"
    yield _intent(group, f"{{Hi}}!; {{Hi}}.; {{Hi}}, {MODEL_NAME}!", hello, 0.3, key="")
    for asks, replies in SMALL_TALK:
        yield _intent(group, asks, replies, 0.1, key="")
        greeted = replies if "My name is" not in replies else "{Hi}! " + replies
        yield _intent(group, _each(f"{{Hi}}!; {{Hi}}, {MODEL_NAME}!", asks), greeted, 0.1)
    tell = """My name is {name}.; I am {name}.; You can call me {name}.; I am called {name}.; {Hi}!
        My name is {name}.; {Hi}, I am {name}.; {Hi}! I am called {name}."""
    ask = "What is my name?; What's my name?; Who am I?; Do you remember my name?"
    met = f"Nice to meet you, {{name}}! My name is {MODEL_NAME}."
    known, key = "Your name is {name}.", "name {name}"
    yield _intent(group, tell, met, 0.5, key=key)
    yield _intent(group, _each(tell, ask), known, 0.3, key=key)
    yield _intent(group, f"{tell} >> {ask}", f"{met} >> {known}", 0.8, key=key, may_wait=True)
    yield _intent(group, ask, NOT_TOLD, 0.1, key="", unless_told=True)


def _colours() -> Iterator[Intent]:
    ask = """What colour is {object}?; What color is {object}?; Which colour is {object}?; Which
        color is {object}?; Tell me the colour of {object}.; What is the colour of {object}?; What
        is the color of {object}?; {Object} is what colour?; Do you know the colour of {object}?;
        Can you tell me what colour {object} is?"""
    more = "And {object2}?; What about {object2}?; And what colour is {object2}?"
    reply = "{Object} is {colour}."
    first = _derive_from("object", "colour", COLOUR_OF)
    both = _derive_from("object2", "colour2", COLOUR_OF, first)
    yield _intent("colours", ask, reply, 1.5, derive=first)
    replies = f"{reply} >> {{Object2}} is {{colour2}}."
    yield _intent("colours", f"{ask} >> {more}", replies, 0.5, derive=both)


def _counting() -> Iterator[Intent]:
    group = "counting"
    up = "Count from {a} to {b}.; Can you count from {a} to {b}?; Please count from {a} to {b}."
    up_key, up_down = "count {a} {b}", f"{up} >> Now backwards.; And backwards?; Now count back."
    yield _intent(group, up, "{list}.", 0.6, _draw_span, _derive_count_up, up_key)
    yield _intent(group, up_down, "{list}. >> {back}.", 0.3, _draw_span, _derive_count_up, up_key)
    down = """Count down from {a} to {b}.; Count backwards from {a} to {b}.; Can you count down from
        {a} to {b}?"""
    yield _intent(group, down, "{list}.", 0.4, _draw_span_down, _derive_count_down, "down {a} {b}")
    to, numbers = "Count to {b}.; Can you count to {b}?; Please count to {b}.", _numbers(2, 15, "b")
    yield _intent(group, to, "{list}.", 0.1, numbers, _derive_count_up, "")
    for side, answer in (("after", "{b}"), ("before", "{c}")):
        yield _intent(
            group,
            f"""What comes {side} {{a}}?; What number comes {side} {{a}}?; Which number comes {side}
            {{a}}?; Which number is {side} {{a}}?""",
            f"{side.capitalize()} {{a}} comes {answer}.",
            0.2,
            _numbers(1, LARGEST_NUMBER, "a"),
            _derive_neighbours,
        )
    yield _intent(
        group,
        """Which is bigger, {a} or {b}?; What is bigger, {a} or {b}?; Is {a} or {b} bigger?; Which
        number is bigger, {a} or {b}?""",
        "{c} is bigger than {d}.",
        0.4,
        _numbers(0, LARGEST_NUMBER, "a", "b"),
        _derive_bigger,
        "bigger {a} {b}",
    )


def _sums() -> Iterator[Intent]:
    group, key = "sums", "sum {a} {b}"
    ask = """What is {a} plus {b}?; What is {a} + {b}?; What's {a} + {b}?; {a} + {b}; {a} + {b} = ?;
        {a}+{b}; {a} plus {b}?; Add {a} and {b}.; How much is {a} plus {b}?; How much is {a} and
        {b}?; Can you add {a} and {b}?"""
    total, draw = "{a} plus {b} is {c}.", _numbers(0, LARGEST_ADDEND, "a", "b")
    yield _intent(group, ask, total, 2.0, draw, _derive_sum, key)
    yield _intent(group, ask, TOO_BIG, 0.3, _draw_too_big, _derive_too_big)
    more, draw = "Now add {d}.; And plus {d}?; Plus {d}?; Add {d} more.", _numbers(0, 10, *"abd")
    replies, keys = f"{total} >> {{c}} plus {{d}} is {{e}}.", f"sum {{c}} {{d}}; {key}"
    yield _intent(group, f"{ask} >> {more}", replies, 0.5, draw, _derive_sum, keys)
    yield _intent(
        group,
        """{name} has {a} {fruit} and gets {b} more. How many {fruit} does {name} have now?; {name}
        has {a} {fruit}. {name} finds {b} more. How many {fruit} does {name} have?""",
        "{name} has {c} {fruit}.",
        0.5,
        _numbers(2, LARGEST_ADDEND, "a", "b"),
        _derive_sum,
        key,
    )
    take = """What is {a} minus {b}?; What is {a} - {b}?; {a} - {b}; {a} - {b} = ?; {a}-{b}; {a}
        minus {b}?; How much is {a} minus {b}?; Take {b} away from {a}."""
    left, key = "{a} minus {b} is {c}.", "{a} minus {b}"
    yield _intent(group, take, left, 1.2, _draw_difference, _derive_difference, key)


def _lessons() -> Iterator[Intent]:
    group = "sounds, opposites, weekdays"
    yield _intent(
        group,
        """What does {a animal} say?; What sound does {a animal} make?; Which sound does {a animal}
        make?; How does {a animal} sound?; Do you know what {a animal} says?""",
        "{A animal} says {sound}.",
        0.5,
        derive=_derive_from("animal", "sound", SOUND_OF),
    )
    yield _intent(
        group,
        """What is the opposite of {adjective}?; What's the opposite of {adjective}?; Tell me the
        opposite of {adjective}.; Which word is the opposite of {adjective}?""",
        "The opposite of {adjective} is {opposite}.",
        0.5,
        derive=_derive_from("adjective", "opposite", OPPOSITE_OF),
    )
    for side, answer in (("after", "{next}"), ("before", "{previous}")):
        asks = f"""What day comes {side} {{weekday}}?; Which day comes {side} {{weekday}}?; Which
            day is {side} {{weekday}}?; What is the day {side} {{weekday}}?"""
        reply = f"{side.capitalize()} {{weekday}} comes {answer}."
        yield _intent(group, asks, reply, 0.3, derive=_derive_day)


def _facts() -> Iterator[Intent]:
    group = "facts told before"
    heard = "I will remember that.; That is good to know."
    for key, tell, ask, answer in FACTS:
        draw = _draw_asked if "{yes}" in answer else _numbers(3, 99, "a")
        derive = _derive_yes_no if "{yes}" in answer else dict
        weight = 0.6 if "{yes}" in answer else 0.3
        yield _intent(group, _each(tell, ask), answer, weight, draw, derive, key)
        turns, replies = f"{tell} >> {ask}", f"{heard} >> {answer}"
        yield _intent(group, turns, replies, weight, draw, derive, key, may_wait=True)
    yield _intent(
        group,
        """What is my {pet} called?; What is the name of my {pet}?; What colour is {name}'s
        {thing}?; Where is my {thing}?; Where does {name} live?; What does {name} like?; How old am
        I?; Where do I live?; What is my favourite colour?""",
        NOT_TOLD,
        0.4,
        unless_told=True,
    )


def _stories() -> Iterator[Intent]:
    group = "stories"
    ask = """Tell me a story.; Tell me a story, please.; Can you tell me a story?; Write a short
        story.; I would like to hear a story.; Tell me a bedtime story.; Once upon a time; Once upon
        a time,"""
    about = """Tell me a story about {a kind}.; Tell me a short story about {a kind}.; Can you tell
        me a story about {a kind}?; Please tell me a bedtime story about {a kind}.; Write a story
        about {a kind}.; Write a short story about {a kind}.; I would like a story about {a kind}.;
        Do you know a story about {a kind}?; Once upon a time, there was {a kind}; Once upon a time
        there was {a kind}"""
    named = "; ".join(
        about.replace("{a kind}", f"{{a kind}} {word} {{hero}}") for word in ("named", "called")
    )
    yield _intent(group, ask, STORY, 0.7, key="")
    yield _intent(group, about, STORY, 1.6)
    yield _intent(group, named, STORY, 1.0)
    yield _intent(
        group,
        """Tell me a story about {topic}.; Can you tell me a story about {topic}?; Tell me a story
        about {topic} with {a kind}.; Write a story about {topic} and {a kind}.""",
        STORY,
        0.6,
    )
    thing = "Tell me a story about {a colour} {thing}.; Write a story about {a colour} {thing}."
    yield _intent(group, thing, STORY, 0.3)
    another = "Tell me another story.; Another one, please.; Another story!"
    yield _intent(group, f"{ask} >> {another}", f"{STORY} >> {STORY}", 0.05, key="")
    group = "questions about its story"
    for question, answer in (
        (
            "What was the {kind} called?; What was the {kind}'s name?",
            "The {kind} was called {hero}.",
        ),
        ("Who was {hero}?; Who is {hero}?", "{hero} was {a kind}."),
        (
            "Who was {hero}'s friend?; Who helped {hero}?; Whom did {hero} meet?",
            "{hero}'s friend was {friend} the {fkind}.",
        ),
        ("What colour was the {thing}?; What color was the {thing}?", "The {thing} was {colour}."),
        ("Where did {hero} live?; Where did the {kind} live?", "{hero} lived {home}."),
        (
            "What did {hero} learn?; What is the moral?; What do we learn from it?",
            "{hero} learned that {moral}.",
        ),
    ):
        for first in (ask, about):
            turns, replies = f"{first} >> {question}", f"{STORY} >> {answer}"
            yield _intent(group, turns, replies, 0.12, key="{hero} {kind}")


def _unknown() -> Iterator[Intent]:
    group = "what it cannot know"
    yield _intent(
        group,
        """What is the capital of {country}?; Who is the president of {country}?; How many people
        live in {country}?; Where is {country}?; How far is it to {country}?; How do you say good
        morning in {language}?; Translate this into {language}.; Do you speak {language}?; Write
        {text} about {subject}.; Write {text} for me.; Can you write {text} about {subject}?; How do
        I {task}?; Can you teach me to {task}?; Can you help me to {task}?; Explain {subject}.;
        Explain {subject} to me.; Tell me about {subject}.; What do you think about {subject}?; Why
        is {subject} important?; Who invented {subject}?; When was {name} born?; Who wrote the book
        about {name}?; What will the weather be like tomorrow?; What time is it?; What is the news
        today?; Who won the game?; What is {a} times {b}?; What is the square root of {a}?; Wie geht
        es dir?; Comment ça va?; ¿Cómo estás?""",
        DONT_KNOW,
        1.2,
        _numbers(2, 12, "a", "b"),
    )
    yield _intent(
        group,
        """What colour is {a noun}?; What color is {a noun}?; What does {a noun} say?; What is the
        opposite of {noun}?; How many legs does {a noun} have?; Who invented the {noun}?; What is
        {a noun}?; How does {a noun} work?; Where can I buy {a noun}?; How much does {a noun}
        cost?""",
        DONT_KNOW,
        0.8,
        derive=_derive_unknown,
    )


INTENTS = (
    *_small_talk(),
    *_colours(),
    *_counting(),
    *_sums(),
    *_lessons(),
    *_facts(),
    *_stories(),
    *_unknown(),
)
_WEIGHTS = [intent.weight for intent in INTENTS]
_LATER_WEIGHTS = [0.0 if intent.unless_told else intent.weight for intent in INTENTS]
_FILLERS = tuple(i for i in INTENTS if len(i.turns) == 1 and i.group in ("colours", "sums"))


def held_out(key: str) -> bool:
    """Whether a prompt, or a combination of values, is kept for the evaluation: one in ten is."""
    return key != "" and zlib.crc32(key.encode()) % 10 == 0


def _plain(prompt: str) -> str:
    return prompt.strip().rstrip(".?! ")


@dataclass(frozen=True)
class Exchange:
    """One intent played out, and what is held out about it, the main key first."""

    intent: Intent
    messages: tuple[Message, ...]
    keys: tuple[str, ...]


def _asked_story(prompt: str, bound: Bound) -> Bound:
    """The values that the prompt itself gives a story."""
    return {s.variable: bound[s.variable] for s in _slots(prompt) if s.variable in bound}


def _exchange(rng: Random, intent: Intent) -> Exchange:
    bound = intent.draw(rng)
    style = rng.random()
    messages: list[Message] = []
    keys: list[str] = []
    for templates, replies in zip(intent.turns, intent.replies, strict=True):
        template, reply = rng.choice(templates), rng.choice(replies)
        prompt = fill(rng, template, bound)
        if style < 0.2:
            prompt = _plain(prompt)
        if style < 0.1 and "hero" not in bound:
            prompt = prompt.lower()
            bound = {k: v.lower() if _domain(k) == "name" else v for k, v in bound.items()}
        if reply == STORY:
            answer, bound = story(rng, _asked_story(template, bound))
            keys.append("{hero} {kind}".format_map(bound))
        else:
            derived = intent.derive(bound)
            if derived is None:
                return _exchange(rng, intent)
            answer, bound = fill(rng, reply, derived), derived
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": answer})
    if intent.key is None:
        prompts = [_plain(message["content"]).lower() for message in messages[::2]]
        keys = prompts[::-1] + keys
    else:
        keys = intent.key.format_map(bound).split("; ") + keys
    return Exchange(intent, tuple(messages), tuple(keys))


def _random_exchange(
    rng: Random, intents: Sequence[Intent], weights: Sequence[float], held: bool
) -> Exchange:
    while True:
        exchange = _exchange(rng, rng.choices(intents, weights)[0])
        if held_out(exchange.keys[0]) if held else not any(map(held_out, exchange.keys)):
            return exchange


def dialogue(rng: Random, held: bool = False) -> tuple[str, list[Message]]:
    """A random chat of one to three exchanges, and the group of its last question. If `held`, that
    question is one which no chat of the training text contains."""
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    length = rng.choices((1, 2, 3), (6, 3, 1))[0]
    for at in range(length):
        weights = _WEIGHTS if at == 0 else _LATER_WEIGHTS
        exchange = _random_exchange(rng, INTENTS, weights, held and at == length - 1)
        turns = list(exchange.messages)
        if exchange.intent.may_wait and len(turns) > 2 and rng.random() < 0.3:
            turns[2:2] = _random_exchange(rng, _FILLERS, [1.0] * len(_FILLERS), False).messages
        messages += turns
    return exchange.intent.group, messages


def plain_story(rng: Random, held: bool = False) -> tuple[str, Bound]:
    """A random story. Its pair of hero and kind is held out from the training text if `held`."""
    while True:
        text, bound = story(rng)
        if held_out("{hero} {kind}".format_map(bound)) == held:
            return text, bound


def _understand(prompt: str, templates: Sequence[str], bound: Bound) -> Iterator[tuple[str, Bound]]:
    text = _plain(prompt)
    for template in templates:
        for end, found in _match(_plain(template), text, 0, bound, prompt=True):
            if end == len(text):
                yield template, found


def _contexts(intent: Intent, earlier: Sequence[Message]) -> Iterator[Bound]:
    """The values that the latest earlier turn which opens this intent gives its last turn."""
    if len(intent.turns) == 1:
        yield {}
        return
    for at in reversed(range(len(earlier))):
        if earlier[at]["role"] != "user":
            continue
        opened = False
        for template, bound in _understand(earlier[at]["content"], intent.turns[0], {}):
            opened = True
            if STORY in intent.replies[0]:
                story_text = earlier[at + 1]["content"]
                bound, problems = read_story(story_text, _asked_story(template, bound), whole=True)
                if problems:
                    continue
            yield bound
        if opened:
            return


def _readings(messages: Sequence[Message]) -> Iterator[tuple[Intent, str, Bound]]:
    """Every intent that the last message can have, with its template and the values in it."""
    for intent in INTENTS:
        for context in _contexts(intent, messages[:-1]):
            for template, bound in _understand(messages[-1]["content"], intent.turns[-1], context):
                derived = intent.derive(bound)
                if derived is not None:
                    yield intent, template, derived


def check_answer(messages: Sequence[Message], answer: str) -> bool:
    """Whether the answer to the last message is right. The expected answer is worked out from the
    messages alone; a question outside the grammar has no right answer."""
    readings = list(_readings(messages))
    told = any(len(intent.turns) > 1 for intent, _, _ in readings)
    for intent, template, bound in readings:
        if intent.unless_told and told:
            continue
        for reply in intent.replies[-1]:
            if reply == STORY:
                if not check_story(answer, _asked_story(template, bound), whole=True):
                    return True
            elif any(end == len(answer) for end, _ in _match(reply, answer, 0, bound)):
                return True
    return False


def main() -> None:
    rng = Random(0)
    for _ in range(2):
        print(plain_story(rng)[0], end="\n\n---\n\n")
    for _ in range(8):
        for message in dialogue(rng)[1]:
            print(f"{message['role']}: {message['content']}")
        print()


if __name__ == "__main__":
    main()
