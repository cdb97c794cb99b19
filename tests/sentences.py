"""`python -m tests.sentences PAGE...`: print the sentences of Markdown pages that have more than 25 words."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 25

CODE_BLOCK = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
CODE = re.compile(r"`[^`]+`")
NEW_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>!]|\d+\.)\s?)")
"""An empty line, or the beginning of an item, a row of a table, a heading, a quotation or an image."""
END = re.compile(r"(?<=[.!?:])[\s)*\"]+(?=[A-Z`*(\"“\[]|$)")


def long_sentences(text: str) -> list[str]:
    """Return the sentences with more than MOST_WORDS words. A piece of code is one word, and so is a link's code."""
    return [sentence for sentence in _sentences(text) if len(sentence.split()) > MOST_WORDS]


def _sentences(text: str) -> Iterator[str]:
    text = COMMENT.sub("\n\n", CODE_BLOCK.sub("\n\n", text))
    text = CODE.sub("`code`", LINK.sub(r"\1", text))
    for block in NEW_BLOCK.split(text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            yield from END.split(" ".join(cell.split()))


if __name__ == "__main__":
    for page in sys.argv[1:]:
        for sentence in long_sentences(Path(page).read_text()):
            print(f"{page}: {len(sentence.split())} words: {sentence}")
