"""The decision tree of docs/choosing.md: the questions from top to bottom, and the option that each answer sets."""

from __future__ import annotations

from collections.abc import Sequence

from .svg import MARGIN, WIDTH, Drawing

#: Where the answers begin, where those to a question behind an answer do, and where the options do.
ANSWER, FURTHER, OPTION = MARGIN + 24, MARGIN + 50, 270
#: The height of a line of answers.
ROW = 21

Answer = tuple[str, str]
#: Each question with what it chooses, and its answers, of which some have further ones.
QUESTIONS: Sequence[tuple[str, str, Sequence[tuple[Answer, Sequence[Answer]]]]] = (
    (
        "Which calls must not overlap?",
        "the key",
        (
            (("equal calls", "set nothing"), ()),
            (("calls for the same account", 'lock_args=["account_id"]'), ()),
            (("all calls of the task", "lock_args=()"), ()),
            (("calls of several tasks, other code", 'lock_key="stock:{sku}"'), ()),
        ),
    ),
    (
        "Is a second call worth queueing?",
        "the scope",
        (
            (("yes, each call is its own request", "set nothing"), ()),
            (
                ("no, one job is enough", 'lock_scope="job"'),
                (("… for at least an hour", "lock_window=3600"),),
            ),
            (
                ("one, to see the last change", 'lock_scope="queue"'),
                (
                    ("… with the newest arguments", 'lock_arguments="latest"'),
                    ("… as a batch of all calls", 'lock_arguments="all"'),
                    ("… once the calls have stopped", "lock_debounce=5"),
                ),
            ),
        ),
    ),
    (
        "What if a call finds the key held?",
        "the policy",
        (
            (("it is not needed", 'lock_on_conflict="skip"'), ()),
            (("it runs afterwards", 'lock_on_conflict="wait"'), ()),
            (("it fails, and its caller sees why", 'lock_on_conflict="raise"'), ()),
            (("it gets the result of that run", 'lock_on_conflict="join"'), ()),
            (("it ends that run", 'lock_on_conflict="replace"'), ()),
        ),
    ),
    (
        "Is one at a time too few, or too many?",
        "the limits",
        (
            (("three at once", "lock_limit=3"), ()),
            (("a hundred may begin each minute", 'lock_rate="100/m"'), ()),
            (("customers take turns", 'lock_fair="customer"'), ()),
        ),
    ),
)


def picture() -> Drawing:
    """The tree."""
    drawing = Drawing("A decision tree: which option to set, by key, scope, policy and limits")
    for number, (question, what, answers) in enumerate(QUESTIONS, 1):
        drawing.rect(MARGIN, drawing.top, WIDTH - 2 * MARGIN, 24, "band", 4)
        drawing.text(MARGIN + 8, drawing.top + 16.5, f"{number}. {question}", "text bold")
        drawing.text(WIDTH - MARGIN - 8, drawing.top + 16.5, what, "quiet small", "end")
        drawing.top += 24
        stem = drawing.top
        for answer, further in answers:
            _answer(drawing, answer, MARGIN + 10, stem, ANSWER)
            branch = drawing.top - 3
            for one in further:
                _answer(drawing, one, ANSWER + 10, branch, FURTHER)
        drawing.top += 12
    drawing.top -= 12
    return drawing


def _answer(drawing: Drawing, answer: Answer, left: float, above: float, right: float) -> None:
    """An answer with the line that leads to it, and its option."""
    words, option = answer
    middle = drawing.top + ROW / 2 + 1
    drawing.path(f"M{left:g} {above:g} V{middle:g} H{right - 5:g}", "quiet")
    drawing.text(right, middle + 4, words)
    drawing.text(OPTION, middle + 4, option, "quiet small" if option == "set nothing" else "accent code bold")
    drawing.top += ROW
