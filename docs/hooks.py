"""MkDocs hooks: README, changelog, citation and notebooks become pages, pages get what they include (`docs/tables.py`), links out of docs/
lead to the repository, and `llms.txt` lists all pages.

The repository is `Source` among the URLs in pyproject.toml.  `docs/theme` has the theme's link to it without the part that asks GitHub for
the number of stars.
"""

import pathlib
import posixpath
import re
import tomllib

import notebooks
import tables
import yaml
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CITATION.cff": "citing.md"}


def on_config(config):
    config.repo_url, config.repo_name = SOURCE, SOURCE.removeprefix("https://github.com/")
    return config


def on_files(files, config):
    texts = {path: (ROOT / path).read_text() for path in PAGES} | {"CITATION.cff": citation()}
    contents = {PAGES[path]: text.replace("](docs/", "](") for path, text in texts.items()}
    for path in sorted(notebooks.FOLDER.glob("*.ipynb")):
        text, pictures = notebooks.page(path)
        contents |= {f"notebooks/{name}": content for name, content in {f"{path.stem}.md": text, **pictures}.items()}
    for name, content in contents.items():
        files.append(File.generated(config, name, content=content))


def citation() -> str:
    it = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    authors = " and ".join(author["name"] for author in it["authors"])
    fields = {"title": it["title"].replace(": ", ":\n    "), "author": f"{{{authors}}}"}
    fields |= {"version": it["version"], "url": it["repository-code"]}
    lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"# Citing\n\n{it['message']} The licence is {it['license']}.\n\n```bibtex\n@software{{jaxext,\n{lines}\n}}\n```\n"


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    folder = "" if uri in PAGES.values() else posixpath.join("docs", posixpath.dirname(uri))

    def link(match):
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path in PAGES:
            return f"[{text}]({posixpath.relpath(f'docs/{PAGES[path]}', folder or 'docs')}{'#' if anchor else ''}{anchor})"
        if path.startswith("docs/notebooks/"):
            return f"[{text}]({target.replace('.ipynb', '.md')})"
        if path.startswith("docs/") or files.get_file_from_path(path) or not (ROOT / path).exists() or target.startswith("#"):
            return match[0]  # a page, or elsewhere; MkDocs says which are broken
        return f"[{text}]({SOURCE}/blob/main/{path})"

    return tables.LINK.sub(link, tables.expanded(markdown, posixpath.dirname(uri)))


def on_nav(nav, config, files):
    on_nav.pages = nav.pages


def on_post_build(config):
    """Write llms.txt: a line for each page, with its first sentence."""
    lines = [f"- [{page.title}]({page.url}): {summary(page)}" for page in on_nav.pages]
    text = f"# {config.site_name}\n\n> {config.site_description}\n\n## Pages\n\n" + "\n".join(lines) + "\n"
    (pathlib.Path(config.site_dir) / "llms.txt").write_text(text)


def summary(page) -> str:
    """Return the first sentence of a page, without links.  Raises ValueError if it has none."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"<!--.*?-->|^```.*?^```", "", page.markdown, flags=re.DOTALL | re.MULTILINE))
    prose = (" ".join(tables.LINK.sub(r"\1", text).split()) for text in paragraphs if re.match(r"[A-Za-z`\[*]", text))
    if not (first := next(prose, "")):
        raise ValueError(f"llms.txt: {page.file.src_uri} has no sentence")
    return re.split(r"(?<=\.) ", re.sub(r"^\*\*Symptom\.\*\* |\*\*", "", first))[0].removesuffix(":")
