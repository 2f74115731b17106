"""What a clip can be, and the many ways to say it: used to draw, to word, to judge and to read a prompt back."""

import itertools
import random
import re
from typing import NamedTuple

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle")
MOTIONS = ("left", "right", "up", "down", "growing", "shrinking")
BACKGROUNDS = ("black", "white")

COLOUR_WORDS = {
    "red": ("red", "crimson", "scarlet"),
    "green": ("green", "emerald"),
    "blue": ("blue", "azure"),
    "yellow": ("yellow", "lemon"),
    "purple": ("purple", "violet"),
    "orange": ("orange", "tangerine"),
}
SHAPE_WORDS = {
    "circle": ("circle", "disc", "disk", "ball"),
    "square": ("square", "box"),
    "triangle": ("triangle", "pyramid"),
}
# Participle first, finite verb second: "a red circle moving right", "a red circle moves right".
MOTION_WORDS = {
    "left": (
        ("moving left", "moves left"),
        ("moving to the left", "moves to the left"),
        ("sliding to the left", "slides to the left"),
        ("drifting left", "drifts left"),
        ("going left", "goes left"),
        ("moving from right to left", "moves from right to left"),
    ),
    "right": (
        ("moving right", "moves right"),
        ("moving to the right", "moves to the right"),
        ("sliding to the right", "slides to the right"),
        ("drifting right", "drifts right"),
        ("going right", "goes right"),
        ("moving from left to right", "moves from left to right"),
    ),
    "up": (
        ("moving up", "moves up"),
        ("moving upwards", "moves upwards"),
        ("going up", "goes up"),
        ("drifting upwards", "drifts upwards"),
        ("rising", "rises"),
        ("moving from bottom to top", "moves from bottom to top"),
    ),
    "down": (
        ("moving down", "moves down"),
        ("moving downwards", "moves downwards"),
        ("going down", "goes down"),
        ("sliding downwards", "slides downwards"),
        ("falling", "falls"),
        ("sinking", "sinks"),
        ("moving from top to bottom", "moves from top to bottom"),
    ),
    "growing": (
        ("growing", "grows"),
        ("getting bigger", "gets bigger"),
        ("getting larger", "gets larger"),
        ("expanding", "expands"),
    ),
    "shrinking": (
        ("shrinking", "shrinks"),
        ("getting smaller", "gets smaller"),
        ("contracting", "contracts"),
    ),
}
BACKGROUND_WORDS = {
    "black": ("black", "dark"),
    "white": ("white", "bright"),
}
GROUND_PHRASES = (
    "on a {ground} background",
    "on {ground}",
    "against a {ground} background",
    "in front of a {ground} background",
    "over a {ground} backdrop",
    "with a {ground} background",
)
# {n}: noun phrase ("a red circle"), {ing} / {s}: the two verb forms, {g}: the background phrase.
SENTENCES = (
    "{n} {ing} {g}",
    "{n} {s} {g}",
    "{n} {ing}, {g}",
    "{n} is {ing} {g}",
    "{n} that {s} {g}",
    "{n}, {ing}, {g}",
    "{n} {g}, {ing}",
    "{g} {n} is {ing}",
    "{g}, {n} {s}",
    "a video of {n} {ing} {g}",
    "a clip showing {n} {ing} {g}",
    "an animation of {n} that {s} {g}",
    "{bare} {ing} {g}",
    "{bare}, {ing}, {g}",
    "there is {n} {g}. it is {ing}",
    "{n} {g}. it {s}",
    "{n} {ing}",
)
# Words the vocabulary does not hold, all one token to the model: whatever a person adds ("a shiny red circle").
FILLERS = ("shiny", "cute", "smooth")
FILLER_SHARE = 0.1


class Attributes(NamedTuple):
    """One clip by indices into `COLOURS`, `SHAPES`, `MOTIONS` and `BACKGROUNDS`; None where a prompt is silent."""

    colour: int | None
    shape: int | None
    motion: int | None
    background: int | None


def grid() -> list[Attributes]:
    """Every clip that can be asked for: 6 colours x 3 shapes x 6 motions x 2 backgrounds = 216."""
    sizes = (len(COLOURS), len(SHAPES), len(MOTIONS), len(BACKGROUNDS))
    return [Attributes(*indices) for indices in itertools.product(*map(range, sizes))]


def canonical(attributes: Attributes) -> str:
    """The plain wording, e.g. "a red circle moving right on a black background"."""
    colour, shape = COLOURS[attributes.colour], SHAPES[attributes.shape]
    verb = MOTION_WORDS[MOTIONS[attributes.motion]][0][0]
    return f"{_article(colour)} {colour} {shape} {verb} on a {BACKGROUNDS[attributes.background]} background"


def reword(attributes: Attributes, rng: random.Random) -> str:
    """One of several thousand ways to say `attributes`; a seventeenth of them leaves the background open."""
    colour = rng.choice(COLOUR_WORDS[COLOURS[attributes.colour]])
    shape = rng.choice(SHAPE_WORDS[SHAPES[attributes.shape]])
    participle, finite = rng.choice(MOTION_WORDS[MOTIONS[attributes.motion]])
    ground = rng.choice(BACKGROUND_WORDS[BACKGROUNDS[attributes.background]])
    article = rng.choice((_article(colour), _article(colour), "the"))
    thing = f"{colour} {shape}"
    if rng.random() < FILLER_SHARE:
        thing = f"{rng.choice(FILLERS)} {thing}"
    ground_phrase = rng.choice(GROUND_PHRASES).format(ground=ground)
    sentence = rng.choice(SENTENCES)
    return sentence.format(n=f"{article} {thing}", bare=thing, ing=participle, s=finite, g=ground_phrase)


def parse(prompt: str) -> Attributes:
    """Read a prompt back into attributes; longer phrases win, so "from left to right" is right. Unsaid is None."""
    words = " ".join(re.findall(r"[a-z0-9]+", prompt.lower()))
    return Attributes(*(_first_match(words, table) for table in _PHRASES))


def vocabulary() -> list[str]:
    """Every word that `reword` can use, fillers left out, in alphabetical order."""
    texts = [*SENTENCES, *GROUND_PHRASES]
    for table in (COLOUR_WORDS, SHAPE_WORDS, BACKGROUND_WORDS):
        texts += itertools.chain.from_iterable(table.values())
    texts += itertools.chain.from_iterable(itertools.chain.from_iterable(MOTION_WORDS.values()))
    text = re.sub(r"\{\w+\}", " ", " ".join(texts))
    return sorted({"a", "an", "the", *re.findall(r"[a-z]+", text)})


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _phrases(names: tuple[str, ...], table: dict[str, tuple[str, ...]]) -> list[tuple[str, int]]:
    pairs = [(phrase, index) for index, name in enumerate(names) for phrase in table[name]]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def _first_match(words: str, pairs: list[tuple[str, int]]) -> int | None:
    for phrase, index in pairs:
        if re.search(rf"\b{phrase}\b", words):
            return index
    return None


_MOTION_PHRASES = {
    name: tuple(itertools.chain.from_iterable(forms)) + ((name,) if name in MOTIONS[:4] else ())
    for name, forms in MOTION_WORDS.items()
}
_PHRASES = (
    _phrases(COLOURS, COLOUR_WORDS),
    _phrases(SHAPES, SHAPE_WORDS),
    _phrases(MOTIONS, _MOTION_PHRASES),
    _phrases(BACKGROUNDS, BACKGROUND_WORDS),
)
