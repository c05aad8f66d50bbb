"""What the site has beside the pages of docs/: the list of every error message, made from the
source, and the files that pages link to outside of docs/ (results of benchmarks, examples).

A page says `../benchmarks/results/peers.md`, which leads there on a code host. In the site the same
file lies at `benchmarks/results/peers.md`, beside the pages.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))
import messages

#: A link that leaves docs/, of Markdown, up to its anchor.
_OUTSIDE = re.compile(r"(\]\()\.\./([^)#\s]+)")
_INSIDE = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
#: Code within a line, and options of a command in it.
_CODE = re.compile(r"(?<!<span></span>)<code>[^<]*</code>")
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_APART = "---\nsearch:\n  exclude: true\n---\n\n"


def listing(path: str, text: str) -> str:
    """A page of a Python file, with an anchor `L12` for each line."""
    lines = [
        f'<span id="L{number}">{html.escape(line)}</span>'
        for number, line in enumerate(text.splitlines(), 1)
    ]
    return f"{_APART}# {path}\n\n<pre>{chr(10).join(lines)}</pre>\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the messages, each file that a page links to outside of docs/, and what it links to. A
    Python file becomes a page with an anchor for each line.
    """
    files.append(File.generated(config, "messages.md", content=messages.page()))
    root = Path(config["docs_dir"]).parent
    texts = [
        Path(file.abs_src_path).read_text(encoding="utf-8")
        for file in files.documentation_pages()
        if file.abs_src_path is not None
    ]
    waiting = {path for text in texts for _, path in _OUTSIDE.findall(text)}
    known: set[str] = set()
    apart = InclusionLevel.NOT_IN_NAV
    while waiting - known:
        path = (waiting - known).pop()
        known.add(path)
        source = root / path
        if not source.is_file():
            continue  # mkdocs says so, as of any other link
        if source.suffix == ".py":
            content = listing(path, source.read_text(encoding="utf-8"))
            made = File.generated(config, f"{path}.md", content=content, inclusion=apart)
        else:
            made = File.generated(config, path, abs_src_path=str(source), inclusion=apart)
        files.append(made)
        if source.suffix == ".md":
            folder = source.parent.relative_to(root)
            links = _INSIDE.findall(source.read_text(encoding="utf-8"))
            waiting |= {(folder / link).as_posix() for link in links}
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ lead to what the site has of them."""
    if "/" in page.file.src_uri:
        return markdown
    return _OUTSIDE.sub(
        lambda link: f"{link[1]}{link[2]}{'.md' if link[2].endswith('.py') else ''}", markdown
    )


def on_page_content(page_html: str, **_: Any) -> str:
    """An option such as `--offload-optimizer` is not broken at its hyphens (`flag` in site.css)."""
    return _CODE.sub(lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), page_html)
