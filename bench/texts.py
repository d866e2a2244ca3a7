"""Plain texts for perplexity and calibration, out of packages that carry some. Nothing of them is kept in this project.

    pip download --no-deps gensim==4.4.0
    pip download --no-deps --no-binary :all: sentencepiece==0.2.3
    python bench/texts.py gensim-4.4.0-*.whl sentencepiece-0.2.3.tar.gz --out TEXTS

writes TEXTS/wiki.txt (about a hundred articles of the English Wikipedia, CC BY-SA, ~2.9 MB) and TEXTS/botchan.txt (a
novel, public domain). The packages are read as archives and never installed.
"""

from __future__ import annotations

import argparse
import bz2
import html
import re
import sys
import tarfile
import zipfile
from pathlib import Path

WIKI = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
NOVEL = "test/botchan.txt"

_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_INNER = {  # innermost first, again and again until nothing is left
    re.compile(r"\{\{[^{}]*\}\}"): "",
    re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL): "",
    re.compile(r"\[\[(?:File|Image|Category):[^\[\]]*\]\]", re.IGNORECASE): "",
    re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"): r"\1",
}
_ONCE = {
    re.compile(r"<!--.*?-->", re.DOTALL): "",
    re.compile(r"<(ref|math|gallery|timeline|code|pre)\b[^>]*?/>", re.IGNORECASE): "",
    re.compile(r"<(ref|math|gallery|timeline|code|pre)\b[^>]*>.*?</\1>", re.DOTALL | re.IGNORECASE): "",
}
_LAST = {
    re.compile(r"\[https?://\S+ ([^\]]*)\]"): r"\1",
    re.compile(r"\[https?://\S+\]"): "",
    re.compile(r"</?[a-zA-Z][^<>]*>"): "",
    re.compile(r"'{2,}"): "",
    re.compile(r"^=+ *(.*?) *=+ *$", re.MULTILINE): r"\1",
    re.compile(r"^[*#:;|!{}].*$", re.MULTILINE): "",
    re.compile(r"[ \t]+"): " ",
    re.compile(r"\n{3,}"): "\n\n",
}


def plain_text(wikitext: str) -> str:
    """Prose of one article: templates, tables, references, lists and markup are left out."""
    text = html.unescape(html.unescape(wikitext)).replace("\xa0", " ")
    for pattern, new in _ONCE.items():
        text = pattern.sub(new, text)
    for pattern, new in _INNER.items():
        before = None
        while before != text:
            before, text = text, pattern.sub(new, text)
    for pattern, new in _LAST.items():
        text = pattern.sub(new, text)
    return text.strip()


def wiki_text(wheel: Path) -> str:
    """Articles of the excerpt in the gensim wheel, redirects left out, each under its title."""
    with zipfile.ZipFile(wheel) as archive:
        xml = bz2.decompress(archive.read(WIKI)).decode("utf-8")
    articles = []
    for title, body in _PAGE.findall(xml):
        if ":" in title or body.lstrip().lower().startswith("#redirect"):
            continue
        text = plain_text(body)
        if len(text) > 1000:
            articles.append(f"{html.unescape(title)}\n\n{text}")
    return "\n\n".join(articles) + "\n"


def novel_text(sdist: Path) -> str:
    """The novel in the sentencepiece sdist without its licence header and footer."""
    with tarfile.open(sdist) as archive:
        name = next(n for n in archive.getnames() if n.endswith(NOVEL))
        file = archive.extractfile(name)
        assert file is not None
        text = file.read().decode("utf-8-sig").replace("\r\n", "\n")
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*\n", text)
    end = re.search(r"\*\*\* ?END OF|End of (?:the )?Project Gutenberg", text)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path, help="the gensim wheel, the sentencepiece sdist")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for package in given.packages:
        if package.name.startswith("gensim") and package.suffix == ".whl":
            name, text = "wiki.txt", wiki_text(package)
        elif package.name.startswith("sentencepiece") and package.name.endswith(".tar.gz"):
            name, text = "botchan.txt", novel_text(package)
        else:
            sys.exit(f"{package}: neither a gensim wheel nor a sentencepiece sdist")
        (given.out / name).write_text(text, encoding="utf-8")
        print(f"{given.out / name}: {len(text):,} characters")


if __name__ == "__main__":
    main()
